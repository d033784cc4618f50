"""Estimates of an evaluation against their definitions: all subsets counted, and what repeated draws spread by."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithm.pass_at import majority, mean_reward, over_prompts, pass_at

REWARDS = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=6), min_size=1, max_size=5)


@given(REWARDS, st.integers(1, 6))
def test_pass_at_k_is_the_share_of_subsets_with_one_that_passes(rewards: list[list[float]], k: int) -> None:
    shares = []
    for one in rewards:
        subsets = list(itertools.combinations(one, k))
        if subsets:
            shares.append(sum(max(subset) >= 1.0 for subset in subsets) / len(subsets))
    found = pass_at([np.array(one) for one in rewards], k, 1.0)
    assert found.num_prompts == len(shares)
    assert found.value == pytest.approx(sum(shares) / len(shares), abs=1e-12) if shares else math.isnan(found.value)


def test_a_mean_gives_every_prompt_the_same_weight() -> None:
    found = mean_reward([np.array([1.0]), np.array([0.0, 0.0, 0.0]), np.array([])])
    assert (found.value, found.num_prompts) == (0.5, 2)


def test_the_error_is_that_of_means_over_other_prompts() -> None:
    """Of 4000 draws of 50 prompts, with completions that depend on each other, 95 in 100 intervals hold the true mean."""
    random = np.random.default_rng(0)
    held = 0
    for _ in range(4000):
        difficulty = random.beta(2.0, 2.0, 50)
        found = mean_reward([random.binomial(1, p, 8).astype(float) for p in difficulty])
        held += abs(found.value - 0.5) <= found.error
    assert 0.93 < held / 4000 < 0.965


def test_one_prompt_says_nothing_of_others_and_none_says_nothing() -> None:
    assert over_prompts([0.5])[0] == 0.5 and math.isnan(over_prompts([0.5]).error)
    assert math.isnan(over_prompts([]).value)


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


def test_prompts_without_completions_have_no_majority() -> None:
    assert majority([np.array([]), np.array([1.0])], [[], ["7"]], 1.0) == pytest.approx((1.0, math.nan, 1), nan_ok=True)
