"""Means, pass@k and majority votes of an evaluation, with confidence intervals. Pure functions of arrays."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Of the normal distribution, two-sided.
QUANTILE_95 = 1.959963984540054


class Estimate(NamedTuple):
    """A mean over prompts and half the width of its 95 % confidence interval; NaN where there is none."""

    value: float
    error: float
    num_prompts: int


def over_prompts(values: Sequence[float]) -> Estimate:
    """Return the mean of one value a prompt, with a standard error clustered by prompt (completions of one prompt are not
    independent: Miller 2024, arXiv 2411.00640, section 2.2). Uses the normal approximation, good from 30 prompts on; a
    single prompt has no error."""
    count = len(values)
    if count == 0:
        return Estimate(math.nan, math.nan, 0)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, math.nan, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, QUANTILE_95 * math.sqrt(variance / count), count)


def mean_reward(rewards: Sequence[np.ndarray]) -> Estimate:
    """Return the mean over prompts of the mean reward of their completions. `rewards` holds the scored completions of each
    prompt, float [completions]; prompts without any are left out."""
    return over_prompts([float(values.mean()) for values in rewards if len(values)])


def pass_at(rewards: Sequence[np.ndarray], k: int, pass_reward: float) -> Estimate:
    """Return the unbiased estimate that at least one of k completions passes, 1 - C(n - c, k) / C(n, k) if c of n pass
    (Chen 2021, arXiv 2107.03374, equation 1). Prompts with fewer than k completions are left out."""
    shares = []
    for values in rewards:
        total, passed = len(values), int((values >= values.dtype.type(pass_reward)).sum())
        if total >= k:
            shares.append(1.0 - math.comb(total - passed, k) / math.comb(total, k))
    return over_prompts(shares)


def majority(rewards: Sequence[np.ndarray], answers: Sequence[Sequence[str | None]], pass_reward: float) -> Estimate:
    """Return how often the majority answer passes (self-consistency; Wang 2022, arXiv 2203.11171).

    `answers` holds the answer of each completion, None for no answer, which is no vote. Tied answers share the prompt; an
    answer that passes in some completions and fails in others counts by its share. A prompt without any answer fails; one
    without completions is left out.
    """
    shares = []
    for values, given in zip(rewards, answers, strict=True):
        assert len(values) == len(given), "an answer for each completion"
        if not len(values):
            continue
        votes: dict[str, list[bool]] = defaultdict(list)
        for value, answer in zip(values, given, strict=True):
            if answer is not None:
                votes[answer].append(bool(value >= values.dtype.type(pass_reward)))
        most = max(map(len, votes.values()), default=0)
        winners = [sum(passed) / len(passed) for passed in votes.values() if len(passed) == most]
        shares.append(sum(winners) / len(winners) if winners else 0.0)
    return over_prompts(shares)
