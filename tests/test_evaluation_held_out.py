"""What an evaluation leaves behind, and where `megarl eval` puts its engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megarl.data.sample import Prompt
from megarl.evaluation.command import engine_places
from megarl.evaluation.held_out import Evaluation
from megarl.placement import EnginePlace
from megarl.recipe.evaluation_section import EvaluationSection
from megarl.telemetry.run_directory import RunDirectory
from tests.rollout_cases import recipe, save_model


def test_engines_take_the_devices_of_this_machine_as_many_as_fit(tmp_path: Path) -> None:
    made = recipe(save_model(tmp_path / "m", "llama", True, 0, layers=1), engines=4, tensor=2)
    first, second = EnginePlace(0, (0, 1)), EnginePlace(0, (2, 3))
    assert engine_places(made, 5) == (first, second)
    assert len(engine_places(made, 64)) == len(engine_places(made, None)) == 4
    with pytest.raises(ValueError, match="takes 2 devices .* this machine has 1; override them, as rollout.tensor=1"):
        engine_places(made, 1)


def test_a_run_that_goes_on_forgets_the_tables_of_steps_that_it_makes_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    prompt = Prompt(0, np.zeros(2, np.int32), "1+1", "2", {})
    rewards, lengths = [np.array([1.0, np.nan], np.float32)], np.array([1, 2])
    found = Evaluation([prompt], rewards, [["2", None]], lengths, np.zeros(2, bool), 0, 0, 0)
    for step in (0, 4, 12):
        found.write(run.evaluation_table(step))
    assert '"rewards": [1.0, null], "answers": ["2", null]' in run.evaluation_table(4).read_text()
    run.forget_evaluation_tables(4)
    assert sorted(file.name for file in tmp_path.glob("evaluations/*")) == ["step-000000.jsonl", "step-000004.jsonl"]
    run.forget_evaluation_tables(-1)
    assert not list(tmp_path.glob("evaluations/*"))


def test_what_could_not_be_scored_counts_for_nothing(tmp_path: Path) -> None:
    prompts = [Prompt(index, np.array([index], np.int32), str(index), "1", {}) for index in range(2)]
    rewards = [np.array([1.0, 0.0, np.nan], np.float32), np.array([np.nan] * 3, np.float32)]
    section = EvaluationSection.model_validate(
        {"prompts": {"kind": "reasoning_gym", "task": "chain_sum", "size": 2}, "completions": 3, "pass_at": [1, 3]}
    )
    answers = [["1", "2", "2"], ["2", "2", "2"]]
    found = Evaluation(prompts, rewards, answers, np.array([1] * 6), np.zeros(6, bool), 0, 0, 0).figures(section)
    assert (found["evaluation/mean"], found["evaluation/pass_at_1"], found["evaluation/num_masked"]) == (0.5, 0.5, 4)
    assert np.isnan(found["evaluation/pass_at_3"]), "no prompt has three completions that count"
    assert found["evaluation/majority_at_3"] == 0.5, "the vote of the masked one does not break the tie"
