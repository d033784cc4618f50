# Every target does its own set-up; a second set-up is instant.
PYTHON := .venv/bin/python
PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest --durations=40
# The models that the shipped recipes name; both are made here, from packages alone.
MODEL := models/SmolLM2-135M-Instruct
TINY := models/tiny-qwen3
# A run directory of its own each time: a run never writes over another one.
RUN := quickstart-$(shell date +%Y%m%d-%H%M%S)
MEGATRON_019 := .venv-megatron-0.19

.PHONY: setup quickstart test test-nightly test-learning test-megatron-0.19 lint format

setup:
	@bash launch/setup.sh
	@test -f $(MODEL)/config.json || $(PYTHON) launch/prepare_smollm2.py $(MODEL)
	@test -f $(TINY)/config.json || $(PYTHON) -m tests.tiny_models $(TINY)

# A CPU without bf16 units emulates them, many times slower than fp32; `megarl doctor RECIPE` says the same.
PRECISION := $(shell test -e /dev/nvidiactl || grep -qwE 'avx512_bf16|amx_bf16|bf16' /proc/cpuinfo && echo bf16 || echo fp32)

quickstart: setup
	.venv/bin/megarl train recipes/quickstart.yaml run.name=$(RUN) trainer.precision=$(PRECISION)
	.venv/bin/megarl report runs/$(RUN)

# Three streams, as most tests wait for processes, engines and deadlines more than they compute: one stream alone leaves one of
# two cores with nothing to do. Each has tests that start vLLM, Ray or ranks, and tests of pure code.
SECOND := $(patsubst %,tests/%,algorithm cluster data models planner platform project recipe reward schedule \
	telemetry megatron/test_checkpoint.py megatron/test_memory.py)
THIRD := $(patsubst %,tests/%,rollout weight_sync)
CHOSEN := -m 'not gpu and not learning and not nightly'

test: setup
	@bash launch/setup.sh --tests
	@logs=$$(mktemp -d); $(PYTEST) $(CHOSEN) $(SECOND) > $$logs/second 2>&1 & second=$$!; \
	$(PYTEST) $(CHOSEN) $(THIRD) > $$logs/third 2>&1 & third=$$!; \
	$(PYTEST) $(CHOSEN) $(addprefix --ignore=,$(SECOND) $(THIRD)); code=$$?; \
	wait $$second || code=1; wait $$third || code=1; \
	cat $$logs/second $$logs/third; rm -r $$logs; exit $$code

# What takes too long for every commit: all cases of the suites of which CI runs some, and policies that have to improve.
test-nightly: setup
	@bash launch/setup.sh --tests
	$(PYTEST) -m 'nightly and not gpu'

# Those policies alone.
test-learning: setup
	$(PYTEST) -s -m learning

# The engine and platform tests against the newest megatron-core. It declares Python >= 3.12 and runs on 3.11; it is put in a
# directory of its own, ahead of .venv on the path of the tests and of every rank that they start. Of the layout matrix, and of
# what else has several cases, it runs one of each kind: the others are marked slow. OWN are tests of megarl's own parts,
# between which and megatron-core stand the tests of the layouts, the families' logits and the checkpoints: those run, and so
# do all others, in two streams.
OWN := adapter_export attention divergence logprobs objective plans segments teaching turns weights
BESIDE_019 := $(patsubst %,tests/megatron/test_%.py,checkpoint experts finite freeze golden overlap place precision)
OF_MEGATRON := $(filter-out $(OWN:%=tests/megatron/test_%.py),$(wildcard tests/megatron/test_*.py)) tests/platform/test_cpu.py

test-megatron-0.19: setup
	test -d $(MEGATRON_019)/megatron || $(PYTHON) -m pip install --quiet --target $(MEGATRON_019) --no-deps \
		--ignore-requires-python --only-binary=:all: megatron-core==0.19.2
	PYTHONPATH=$(CURDIR)/$(MEGATRON_019) $(PYTHON) -c \
		"from importlib.metadata import version as v; assert v('megatron-core') == '0.19.2', v('megatron-core')"
	@log=$$(mktemp); export PYTHONPATH=$(CURDIR)/$(MEGATRON_019); \
	$(PYTEST) $(CHOSEN:%'=% and not slow') $(BESIDE_019) > $$log 2>&1 & beside=$$!; \
	$(PYTEST) $(CHOSEN:%'=% and not slow') $(filter-out $(BESIDE_019),$(OF_MEGATRON)); main=$$?; \
	wait $$beside; beside=$$?; cat $$log; rm $$log; \
	[ $$main -eq 0 ] && [ $$beside -eq 0 ]

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: setup
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
