"""A run that is measured on held-out prompts, and `megarl eval` on what it left, with real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megarl.cli import app
from tests.ranks import run_ranks
from tests.runs import RUN_DEADLINE_S, evaluations_of, metrics_of, tiny_recipe, tiny_run, train_on_ranks

pytestmark = [pytest.mark.sync, pytest.mark.slow]
STEPS, HELD_OUT, COMPLETIONS = 3, 7, 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of two data-parallel ranks, evaluated before, after two steps and at the end, and the changes of its recipe."""
    folder = tmp_path_factory.mktemp("run")
    tiny_run(folder)
    rows = [{"question": f"{number}*{number}", "answer": str(number)} for number in range(HELD_OUT)]
    rows.append(json.loads((folder / "prompts.jsonl").read_text().splitlines()[3]))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = {"kind": "jsonl", "path": str(folder / "held_out.jsonl"), "prompt_field": "question", "answer_field": "answer"}
    changes = {
        "reward": [{"kind": "function", "target": "tests.rewards:digits"}, {"kind": "last_number", "weight": 0.0}],
        "evaluation": {"prompts": prompts, "every": 2, "completions": COMPLETIONS, "pass_at": [1, 4], "pass_reward": 0.2},
        "phases__rollout": {"prompts": 4, "max_concurrent": 16},  # so that an evaluation takes several rounds
    }
    train_on_ranks(tiny_recipe(folder, "whole", False, 2, 1, 1, STEPS, **changes))
    return folder, changes


def test_a_run_is_measured_before_while_and_after_it_trains(run: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = run
    lines = evaluations_of(folder, "whole")
    assert [line["step"] for line in lines] == [0, 2, 3]
    assert [line["sync/version"] for line in lines] == [0, 2, 3]
    assert len({line["evaluation/mean"] for line in lines}) == 3, "weights change, and with them what is answered"
    for line in lines:
        assert (line["evaluation/num_prompts"], line["evaluation/num_left_out"]) == (HELD_OUT, 1)
        assert 0 < line["evaluation/pass_at_1"] <= line["evaluation/pass_at_4"] <= 1
        assert 0 <= line["evaluation/majority_at_6"] <= 1 and line["evaluation/mean_error"] > 0
    steps = {line["step"]: line for line in metrics_of(folder, "whole")}
    assert steps[2]["evaluation/mean"] == lines[1]["evaluation/mean"] and "evaluation/mean" not in steps[1]
    table = [json.loads(line) for line in (folder / "runs/whole/evaluations/step-000003.jsonl").read_text().splitlines()]
    assert [len(line["rewards"]) for line in table] == [COMPLETIONS] * HELD_OUT
    rewards = [reward for line in table for reward in line["rewards"]]
    assert sum(rewards) / len(rewards) == pytest.approx(lines[-1]["evaluation/mean"], rel=1e-6)
    assert sum(reward >= 0.2 for reward in rewards) / len(rewards) == pytest.approx(lines[-1]["evaluation/pass_at_1"])


def evaluated(run: str) -> str:
    """What `megarl eval` prints, where Ray runs already."""
    from megarl.cluster.ray_cluster import start_cluster

    start_cluster()
    result = CliRunner().invoke(app, ["eval", run, "--json"])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_finds_what_the_run_found_after_its_last_step(run: tuple[Path, dict[str, Any]]) -> None:
    """The same draws, by engines that loaded the exported checkpoint in place of receiving its weights."""
    folder, _ = run
    (printed,) = run_ranks(evaluated, 1, str(folder / "runs" / "whole"), deadline_s=RUN_DEADLINE_S)
    result = json.loads(printed)
    last = evaluations_of(folder, "whole")[-1]
    assert result == {key: value for key, value in last.items() if key.startswith("evaluation/")}


def test_one_update_a_batch_has_a_ratio_of_exactly_one(run: tuple[Path, dict[str, Any]]) -> None:
    for line in metrics_of(run[0], "whole"):
        assert "schedule/actor_logprob/micro_batches" not in line
        assert line["actor/ratio_drift_max"] == line["actor/ratio_drift_mean"] == line["actor/ratio_drift_exceeded"] == 0


@pytest.mark.nightly
def test_training_does_not_depend_on_being_measured(run: tuple[Path, dict[str, Any]]) -> None:
    folder, changes = run
    unmeasured = {key: value for key, value in changes.items() if key != "evaluation"}
    train_on_ranks(tiny_recipe(folder, "unmeasured", False, 2, 1, 1, STEPS, **unmeasured))
    measured = [
        {key: value for key, value in line.items() if not key.startswith("evaluation/")}
        for line in metrics_of(folder, "whole")
    ]
    assert measured == metrics_of(folder, "unmeasured")
