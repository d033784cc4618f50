"""Numbers that are not finite are found on every rank before an optimizer steps, and named."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from megarl.megatron.non_finite import non_finite_samples
from megarl.models.layout import Layout
from tests.feature_cases import Feature
from tests.finite_cases import BAD_GRADIENT, BAD_LAYER, BAD_LOSS, BAD_WEIGHT, GOOD, WRONG_SAMPLE, update_through
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

MORE = (Layout(tensor=2), Layout(tensor=2, pipeline=2), Layout(tensor=2, data=2))
LAYOUTS = [Layout(data=2), Layout(pipeline=2), *(pytest.param(layout, marks=pytest.mark.nightly) for layout in MORE)]


@pytest.mark.layout
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_update_with_a_number_that_is_not_finite_leaves_no_trace(layout: Layout, tmp_path: Path) -> None:
    directory = str(save_tiny_model(tmp_path, "qwen3"))
    kinds = [GOOD, BAD_LOSS, BAD_GRADIENT, BAD_LAYER, BAD_WEIGHT, GOOD]
    through = run_ranks(update_through, layout.ranks, directory, layout, kinds, Feature())
    beside = run_ranks(update_through, layout.ranks, directory, layout, [GOOD, GOOD], Feature())
    for (updates, states, _), (good, undisturbed, _) in zip(through, beside, strict=True):
        assert [update.refused is not None for update in updates] == [False, True, True, True, True, False]
        assert not any(update.skipped for update in updates), "no loss scale is to blame"
        assert all(state == undisturbed[1] != states[0] for state in states[1:6])
        assert states[6] == undisturbed[2] and updates[5] == good[1]
        assert [update.refused for update in updates] == [update.refused for update in through[0][0]], "on every rank"
    loss, gradient, layer, weight = (update.refused or "" for update in through[0][0][1:5])
    found = re.match(r"rank \d: the loss of (samples [\d, ]+) is inf", loss)
    assert found is not None and str(WRONG_SAMPLE) in re.findall(r"\d+", found[1]), loss
    for message in (gradient, layer):
        assert message.startswith("gradients are not finite: rank ") and "decoder.layers.0." in message
        assert f": {found[1]}" in message.split("; since")[1]
    assert "the loss of samples" in weight and "is nan" in weight


@pytest.mark.layout
def test_fp16_overflow_is_the_loss_scale_s_and_a_loss_that_is_no_number_is_not(tmp_path: Path) -> None:
    """A loss scale comes down for gradients that overflow; it would come down in vain for a loss that is infinite."""
    directory = str(save_tiny_model(tmp_path, "qwen3"))
    half = Feature(precision="fp16", initial_loss_scale=256.0)
    ((updates, states, scale),) = run_ranks(update_through, 1, directory, Layout(), [GOOD, BAD_LOSS, BAD_LOSS, GOOD], half)
    assert [update.refused is not None for update in updates] == [False, True, True, False]
    assert not any(update.skipped for update in updates) and scale == 256.0
    assert states[1] == states[2] == states[3] != states[4]
    ((updates, _, scale),) = run_ranks(
        update_through, 1, directory, Layout(), [GOOD, GOOD], Feature(precision="fp16", initial_loss_scale=2.0**19)
    )
    assert all(update.skipped and update.refused is None for update in updates) and scale < 2.0**19


def test_a_sum_that_alone_overflows_is_finite() -> None:
    assert non_finite_samples([torch.full((3,), 3e38), torch.zeros(3)]) == []
    assert non_finite_samples([torch.zeros(3), torch.tensor([0.0, 1.0, math.inf])]) == [1]
