"""Supervised steps ahead of the first rollout: they are those of a supervised run, and the steps with rollouts are those of
a run from the weights that they leave; exact resume; generation on held-out prompts meanwhile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from megarl.megatron.export import export
from megarl.telemetry.report import run_page
from megarl.telemetry.report_run import read_run
from tests.learning_cases import CHANCE, GOAL, LAST, learning_recipe, rewards_of
from tests.runs import evaluations_of, fake_rollouts, forget_after, metrics_of, train_on_ranks
from tests.supervised_cases import STEPS, supervised_recipe, supervised_run
from tests.warmup_cases import RL_STEPS, SCHEDULE, rl_recipe, warm_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and rows, and the rollouts of RL_STEPS steps: in `rollouts`, and in `later` after STEPS supervised steps."""
    folder = tmp_path_factory.mktemp("warmup")
    supervised_run(folder)
    (folder / "later").mkdir()
    for file in fake_rollouts(folder, RL_STEPS).glob("step-*.npz"):
        shutil.copy(file, folder / "later" / f"step-{int(file.stem[5:]) + STEPS:06d}.npz")
    return folder


@pytest.mark.layout
@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_run_with_a_warmup_is_a_supervised_run_and_a_run_from_its_weights(folder: Path, tensor: int) -> None:
    sft, rl, warm = (f"{name}-{tensor}" for name in ("sft", "rl", "warm"))
    prompts = {"kind": "jsonl", "path": str(folder / "held_out.jsonl"), "prompt_field": "messages"}
    held_out = {"prompts": prompts, "every": 2}
    train_on_ranks(supervised_recipe(folder, sft, actor__optimizer=SCHEDULE, evaluation=held_out))
    export(folder / "runs" / sft, folder / f"model-{tensor}")
    changes: dict[str, Any] = {"rollout__replay": str(folder / "rollouts"), "model__path": str(folder / f"model-{tensor}")}
    train_on_ranks(rl_recipe(folder, rl, RL_STEPS, **changes))
    changes = {"rollout__replay": str(folder / "later"), "warmup__sft__evaluation": held_out}
    train_on_ranks(warm_recipe(folder, warm, tensor, tensor, **changes))
    lines = metrics_of(folder, warm)
    assert [line["actor/warmup"] for line in lines] == [1] * STEPS + [0] * RL_STEPS
    for line in lines[:STEPS]:
        assert not [key for key in line if key.startswith(("reward/", "rollout/", "mismatch/", "reference/"))]
    expected = metrics_of(folder, sft) + metrics_of(folder, rl)
    for line, alone in zip(lines, expected, strict=True):
        learned = [key for key in alone if key.startswith(("actor/", "reward/", "tokens/", "data/"))]
        # Micro-batches come in another order, as it follows from the number of the step.
        assert {key: line[key] for key in learned} == pytest.approx({key: alone[key] for key in learned}, rel=2e-4, abs=1e-6)
    assert abs(lines[STEPS]["actor/kl"]) < 1e-6 < lines[-1]["actor/kl"], "the reference is the actor after the warm-up"
    names = ("loss", "num_prompts", "num_left_out")
    alone, ahead = (
        {line["step"]: [line[f"{area}/{name}"] for name in names] for line in evaluations_of(folder, run)}
        for area, run in (("evaluation", sft), ("warmup_evaluation", warm))
    )
    assert list(alone) == [0, 2, STEPS] and ahead == {step: pytest.approx(loss, rel=2e-4) for step, loss in alone.items()}
    assert lines[STEPS - 1]["warmup_evaluation/loss"] == ahead[STEPS][0] < ahead[0][0]


@pytest.mark.layout
def test_a_reference_of_adapters_is_warm_unless_its_model_is_named(folder: Path) -> None:
    changes: dict[str, Any] = {"rollout__replay": str(folder / "later"), "actor__lora": {"rank": 4, "alpha": 8.0}}
    train_on_ranks(warm_recipe(folder, "adapters", **changes))
    train_on_ranks(warm_recipe(folder, "named", reference={"path": str(folder / "model")}, **changes))
    adapters, named = (metrics_of(folder, name)[STEPS] for name in ("adapters", "named"))
    assert abs(adapters["actor/kl"]) < 1e-6 < named["actor/kl"]
    assert adapters["reward/mean"] == named["reward/mean"]


@pytest.mark.layout
@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 4, "alpha": 8.0}, marks=pytest.mark.nightly)])
def test_a_resume_goes_on_exactly_at_the_end_of_the_warmup_and_before(folder: Path, lora: dict[str, Any] | None) -> None:
    saved = folder / f"saved-{lora is not None}"
    changes: dict[str, Any] = {"rollout__replay": str(folder / "later"), "run__checkpoint_every": 1, "actor__lora": lora}
    changes["run__dir"] = str(saved / "runs")
    recipe = warm_recipe(folder, "whole", **changes)
    train_on_ranks(recipe)
    whole, run = metrics_of(saved, "whole"), saved / "runs" / "whole"
    for done in (STEPS, STEPS - 1):
        forget_after(run, done)
        train_on_ranks(recipe, resume=True)
        assert metrics_of(saved, "whole") == whole, f"resumed after step {done}"
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    for ended in (STEPS + RL_STEPS, STEPS):  # a report is possible before the first rollout, too
        (run / "metrics.jsonl").write_text("".join(lines[:ended]))
        report = read_run(run)
        assert "Is it learning?" in run_page(report) and len(report.rewards()[1]) == ended - STEPS
        assert list((report.sampled() or {}).values()) == [16 * max(0, step - STEPS) for step in range(1, ended + 1)]


@pytest.mark.sync
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_engines_answer_held_out_prompts_while_the_actor_is_fine_tuned(folder: Path) -> None:
    """One engine that samples ahead, which gets weights for the evaluations and once before its first rollout."""
    rows = [{"question": f"{number}*{number}", "answer": str(number)} for number in range(6)]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = {"kind": "jsonl", "path": str(folder / "asked.jsonl"), "prompt_field": "question", "answer_field": "answer"}
    staleness, steps = 1, STEPS + RL_STEPS
    changes: dict[str, Any] = {
        "evaluation": {"prompts": prompts, "every": 2},
        "rollout__max_staleness": staleness,
        "weight_sync": {"in_flight": "keep"},
        "algorithm__mismatch": {"correction": "truncate"},
        "phases__actor_logprob": {"micro_batch": {"max_tokens": 64}},
        "telemetry": {"samples_per_step": 16},
    }
    train_on_ranks(warm_recipe(folder, "asked", **changes))
    run, lines = folder / "runs" / "asked", metrics_of(folder, "asked")
    evaluated = {line["step"]: line["sync/version"] for line in evaluations_of(folder, "asked")}
    assert evaluated == {0: 0, 2: 1, STEPS: 2, 4: 3, steps: steps - STEPS + 2}
    assert [line["sync/version"] for line in lines[:STEPS]] == [0, 1, 2]
    for number, line in enumerate(lines[STEPS:], STEPS + 1):
        table = [json.loads(row) for row in (run / "samples" / f"step-{number:06d}.jsonl").read_text().splitlines()]
        assert len(table) == 16 and all(row["first_version"] >= 2 for row in table), "sampled before the warm-up was over"
        assert line["staleness/max"] <= staleness and line["rollout/num_too_old"] == 0
        assert line["staleness/0/logprob_mean"] < 1e-3, "the engine has the weights of the version that it names"


@pytest.mark.learning
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_recipe_of_the_page_fine_tunes_and_then_learns_from_rollouts(tmp_path: Path) -> None:
    name, recipe = learning_recipe(tmp_path, "warmup", 1)
    train_on_ranks(recipe)
    lines, evaluations = (
        [json.loads(line) for line in (tmp_path / name / f"{kind}.jsonl").read_text().splitlines()]
        for kind in ("metrics", "evaluations")
    )
    steps = sum(line["actor/warmup"] for line in lines)
    held_out, rewards = {line["step"]: line["evaluation/mean"] for line in evaluations}, rewards_of(lines[steps:])
    print("held out:", held_out, "reward:", *(f"{reward:.2f}" for reward in rewards[::5]))
    assert lines[steps - 1]["actor/loss"] <= lines[0]["actor/loss"] - 1.0
    assert held_out[0] < held_out[steps] < max(held_out.values())
    assert rewards[0] > CHANCE and fmean(rewards[-LAST:]) >= GOAL
