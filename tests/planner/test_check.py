"""`megarl check` with a forecast, as a user or a program runs it. The recipes for clusters are legal, are placed on their
nodes, and fit their devices; models are a config.json alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from megarl.cli import app
from megarl.planner.placement import PlacementError, find_placement
from megarl.recipe import load_recipe
from megarl.recipe.load import NOT_RUN
from tests.cluster_cases import MODELS
from tests.planner_cases import document_of, forecast_of, write_qwen, write_small


def check(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_table_shows_the_forecast(folder: Path) -> None:
    file = write_qwen(folder)
    result = check(file, "--plan", "--lengths", "long-tail", "--seed", "4")
    assert result.exit_code == 0
    assert "long-tail completions up to 4096 tokens, seed 4" in result.output
    for phase in forecast_of(file, lengths="long-tail", seed=4).phases:
        line = next(line for line in result.output.splitlines() if line.strip().startswith(phase.phase))
        quality = phase.quality
        cells = line.split()
        assert str(quality.num_micro_batches) in cells
        for number in (f"{quality.useful_share:.3f}", f"{quality.imbalance:.3f}", f"{quality.bubble_share:.1%}"):
            assert number in cells
        assert f"{quality.efficiency:.3f}" in cells and f"TP4 x PP1 x DP{phase.role.layout.data}" in line


def test_a_check_and_a_plan_need_nothing_heavy(folder: Path) -> None:
    """No torch, so no device either, and without a plan no numpy; and this, not a stopwatch, keeps them quick. Also where
    the recipe has options of Megatron's and vLLM's, whose names are read from their source."""
    good, bad = write_qwen(folder), folder / "bad.yaml"
    bad.write_text("run: 3\n")
    heavy = ["torch", "transformers", "ray", "vllm", "megatron", "datasets", "reasoning_gym", "huggingface_hub"]
    options = ["trainer.megatron.bias_dropout_fusion=true", "rollout.engine_args.block_size=32"]
    program = f"""
import sys
from megarl.cli import app
for heavy, calls in (
    ({[*heavy, "numpy"]}, (({[str(good), *options]}, 0), ([{str(bad)!r}], 2))),
    ({heavy}, (([{str(good)!r}, "--plan", "--suggest"], 0), ([{str(good)!r}, "--json"], 0))),
):
    for arguments, status in calls:
        try:
            app(["check", *arguments])
        except SystemExit as end:
            assert (end.code or 0) == status, end.code
    print("HEAVY", [name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("HEAVY []") == 2


@pytest.mark.parametrize("options", [[], ["--plan"], ["--json"], ["--suggest", "device.memory_gib=80"]])
def test_one_illegal_recipe_stops_none_of_the_others(options: list[str], folder: Path) -> None:
    bad = folder / "bad.yaml"
    bad.write_text("run: 3\n")
    first, last = write_small(folder, ("run.name", "first"), name="a"), write_small(folder, ("run.name", "last"), name="b")
    result = check(first, bad, last, *options)
    assert result.exit_code == 2
    assert "first" in result.output and "last" in result.output and "model" in result.output
    good = check(first, last, *options)
    assert good.exit_code == 0, good.output


def test_arguments_are_recipes_or_overrides(folder: Path) -> None:
    file = write_small(folder)
    odd = folder / "a=b.yaml"
    odd.write_text(file.read_text())
    assert check(file, "run.steps=0").exit_code == 2
    assert check("run.name=other", file, "run.steps=5").output.startswith("other: 5 steps")
    assert check(odd, "run.name=odd").output.startswith("odd: ")
    missing = check(file, "b.yaml")
    assert missing.exit_code == 2 and "does not exist" in missing.output and "ppo: 3 steps" in missing.output
    assert "no recipe among run.steps=3" in check("run.steps=3").output and check("run.steps=3").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json", "--lengths", "normal"], ["--lengths = 'normal'"]),
        (["--plan", "--tflops", "0"], ["--tflops = 0", "above 0"]),
        (["--plan", "--tflops", "nan"], ["--tflops = nan"]),
        (["--lengths", "uniform"], ["--lengths = uniform", "--plan"]),
        (["--seed", "3"], ["--seed = 3", "--plan"]),
        (["--tflops", "3"], ["--tflops = 3", "--plan"]),
        (["--plan", "--lengths", ""], ["--lengths = ''", "uniform, log-normal, long-tail"]),
        (["--suggest"], ["--suggest", "add device: {memory_gib: 80}"]),
    ],
)
def test_bad_input_is_named(arguments: list[str], words: list[str], folder: Path) -> None:
    result = check(write_small(folder), *arguments)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit) and "Traceback" not in result.output
    flat = " ".join(result.output.split())
    assert all(part in flat for part in words), result.output


def test_json_is_one_document_and_nothing_else(folder: Path) -> None:
    bad = folder / "bad.yaml"
    bad.write_text("run: 3\n")
    file = write_qwen(folder)
    result = check(file, bad, "--json", "--suggest", "--lengths", "uniform", "phases.actor_update.epochs=2")
    assert result.exit_code == 2
    document = json.loads(result.stdout)
    assert result.stderr == ""
    legal, illegal = document["recipes"]
    assert (legal["recipe"], legal["legal"], legal["name"]) == (str(file), True, "qwen")
    assert not illegal["legal"] and {violation["key"] for violation in illegal["violations"]} >= {"run", "model"}
    predicted = forecast_of(file, ["phases.actor_update.epochs=2"], lengths="uniform")
    assert list(legal["phases"]) == [phase.phase for phase in predicted.phases]
    for phase in predicted.phases:
        entry = legal["phases"][phase.phase]
        assert entry["efficiency"] == pytest.approx(phase.quality.efficiency)
        assert entry["schedule"]["max_tokens"] == 8192 and entry["layout"]["tensor"] == 4
        assert entry["seconds"] == pytest.approx(phase.seconds)
        for name, held in (("memory", phase.memory), ("worst_memory", phase.worst_memory)):
            parts: dict[str, Any] = dict(entry[name])
            assert parts.pop("total") == sum(parts.values()) == held.total
            assert parts["engine"] == 0 < predicted.job.engine_bytes and parts["weights"] == held.weights
    assert legal["device"]["peak_bytes"] == predicted.device_peak and legal["device"]["fits"] == predicted.fits
    assert {suggestion["key"] for suggestion in legal["suggestions"]} >= {
        "actor.layout",
        "rollout.tensor",
        "phases.actor_update.micro_batch",
    }


def test_what_fits_nowhere_is_an_answer_of_its_own(folder: Path) -> None:
    file = write_qwen(folder)
    result = check(file, "--suggest", "device.memory_gib=16")
    assert result.exit_code == 1
    assert "no suggestion: nothing fits 14.4 GiB usable" in result.output
    assert document_of(file, "--suggest", "device.memory_gib=16")["nothing_fits"].startswith("nothing fits 14.4 GiB")
    assert document_of(file, "--suggest")["nothing_fits"] is None


def test_a_way_out_is_suggested_where_an_automatic_cap_does_not_fit(folder: Path) -> None:
    file = write_qwen(folder)
    automatic = "phases.actor_update.micro_batch.max_tokens=auto"
    for stated, rule in (
        (["actor.layout={tensor: 1, pipeline: 1}"], "with everything else on the device"),
        (["device.kind=cpu", "rollout.kv_cache_bytes=60000000000"], "a smaller rollout.kv_cache_bytes"),
    ):
        result = check(file, automatic, *stated, "--suggest")
        assert result.exit_code == 2 and rule in result.output and "suggested:" in result.output
        (entry,) = json.loads(check(file, automatic, *stated, "--suggest", "--json").stdout)["recipes"]
        assert not entry["legal"] and entry["violations"][0]["value"] == "'auto'"
        chosen = [f"{suggestion['key']}={json.dumps(suggestion['value'])}" for suggestion in entry["suggestions"]]
        assert forecast_of(file, [automatic, *stated, *chosen]).fits
        # Another fault is not hidden behind suggestions.
        assert "suggested:" not in check(file, automatic, *stated, "run.steps=0", "--suggest").output


ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes" / "cluster").glob("*.yaml"))
CPU_RECIPES = sorted([*(ROOT / "recipes").glob("*.yaml"), *(ROOT / "recipes" / "cpu").glob("*.yaml")])
GPUS_OF_A_NODE = 8


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub cache of somebody who has fetched the models' config.json and nothing else."""
    for name, config in MODELS.items():
        model = tmp_path / f"models--{name.replace('/', '--')}"
        (model / "refs").mkdir(parents=True)
        (model / "refs" / "main").write_text("abc")
        (model / "snapshots" / "abc").mkdir(parents=True)
        (model / "snapshots" / "abc" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("hub_cache")
@pytest.mark.parametrize("file", [pytest.param(file, id=file.stem) for file in RECIPES])
def test_a_recipe_for_a_cluster_fits_it(file: Path) -> None:
    """Planned on a machine that has the config.json of each model alone."""
    recipe = yaml.safe_load(file.read_text())
    named = re.search(r"-(\d+)gpus$", file.stem)
    assert named is not None and int(named[1]) == recipe["trainer"]["ranks"]
    document = document_of(file, "--devices-per-node", str(GPUS_OF_A_NODE))
    assert document["device"]["fits"] is True, document["device"]
    assert 0 < document["device"]["engine_share"] <= document["device"]["safe_memory_utilization"]
    assert document["placement"]["trainer_nodes"] == recipe["trainer"]["ranks"] // GPUS_OF_A_NODE, document["placement"]
    assert f"not checked: weights and tokenizer of model.path = {recipe['model']['path']}" in document["not_checked"]
    assert sum(NOT_RUN in line for line in document["not_checked"]) == 1
    # fp32 gradients of bf16 weights, and no second copy of them.
    worst = document["device"]["worst_memory"]["actor_update"]
    assert 1.9 < worst["gradients"] / worst["weights"] < 2.2
    host = document["placement"]["host_memory"]["total"]
    assert 0 < host < recipe["device"]["host_memory_gib"] * 2**30
    with pytest.raises(PlacementError, match=r"device.host_memory_gib = 100: a node takes up to .* GiB .*or a larger host"):
        find_placement(load_recipe(file, ["device.host_memory_gib=100"]), GPUS_OF_A_NODE, None)
    imbalance = {phase: plan["imbalance"] for phase, plan in document["phases"].items()}
    assert max(imbalance.values()) <= 1.01, imbalance


@pytest.mark.parametrize("file", [pytest.param(file, id=file.stem) for file in CPU_RECIPES])
def test_a_recipe_for_cpus_fits_a_laptop(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the models that set-up makes: 8 GiB for each trainer rank and for each engine."""
    monkeypatch.chdir(ROOT)
    # The policy that a teacher is exported from stands for it.
    teachers = yaml.safe_load(file.read_text()).get("teachers", {})
    changes = [f"teachers.{name}.path=models/tiny-qwen3" for name in teachers]
    document = document_of(file, "device={memory_gib: 8, kind: cpu}", *changes)
    assert document["device"]["fits"] is True, document["device"]


def test_there_is_one_for_each_algorithm_and_size_that_matters() -> None:
    assert {file.stem for file in RECIPES} == {
        "dapo-qwen2.5-32b-32gpus", "distill-qwen3-8b-16gpus", "distill-qwen3-8b-moe-teacher-8gpus",
        "grpo-deepseek-v3-256gpus", "grpo-qwen2.5-7b-8gpus", "gspo-qwen3-30b-a3b-32gpus", "ppo-llama2-70b-critic-13b-16gpus",
    }  # fmt: skip
    algorithms = {"grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gspo", "cispo", "dapo", "ppo"}
    others = {"sft", "dpo", "reward_model", "distill", "gkd", "served_teacher", "two_teachers", "warmup"}
    assert {file.stem for file in CPU_RECIPES if file.parent.name == "cpu"} == algorithms | others
