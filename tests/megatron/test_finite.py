"""Numbers that are not finite are found on every rank before an optimizer steps, and named."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.megatron.non_finite import non_finite_samples
from megarl.megatron.offload import _optimizer_tensors
from megarl.megatron.role import Role, Update
from megarl.models.layout import Layout
from tests.engine_cases import objective_of, small_batch, start
from tests.feature_cases import Feature, build, cut, digest
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

GOOD, BAD_LOSS, BAD_GRADIENT, BAD_LAYER, BAD_WEIGHT = "good", "loss", "gradient", "layer", "weight"
WRONG_SAMPLE = 7


def wrong_objective(kind: str) -> Any:
    """The loss of one sequence's micro-batch is infinite, or its gradient alone is no number."""
    good = objective_of("actor", 100)

    def objective(micro: Any, outputs: dict[str, torch.Tensor]) -> Any:
        if WRONG_SAMPLE not in micro.samples:
            return good(micro, outputs)
        if kind == BAD_GRADIENT:
            outputs["logprobs"].register_hook(lambda gradient: gradient * math.nan)
            return good(micro, outputs)
        loss, sums = good(micro, outputs)
        return loss + math.inf, sums

    return objective


@contextmanager
def wrong_layer(trained: Role) -> Iterator[None]:
    """The backward pass of the first layer makes no numbers of the gradient of one sequence's micro-batch."""
    backward = trained._backward
    assert backward is not None

    def spoil(module: Any, inputs: Any, output: Any) -> None:
        if WRONG_SAMPLE in backward.samples:
            output[0].register_hook(lambda gradient: gradient * math.nan)

    hook = trained.models[0].decoder.layers[0].register_forward_hook(spoil)
    yield
    hook.remove()


def state(trained: Role) -> tuple[bytes, bytes, int]:
    """Weights, fp32 copies and moments, and the place in the learning-rate schedule."""
    tensors = [tensor.detach() for tensor in _optimizer_tensors(trained.optimizer)]
    return digest(trained.shards().values()), digest(tensors), trained.scheduler.num_steps


def update_through(
    directory: str, layout: Layout, kinds: list[str], feature: Feature
) -> tuple[list[Update], list[tuple[bytes, bytes, int]], float]:
    """Updates of these kinds, the state before each and at the end, and the loss scale at the end. A broken weight is one of
    the last rank, which is whole again for the update after it."""
    place = start(layout)
    trained = build(directory, place, feature)
    batch = small_batch(trained.shape.vocab)
    mini_batch = cut(batch, place.layout)
    updates, states = [], [state(trained)]
    for kind in kinds:
        weight = trained.models[-1].decoder.final_layernorm.weight if place.rank == layout.ranks - 1 else torch.zeros(1)
        original = weight.detach()[:1].clone()
        if kind == BAD_WEIGHT:
            weight.data[:1] = math.nan
        wrong = kind in (BAD_LOSS, BAD_GRADIENT)
        objective = wrong_objective(kind) if wrong else objective_of("actor", 100)
        with wrong_layer(trained) if kind == BAD_LAYER and place.pipeline_rank == 0 else nullcontext():
            updates.append(trained.update(batch, mini_batch, objective))
        if kind == BAD_WEIGHT:
            message = trained.broken_weights()
            assert message == f"rank {layout.ranks - 1}: decoder.final_layernorm.weight", message
            weight.data[:1] = original
        assert trained.broken_weights() is None
        states.append(state(trained))
    return updates, states, float(trained.optimizer.get_loss_scale())


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
    match = re.match(r"rank \d: the loss of (samples [\d, ]+) is inf", loss)
    assert match is not None and str(WRONG_SAMPLE) in re.findall(r"\d+", match[1]), loss
    for message in (gradient, layer):
        assert message.startswith("gradients are not finite: rank ") and "decoder.layers.0." in message
        assert f": {match[1]}" in message.split("; since")[1]
    assert "the loss of samples" in weight and "is nan" in weight


@pytest.mark.layout
def test_a_loss_scale_does_not_come_down_for_a_loss_that_is_infinite(tmp_path: Path) -> None:
    """It would come down in vain. For gradients that overflow: test_precision.py."""
    directory = str(save_tiny_model(tmp_path, "qwen3"))
    half = Feature(precision="fp16", initial_loss_scale=256.0)
    ((updates, states, scale),) = run_ranks(update_through, 1, directory, Layout(), [GOOD, BAD_LOSS, BAD_LOSS, GOOD], half)
    assert [update.refused is not None for update in updates] == [False, True, True, False]
    assert not any(update.skipped for update in updates) and scale == 256.0
    assert states[1] == states[2] == states[3] != states[4]


def test_a_sum_that_alone_overflows_is_finite() -> None:
    assert non_finite_samples([torch.full((3,), 3e38), torch.zeros(3)]) == []
    assert non_finite_samples([torch.zeros(3), torch.tensor([0.0, 1.0, math.inf])]) == [1]
