"""Estimates of an evaluation against their definitions, what it leaves behind and says, and where `megarl eval` puts its
engines."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithm.pass_at import majority, mean_reward, over_prompts, pass_at
from megarl.data.sample import Prompt
from megarl.planner.placement import EnginePlace
from megarl.recipe import Recipe
from megarl.rollout.evaluation import Evaluation, engine_places, evaluate, report
from megarl.telemetry.disk import write_whole
from megarl.telemetry.run_directory import RunDirectory
from tests.rollout_cases import recipe, save_model

REWARDS = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=6), min_size=1, max_size=5)


@given(REWARDS, st.integers(1, 6))
def test_pass_at_k_is_the_share_of_subsets_with_one_that_passes(rewards: list[list[float]], k: int) -> None:
    shares = []
    for prompt_rewards in rewards:
        subsets = list(itertools.combinations(prompt_rewards, k))
        if subsets:
            shares.append(sum(max(subset) >= 1.0 for subset in subsets) / len(subsets))
    estimate = pass_at([np.array(prompt_rewards) for prompt_rewards in rewards], k, 1.0)
    assert estimate.num_prompts == len(shares)
    assert estimate.value == pytest.approx(sum(shares) / len(shares), abs=1e-12) if shares else math.isnan(estimate.value)


def test_every_prompt_with_completions_has_the_same_weight_and_one_alone_says_nothing_of_others() -> None:
    estimate = mean_reward([np.array([1.0]), np.array([0.0, 0.0, 0.0]), np.array([])])
    assert (estimate.value, estimate.num_prompts) == (0.5, 2)
    alone = pytest.approx((1.0, math.nan, 1), nan_ok=True)
    assert over_prompts([1.0]) == alone == majority([np.array([]), np.array([1.0])], [[], ["7"]], 1.0)
    assert math.isnan(over_prompts([]).value)


def test_the_error_is_that_of_means_over_other_prompts() -> None:
    """Of 4000 draws of 50 prompts, with completions that depend on each other, 95 in 100 intervals hold the true mean."""
    random = np.random.default_rng(0)
    held = 0
    for _ in range(4000):
        difficulty = random.beta(2.0, 2.0, 50)
        estimate = mean_reward(list(random.binomial(1, difficulty[:, None], (50, 8)).astype(float)))
        held += abs(estimate.value - 0.5) <= estimate.error
    assert 0.93 < held / 4000 < 0.965


@pytest.mark.parametrize(("rewards", "answers", "expected"), [
    ([1, 0, 1], ["7", "8", "7"], 1.0),
    ([1, 0, 0], ["7", "8", "8"], 0.0),
    ([1, 0], ["7", "8"], 0.5),  # they tie
    ([1, 0, 0, 0], ["7", None, None, None], 1.0),  # no answer is no vote
    ([0, 0], [None, None], 0.0),
    ([1, 0], ["7", "7"], 0.5),  # the same answer, judged unlike
])  # fmt: skip
def test_the_majority_is_the_answer_of_most(rewards: list[int], answers: list[str | None], expected: float) -> None:
    assert majority([np.array(rewards, float)], [answers], 1.0).value == expected


MADE_UP: dict[str, Any] = {"prompts": {"kind": "reasoning_gym", "task": "chain_sum", "size": 2}}


def measured(**section: Any) -> Recipe:
    """A recipe with an `evaluation`, of which no model is read."""
    return recipe(Path("models/none"), ("evaluation", MADE_UP | section))


def counts_of(prompts: list[Prompt], **counts: int) -> dict[str, float]:
    named: dict[str, float] = {"num_prompts": len(prompts), "num_left_out": 0, "num_dropped": 0, "num_bad_rows": 0}
    return {f"evaluation/{name}": count for name, count in (named | counts).items()}


def evaluation(rewards: list[list[float]], **counts: int) -> Evaluation:
    """Of completions of these rewards, none of which says an answer; half of them are cut."""
    prompts = [Prompt(index, np.array([index], np.int32), str(index), "1", {}) for index in range(len(rewards))]
    size = sum(map(len, rewards))
    reward_arrays = [np.array(prompt_rewards, np.float32) for prompt_rewards in rewards]
    truncated = [number % 2 == 0 for number in range(size)]
    return Evaluation(prompts, counts_of(prompts, **counts), reward_arrays, [], list(range(size)), truncated)


def test_engines_take_the_devices_of_this_machine_as_many_as_fit(tmp_path: Path) -> None:
    eval_recipe = recipe(save_model(tmp_path / "m", "llama", True, 0, layers=1), engines=4, tensor=2)
    first, second = EnginePlace(0, (0, 1)), EnginePlace(0, (2, 3))
    assert engine_places(eval_recipe, 5) == (first, second)
    assert len(engine_places(eval_recipe, 64)) == len(engine_places(eval_recipe, None)) == 4
    with pytest.raises(ValueError, match="takes 2 devices .* this machine has 1; override them, as rollout.tensor=1"):
        engine_places(eval_recipe, 1)


def test_a_run_that_goes_on_forgets_the_tables_of_steps_that_it_makes_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    prompt = Prompt(0, np.zeros(2, np.int32), "1+1", "2", {})
    rewards = [np.array([1.0, np.nan], np.float32)]
    evaluation = Evaluation([prompt], counts_of([prompt]), rewards, [["2", None]], [1, 2], [False] * 2)
    for step in (0, 4, 12):
        write_whole(run.evaluation_table(step), evaluation.table())
    assert '"rewards": [1.0, null], "answers": ["2", null]' in run.evaluation_table(4).read_text()
    run.forget_tables("evaluations", 4)
    assert sorted(file.name for file in tmp_path.glob("evaluations/*")) == ["step-000000.jsonl", "step-000004.jsonl"]
    run.forget_tables("evaluations", -1)
    assert not list(tmp_path.glob("evaluations/*"))


def test_what_could_not_be_scored_counts_for_nothing(tmp_path: Path) -> None:
    prompts = [Prompt(index, np.array([index], np.int32), str(index), "1", {}) for index in range(2)]
    rewards = [np.array([1.0, 0.0, np.nan], np.float32), np.array([np.nan] * 3, np.float32)]
    section = measured(completions=3, pass_at=[1, 3]).evaluation
    assert section is not None
    answers: list[list[str | None]] = [["1", "2", "2"], ["2", "2", "2"]]
    metrics = Evaluation(prompts, counts_of(prompts), rewards, answers, [1] * 6, [False] * 6).metrics(section)
    assert (metrics["evaluation/mean"], metrics["evaluation/pass_at_1"], metrics["evaluation/num_masked"]) == (0.5, 0.5, 4)
    assert np.isnan(metrics["evaluation/pass_at_3"]), "no prompt has three completions that count"
    assert metrics["evaluation/majority_at_3"] == 0.5, "the vote of the masked one does not break the tie"


def test_the_command_says_each_estimate_with_its_error_and_what_did_not_count() -> None:
    eval_recipe = measured(completions=2, pass_at=[1, 2])
    lines = report(eval_recipe, evaluation([[1.0, 0.0], [0.0, 0.0]]), as_json=False).splitlines()
    assert lines == [
        "mean 0.250 ±0.490, pass@1 0.250 ±0.490, pass@2 0.500 ±0.980 on 2 held-out prompts",
        "completions of 1.5 tokens, 50.0% of them cut at rollout.max_new_tokens",
    ]
    beside = evaluation([[1.0, np.nan], [np.nan, np.nan]], num_left_out=4, num_dropped=2, num_bad_rows=5)
    lines = report(eval_recipe, beside, as_json=False).splitlines()
    assert lines[0] == "mean 1.000, pass@1 1.000, pass@2 nan on 2 held-out prompts", "of a single prompt there is no error"
    assert lines[2:] == [
        "3 completions could not be scored and count for nothing",
        "4 prompts left out, which are among the training prompts",
        "7 prompts left out, longer than data.max_prompt_tokens or bad rows",
    ]


def test_what_cannot_be_evaluated_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="evaluation: the recipe has no such section; add one, as `evaluation: {prompts"):
        evaluate(recipe(tmp_path), None, None)
    (tmp_path / "checkpoints" / "step-000002.partial").mkdir(parents=True)
    with pytest.raises(ValueError, match="checkpoints holds no complete checkpoint; give --model DIR, or a recipe"):
        evaluate(measured(), None, tmp_path)
