"""Means, pass@k and majority votes of an evaluation, with how sure they are. Pure functions of arrays."""

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
    """The mean of one value a prompt. Its standard error takes prompts as what was drawn: completions of one prompt are not
    independent, and count together (clustered errors; Miller 2024, arXiv 2411.00640, section 2.2). By the normal
    approximation, for 30 prompts or more; no error from a single one."""
    count = len(values)
    if count == 0:
        return Estimate(math.nan, math.nan, 0)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, math.nan, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, QUANTILE_95 * math.sqrt(variance / count), count)


def mean_reward(rewards: Sequence[np.ndarray]) -> Estimate:
    """Mean over prompts of the mean reward of each one's completions. `rewards` has those of each prompt that could be
    computed, float [completions]; a prompt without any counts for nothing."""
    return over_prompts([float(one.mean()) for one in rewards if len(one)])


def pass_at(rewards: Sequence[np.ndarray], k: int, pass_reward: float) -> Estimate:
    """How likely at least one of k completions of a prompt passes: 1 - C(n - c, k) / C(n, k) for c of n that do, without
    bias (Chen 2021, arXiv 2107.03374, equation 1). Prompts with fewer than k completions count for nothing."""
    found = []
    for one in rewards:
        total, right = len(one), int((one >= one.dtype.type(pass_reward)).sum())
        if total >= k:
            found.append(1.0 - math.comb(total - right, k) / math.comb(total, k))
    return over_prompts(found)


def majority(rewards: Sequence[np.ndarray], answers: Sequence[Sequence[str | None]], pass_reward: float) -> Estimate:
    """How often the answer that most completions of a prompt give passes (self-consistency; Wang 2022, arXiv 2203.11171).

    `answers` has what each completion gave, None where it gave nothing, which is no vote. Answers that tie share the prompt;
    one that is judged unlike in unlike completions passes by its share. A prompt whose completions all give nothing is
    failed; one without completions counts for nothing.
    """
    found = []
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
        found.append(sum(winners) / len(winners) if winners else 0.0)
    return over_prompts(found)
