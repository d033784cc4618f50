"""Phases that the memory model is compared on, and how a rank's peak is measured.

Measured is the sum of live bytes of torch's CPU allocator, read off its own events: every tensor of the rank from the
engines' construction to the end of the phase, temporaries inside operators included; not the process's resident size.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from megarl.megatron.parallel import Place
from megarl.megatron.role import Role as MegatronRole
from megarl.megatron.role import RoleSettings, Training
from megarl.models import ModelShape
from megarl.models.layout import Layout
from megarl.models.megatron_weights import checkpoint_sizes
from megarl.planner.memory_estimate import DeviceMemory, Load, peak
from megarl.planner.roles import PlannedRole
from megarl.recipe.role_sections import FreezeSection, LoraSection, MemorySection, OptimizerSection, ReferenceMemorySection
from megarl.schedule import Plan, Schedule, plan_phase
from tests.engine_cases import in_groups, random_batch, start_places
from tests.ranks import run_ranks

TRAINED = ("actor", "critic")
MARK = "the phase"  # in the profile

# config.json of models in which the layers, the vocabulary or a bias and a tied embedding weigh most.
MODELS: dict[str, dict[str, Any]] = {
    "layers": {
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 256,
    },
    "vocabulary": {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 8001,
    },
    "qwen2-tied": {
        "model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 8000,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 192, "vocab_size": 1000,
    },
    # The first layer has no experts.
    "experts": {
        "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 256,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
}  # fmt: skip
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}

LONG = ((16, 240), (24, 360), (8, 56), (16, 140))  # (prompt, completion) tokens of a data-parallel rank's sequences
EQUAL = ((32, 96),) * 16
FEWER = EQUAL[:8]  # two micro-batches of 512 tokens hold what four do; a large vocabulary takes its time for each
SHORT = ((4, 12),) * 4
PROMPTS = ((126, 2),) * 16
GROUPED = ((120, 8),) * 16


SELECTIVE = MemorySection(recompute="selective", recompute_modules=("core_attn", "mlp"))


@dataclass(frozen=True)
class Case:
    """One phase of `running` on one model, with every role of `layouts` resident; `lengths` for each data-parallel rank."""

    name: str
    model: str
    running: str
    update: bool
    layouts: Mapping[str, Layout]
    lengths: tuple[tuple[int, int], ...]
    max_tokens: int
    precision: str = "fp32"
    entropy_coefficient: float = 0.0
    lora: LoraSection | None = None
    savings: Mapping[str, MemorySection] = field(default_factory=dict)  # by role
    frozen: FreezeSection = FreezeSection()  # of the running role
    group_size: int | None = None  # of sequences that share their prompt; None: each has its own

    @property
    def config(self) -> dict[str, Any]:
        return {**MODELS[self.model], **HEADS}

    @property
    def layout(self) -> Layout:
        return self.layouts[self.running]

    @property
    def all_lengths(self) -> list[tuple[int, int]]:
        return list(self.lengths) * self.layout.data

    @property
    def totals(self) -> list[int]:
        return [sum(pair) for pair in self.all_lengths]

    def roles(self) -> dict[str, PlannedRole]:
        shape, bonus = ModelShape.from_config(self.config), self.entropy_coefficient > 0
        return {
            name: PlannedRole(
                name, shape, layout, self.precision, name in TRAINED, entropy_bonus=bonus and name == "actor",
                lora=self.lora, on_cpu=True, memory=self.savings.get(name, MemorySection()),
                freeze=self.frozen if name == self.running else FreezeSection(),
            )
            for name, layout in self.layouts.items()
        }  # fmt: skip

    def plan(self) -> Plan:
        schedule = Schedule(
            "phase",
            max_tokens=self.max_tokens,
            mini_batch=len(self.all_lengths) if self.update else None,
            share_prompts=self.group_size is not None,
        )
        groups = [sample // (self.group_size or 1) for sample in range(len(self.all_lengths))]
        prompts = [prompt for prompt, _ in self.all_lengths]
        return plan_phase(schedule, self.totals, self.layout, 0, groups=groups, prompts=prompts)

    def predicted(self) -> DeviceMemory:
        """What the memory model says of the fullest rank under the phase's plan."""
        roles, (mini_batch,) = self.roles(), self.plan().mini_batches
        micro_batches = [micro_batch for rank in mini_batch.micro_batches for micro_batch in rank]
        load = Load(
            self.update,
            slots=max(micro_batch.slots for micro_batch in micro_batches),
            head_tokens=max(
                sum(self.all_lengths[sample][1] for sample in micro_batch.samples) for micro_batch in micro_batches
            ),
            longest=max(sum(pair) for pair in self.lengths),
            num_micro_batches=mini_batch.num_micro_batches,
            copied_rows=max(micro_batch.rows_behind_prompts(self.totals) for micro_batch in micro_batches),
        )
        return peak(list(roles.values()), roles[self.running], load)


ONE, VIRTUAL, CONTEXT = Layout(), Layout(1, 2, 1, virtual_pipeline=2), Layout(context=2)
LORA = LoraSection(rank=8, alpha=8.0)
EXPERTS, EXPERT_TENSOR = Layout(data=2, expert=2), Layout(2, 1, 1, True, expert=2, expert_tensor=1)
UNEVEN = Layout(1, 2, 1, stages=(1, 3))
CASES = (
    Case("actor forward", "vocabulary", "actor", False, {"actor": ONE}, FEWER, 256),
    Case("actor forward, few completions", "layers", "actor", False, {"actor": ONE}, PROMPTS, 1024, "bf16"),
    Case("reference forward", "qwen3", "reference", False, {"reference": Layout(1, 2, 1)}, EQUAL, 1024, "bf16"),
    Case("actor update", "vocabulary", "actor", True, {"actor": ONE}, FEWER, 512, "bf16"),
    Case("actor update, long", "layers", "actor", True, {"actor": ONE}, LONG, 1024),
    Case("actor update, weights alone", "vocabulary", "actor", True, {"actor": Layout(1, 1, 2)}, SHORT, 32),
    Case("actor update, few completions", "vocabulary", "actor", True, {"actor": ONE}, PROMPTS, 1024, "bf16"),
    Case("actor update, tied, few completions", "qwen2-tied", "actor", True, {"actor": ONE}, PROMPTS, 1024, "bf16"),
    Case("actor update, tied", "qwen2-tied", "actor", True, {"actor": ONE}, FEWER, 512, "bf16"),
    Case("actor update, tied weights alone", "qwen2-tied", "actor", True, {"actor": ONE}, SHORT, 32, "bf16"),
    Case("actor update, entropy bonus", "qwen2-tied", "actor", True, {"actor": ONE}, FEWER, 512, entropy_coefficient=0.1),
    Case("actor update, tensor", "qwen3", "actor", True, {"actor": Layout(2, 1, 1)}, EQUAL, 1024),
    Case("actor update, sequence parallel", "qwen3", "actor", True, {"actor": Layout(2, 1, 1, True)}, EQUAL, 1024, "bf16"),
    Case("actor update, pipeline", "qwen2-tied", "actor", True, {"actor": Layout(1, 2, 1)}, EQUAL * 2, 1024),
    Case("actor update, virtual pipeline", "layers", "actor", True, {"actor": VIRTUAL}, EQUAL * 2, 1024),
    Case("actor update, context", "qwen2-tied", "actor", True, {"actor": CONTEXT}, EQUAL, 1024),
    Case("actor forward, context", "vocabulary", "actor", False, {"actor": CONTEXT}, FEWER, 256),
    Case("actor update, adapters", "qwen3", "actor", True, {"actor": ONE}, EQUAL, 1024, "bf16", lora=LORA),
    Case("actor update, adapters, tied", "qwen2-tied", "actor", True, {"actor": Layout(2)}, FEWER, 512, lora=LORA),
    Case("actor forward, adapters", "layers", "actor", False, {"actor": ONE}, PROMPTS, 1024, lora=LORA),
    Case("actor update, experts", "experts", "actor", True, {"actor": ONE}, EQUAL, 1024),
    Case("actor update, expert parallel", "experts", "actor", True, {"actor": EXPERTS}, EQUAL, 1024, "bf16"),
    Case("actor update, expert tensor 1", "experts", "actor", True, {"actor": EXPERT_TENSOR}, EQUAL, 1024),
    Case("actor update, experts' weights alone", "experts", "actor", True, {"actor": EXPERTS}, SHORT, 32),
    Case("actor forward, experts", "experts", "actor", False, {"actor": EXPERTS}, EQUAL, 1024),
    Case("actor update, uneven pipeline", "layers", "actor", True, {"actor": UNEVEN}, EQUAL * 2, 1024),
    Case("critic update", "qwen3", "critic", True, {"critic": ONE}, EQUAL, 1024, "bf16"),
    Case(
        "actor update beside critic and reference", "qwen3", "actor", True,
        {"actor": Layout(2, 2, 1), "critic": Layout(1, 2, 2), "reference": Layout(2, 2, 1)}, EQUAL * 2, 1024, "bf16",
    ),
    Case(
        "critic update beside actor and reference", "qwen3", "critic", True,
        {"actor": Layout(2, 2, 1), "critic": Layout(1, 2, 2), "reference": Layout(2, 2, 1)}, EQUAL * 2, 1024,
    ),
    Case("actor update, fp16", "layers", "actor", True, {"actor": ONE}, EQUAL, 1024, "fp16"),
    *(
        Case(f"actor update, {name}", "layers", "actor", True, {"actor": layout}, EQUAL, 1024, precision,
             savings={"actor": savings})
        for precision, layout in (("fp32", ONE), ("bf16", Layout(1, 2, 1)))
        for name, savings in {
            f"selective recompute, {precision}": SELECTIVE,
            f"full recompute, {precision}": MemorySection(recompute="full"),
            f"recompute of the feed-forward part, {precision}": SELECTIVE,
            f"activations on the host, {precision}": MemorySection(offload_activations=True),
            f"full recompute, inputs on the host, {precision}": MemorySection(recompute="full", offload_activations=True),
        }.items()
    ),
    Case("actor update, frozen layers", "layers", "actor", True, {"actor": ONE}, EQUAL, 1024,
         frozen=FreezeSection(embedding=True, layers=2)),
    Case("actor update, frozen embedding and head", "vocabulary", "actor", True, {"actor": ONE}, SHORT, 32, "bf16",
         frozen=FreezeSection(embedding=True, head=True)),
    Case("actor update, frozen layers of two stages", "layers", "actor", True, {"actor": Layout(1, 2, 1)}, EQUAL, 1024,
         frozen=FreezeSection(layers=3)),
    Case("actor update, frozen norms", "layers", "actor", True, {"actor": ONE}, EQUAL, 1024, "bf16",
         frozen=FreezeSection(norms=True)),
    Case("actor update, shared prompts", "layers", "actor", True, {"actor": ONE}, GROUPED, 184, group_size=8),
    Case("reference forward, shared prompts", "qwen3", "reference", False, {"reference": ONE}, GROUPED, 184, group_size=8),
    Case("actor forward, optimizer on the host", "vocabulary", "actor", False, {"actor": ONE}, FEWER, 256, "bf16",
         savings={"actor": MemorySection(offload="optimizer")}),
    Case("actor update, critic and reference on the host", "qwen3", "actor", True,
         {"actor": ONE, "critic": ONE, "reference": ONE}, FEWER, 512, "bf16",
         savings={"critic": MemorySection(offload="all"), "reference": MemorySection(offload="all")}),
    Case("reference forward, actor on the host", "vocabulary", "reference", False,
         {"actor": ONE, "reference": ONE}, FEWER, 256, "bf16",
         savings={"actor": MemorySection(offload="all"), "reference": MemorySection(offload="all")}),
)  # fmt: skip


def write_model(
    config: Mapping[str, Any], directory: Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> None:
    """A random checkpoint with this `config.json`; `device` draws the weights."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(device).manual_seed(0)

    def weight(rows: int, columns: int) -> torch.Tensor:
        if columns == 1:
            return torch.ones(rows, dtype=dtype)
        return (torch.randn(rows, columns, generator=generator, device=device, dtype=dtype) * 0.02).cpu()

    sizes = checkpoint_sizes(ModelShape.from_config(dict(config)))
    tensors = {name: weight(rows, columns) for name, (rows, columns) in sizes.items()}
    save_file(tensors, directory / "model.safetensors")


def measure(cases: Sequence[Case], directory: Path) -> dict[str, list[int]]:
    """Peak bytes of every rank, by the case's name. Models are written to `directory`; ranks are started once for all cases
    of the same number."""
    for model in MODELS:
        write_model({**MODELS[model], **HEADS}, directory / model)
    measured: dict[str, list[int]] = {}
    for ranks in sorted({case.layout.ranks for case in cases}):
        group = [case for case in cases if case.layout.ranks == ranks]
        answers = run_ranks(measure_rank, ranks, group, str(directory))
        measured |= {case.name: [answer[number] for answer in answers] for number, case in enumerate(group)}
    return measured


def measure_rank(cases: Sequence[Case], directory: str) -> list[int]:
    """Peak bytes of this rank in each case."""
    places = start_places(dict.fromkeys(layout for case in cases for layout in case.layouts.values()))
    return [measure_case(case, f"{directory}/{case.model}", places) for case in cases]


def measure_case(case: Case, directory: str, places: Mapping[Layout, Place]) -> int:
    """Peak bytes of the phase, after the engines were built and every trained role took a small update, which makes the
    optimizer's states."""
    gc.collect()  # the engines of the case before
    shape = ModelShape.from_config(case.config)
    batch = in_groups(random_batch(shape.vocab, case.all_lengths), case.group_size or 1)
    (mini_batch,) = case.plan().mini_batches
    # On CPUs without bf16 units oneDNN holds the operands of its products once more, in fp32; torch's own kernels hold
    # nothing, as a GPU's do.
    own_kernels = torch.backends.mkldnn.flags(enabled=False)
    with own_kernels, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engines = {}
        for name, layout in case.layouts.items():
            frozen, memory = _sections(case, name)
            training = Training(OptimizerSection(lr=1e-3), lora=case.lora, frozen=frozen) if name in TRAINED else None
            settings = RoleSettings(case.precision, 1.0)
            engines[name] = MegatronRole(name, shape, directory, places[layout], settings, training, memory)
        for engine in engines.values():
            if engine.optimizer is not None:
                with engine.present(training=True):
                    _take_small_update(engine, shape.vocab)
        running = engines[case.running]
        with record_function(MARK), running.present(training=case.update):
            if case.update:
                running.update(batch, mini_batch, _objective(case.entropy_coefficient))
            else:
                running.forward(batch, mini_batch)
    return highest_total(profiler.profiler.kineto_results.experimental_event_tree())


def _sections(case: Case, name: str) -> tuple[FreezeSection, MemorySection | ReferenceMemorySection]:
    """The role's sections for the case's savings and frozen weights."""
    savings = case.savings.get(name, MemorySection())
    if name == "reference":
        return FreezeSection(), ReferenceMemorySection.model_validate({"offload": savings.offload})
    return case.frozen if name == case.running else FreezeSection(), savings


def _take_small_update(engine: MegatronRole, vocab: int) -> None:
    layout = engine.place.layout
    size = layout.data * layout.micro_batch_step
    (mini_batch,) = plan_phase(Schedule("warm", sequences=1, mini_batch=size), [2] * size, layout, 0).mini_batches
    engine.update(random_batch(vocab, [(1, 1)] * size), mini_batch, _objective(0.0))


def _objective(entropy_coefficient: float) -> Any:
    def objective(micro: Any, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = sum(output.square().mean() for name, output in outputs.items() if name != "entropy")
        if entropy_coefficient and "entropy" in outputs:
            loss = loss - entropy_coefficient * outputs["entropy"].mean()
        assert isinstance(loss, torch.Tensor)
        return loss, {"loss": loss.detach()}

    return objective


def highest_total(tree: list[Any]) -> int:
    """Highest sum of live bytes over a profile's allocation events from its MARK on.

    Threads that are not profiled do not report what they free: gloo's workers drop their copies last. Such a copy, allocated
    inside a collective, is taken as freed when the call returns; anything else at the latest when its address is used again.
    """
    events: list[tuple[int, int, int]] = []  # time, address, bytes (negative: freed)
    ends: dict[int, int] = {}  # number of an allocation inside a collective -> when the call returned
    begin = None
    waiting = [(event, None) for event in tree]
    while waiting:
        event, collective_end = waiting.pop()
        if event.tag == _EventType.Allocation:
            if collective_end is not None:
                ends[len(events)] = collective_end
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.tag == _EventType.TorchOp and event.name == MARK:
            begin = event.start_time_ns
            waiting += [(child, collective_end) for child in event.children]
        elif event.children:
            inside = collective_end
            if inside is None and event.tag == _EventType.TorchOp and event.name.startswith("c10d::"):
                inside = event.end_time_ns
            waiting += [(child, inside) for child in event.children]
    order = np.argsort([time for time, _, _ in events], kind="stable").tolist()
    assert begin is not None, "the profile has no mark"
    return _replay(events, order, ends, begin)


def _replay(events: list[tuple[int, int, int]], order: list[int], ends: dict[int, int], begin: int) -> int:
    live: dict[int, int] = {}
    escaping: list[tuple[int, int]] = []  # (end of its collective, address)
    total = highest = 0
    for number in order:
        time, address, size = events[number]
        for end, escaped in [entry for entry in escaping if entry[0] <= time]:
            escaping.remove((end, escaped))
            total -= live.pop(escaped, 0)
        total -= live.pop(address, 0)
        escaping = [entry for entry in escaping if entry[1] != address]
        if size > 0:
            live[address] = size
            total += size
            if number in ends:
                escaping.append((ends[number], address))
        if time >= begin:
            highest = max(highest, total)
    return highest


def peak_of(run: Callable[[], None]) -> int:
    """Highest sum of live bytes of what `run` allocates."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function(MARK):
        run()
    return highest_total(profiler.profiler.kineto_results.experimental_event_tree())
