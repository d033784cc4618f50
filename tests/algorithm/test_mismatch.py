"""Importance weights against their formulas written out token by token, and laws of every correction."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from pydantic import ValidationError

from megarl.algorithm.policy import mismatch_weights
from megarl.recipe.algorithm_section import MismatchSection

# An empty sequence, sequences of one token, and ratios of proximal to behavior policy within and beyond every bound.
LENGTHS = (3, 0, 1, 4, 2)
RATIOS = [1.0, 3.0, 0.5, 0.25, 2.5, 0.9, 1.1, 0.3, 1.9, 2.2]
BOUNDS: dict[str, list[dict[str, float]]] = {
    "truncate": [{"cap": 1.0}, {"cap": 2.0}],
    "mask": [{"cap": 1.5}, {"cap": 1.2, "floor": 0.5}, {"cap": 2.0, "floor": 0.95}],
    "clip": [{"cap": 1.5}, {"cap": 1.2, "floor": 0.5}, {"cap": 2.0, "floor": 0.95}],
}
LEVELS = ("token", "sequence", "geometric")
CASES = [(correction, bounds) for correction, each in BOUNDS.items() for bounds in each]
SETTINGS = [MismatchSection(level=level, correction=name, **bounds) for level in LEVELS for name, bounds in CASES]  # type: ignore[arg-type]


def by_hand(logs: list[float], lengths: tuple[int, ...], section: MismatchSection) -> tuple[list[float], list[bool]]:
    """The corrected weight of each token, and whether the correction changed it, in plain Python."""
    corrected, changed = [], []
    start = 0
    for length in lengths:
        part = logs[start : start + length]
        start += length
        if section.level == "sequence":
            part = [math.fsum(part)] * length
        if section.level == "geometric":
            part = [math.fsum(part) / max(length, 1)] * length
        for log in part:
            weight = math.exp(min(max(log, -20.0), 20.0))
            outside = weight > section.cap or weight < section.floor
            changed.append(outside)
            if section.correction == "mask":
                corrected.append(0.0 if outside else weight)
            else:
                corrected.append(max(min(weight, section.cap), section.floor))
    return corrected, changed


def fp64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("section", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "logs", [[math.log(ratio) for ratio in RATIOS], [25.0, -30.0, 1e-3, 0.2, -25.0, 9.0, -9.5, 0.0, 0.3, -0.4]]
)
def test_weights_are_those_of_the_formula(section: MismatchSection, logs: list[float]) -> None:
    behavior = torch.linspace(-3.0, -0.2, len(logs), dtype=torch.float64)
    proximal = (behavior + fp64(logs)).requires_grad_()
    corrected, raw = mismatch_weights(proximal, behavior, LENGTHS, section)
    weights, changed = by_hand((proximal - behavior).tolist(), LENGTHS, section)
    torch.testing.assert_close(corrected, fp64(weights), rtol=1e-12, atol=1e-12)
    assert (corrected != raw).tolist() == changed
    assert not corrected.requires_grad and not raw.requires_grad


@given(
    logprobs=some.lists(some.floats(-50, 0), min_size=1, max_size=8),
    level=some.sampled_from(LEVELS),
    correction=some.sampled_from(list(BOUNDS)),
    cap=some.floats(1, 100),
    floor=some.floats(0, 1, exclude_max=True),
)
def test_where_the_trainer_is_the_policy_that_sampled_every_weight_is_one(
    logprobs: list[float], level: Any, correction: Any, cap: float, floor: float
) -> None:
    """Whatever the legal settings are, so that a correction does not change on-policy training."""
    section = MismatchSection(correction=correction, level=level, cap=cap, floor=0.0 if correction == "truncate" else floor)
    corrected, raw = mismatch_weights(fp64(logprobs), fp64(logprobs), (len(logprobs),), section)
    assert corrected.tolist() == raw.tolist() == [1.0] * len(logprobs)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"correction": "truncate", "floor": 0.5}, "truncate has no lower bound"),
        ({"correction": "clip", "floor": 1.0}, "less than 1"),
        ({"correction": "clip", "floor": -0.1}, "greater than or equal to 0"),
        ({"correction": "mask", "cap": 0.9}, "greater than or equal to 1"),
    ],
)
def test_bounds_that_would_change_a_weight_of_one_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        MismatchSection(**settings)
