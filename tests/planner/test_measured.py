"""`megarl check --plan --from RUN`: an earlier run's seconds and peaks in place of a device's rate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megarl.cli import app
from megarl.planner.lengths import QUANTILES
from megarl.recipe import load_recipe, recipe_yaml
from tests.planner_cases import write_qwen

SECONDS = {"rollout": 40.0, "reward": 2.0, "actor_logprob": 5.0, "reference_logprob": 4.0, "advantage": 0.1,
           "actor_update": 30.0, "weight_sync": 3.0}  # fmt: skip
LENGTHS = {f"rollout/completion_length_p{percent:02d}": 40.0 * percent for percent in QUANTILES}


def write_run(folder: Path, recipe: Path, *overrides: str, **changed: Any) -> Path:
    """A run of three steps, the first of which was slow; `changed` are other metrics, None for none."""
    run = folder / "run"
    run.mkdir(exist_ok=True)
    (run / "recipe.yaml").write_text(recipe_yaml(load_recipe(recipe, overrides)))
    times = {f"time/{phase}": seconds for phase, seconds in SECONDS.items()}
    line = times | LENGTHS | {"rollout/prompt_length_mean": 900.0, "memory/reserved": 50 * 2**30} | changed
    line = {key.replace("__", "/"): value for key, value in line.items()}
    slow = line | {key: 10 * value for key, value in times.items() if line[key]}
    steps = [{"step": number} | step for number, step in enumerate((slow, line, line), start=1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return run


def seconds_of(recipe: Path, run: Path, *overrides: str) -> dict[str, float]:
    options = ["--json", "--from", str(run), "--lengths", str(run)]
    result = CliRunner().invoke(app, ["check", str(recipe), *overrides, *options])
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)["recipes"][0]["measured"]
    assert measured["peak_bytes"] == 50 * 2**30 and measured["estimated_bytes"] > 2**34
    seconds: dict[str, float] = measured["seconds"]
    return seconds


def test_a_run_s_own_recipe_takes_what_it_took(tmp_path: Path) -> None:
    recipe = write_qwen(tmp_path)
    run = write_run(tmp_path, recipe)
    assert seconds_of(recipe, run) == pytest.approx(SECONDS)


def test_a_changed_recipe_takes_what_its_operations_make_of_it(tmp_path: Path) -> None:
    recipe = write_qwen(tmp_path)
    run = write_run(tmp_path, recipe)
    changed = seconds_of(recipe, run, "phases.actor_update.epochs=2", "rollout.engines=1", "phases.rollout.prompts=32")
    expected = SECONDS | {"actor_update": 120, "rollout": 160, "reward": 4, "advantage": 0.2,
                          "actor_logprob": 10, "reference_logprob": 8}  # fmt: skip
    assert changed == pytest.approx(expected, rel=0.1)
    again = seconds_of(recipe, run, "actor.memory.recompute=full")
    assert 1.3 < again["actor_update"] / SECONDS["actor_update"] < 4 / 3 and again["weight_sync"] == 3.0


def test_a_table_shows_the_measured_peak_beside_its_estimate(tmp_path: Path) -> None:
    recipe = write_qwen(tmp_path)
    result = CliRunner().invoke(app, ["check", str(recipe), "--plan", "--from", str(write_run(tmp_path, recipe))])
    assert result.exit_code == 0, result.output
    assert "its fullest trainer rank reserved 50.0 GiB, estimated at worst" in result.output


@pytest.mark.parametrize(("overrides", "changed", "said"), [
    ((), {"time__actor_update": None}, "no step in metrics.jsonl has time/actor_update"),
    (("device.memory_gib=141",), {}, "the run had device.memory_gib = 141.0, and the recipe has 80.0"),
    (("device.kind=cpu",), {}, "the run had device.kind = cpu"),
    (("trainer.precision=fp16",), {}, "the run had trainer.precision = fp16"),
    (("model.path=other",), {}, "the run had model.path = other"),
])  # fmt: skip
def test_a_run_that_says_nothing_of_the_recipe_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], changed: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = write_qwen(tmp_path)
    config = json.loads((tmp_path / "qwen-model" / "config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 24}))
    run = write_run(tmp_path, recipe, *overrides, **changed)
    result = CliRunner().invoke(app, ["check", str(recipe), "--plan", "--from", str(run)])
    assert result.exit_code == 2
    assert f"--from = '{run}': " in result.stderr and said in result.stderr


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    recipe = write_qwen(tmp_path)
    for options, said in (
        (["--plan", "--from", str(tmp_path)], "no recipe.yaml and metrics.jsonl there; give a run directory"),
        (["--from", str(tmp_path)], "nothing reads it without --plan"),
        (["--plan", "--from", str(tmp_path), "--tflops", "4"], "one of them says how long phases take"),
    ):
        result = CliRunner().invoke(app, ["check", str(recipe), *options])
        assert result.exit_code == 2 and said in result.stderr, result.output
