"""What the ranks run to see that an update whose loss or gradient is not finite leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from megarl.megatron.offload import _optimizer_tensors
from megarl.megatron.role import Role, Update
from megarl.models.layout import Layout
from tests.engine_cases import objective_of, small_batch, start
from tests.feature_cases import Feature, build, cut, digest

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
        kept = weight.detach()[:1].clone()
        if kind == BAD_WEIGHT:
            weight.data[:1] = math.nan
        wrong = kind in (BAD_LOSS, BAD_GRADIENT)
        objective = wrong_objective(kind) if wrong else objective_of("actor", 100)
        with wrong_layer(trained) if kind == BAD_LAYER and place.pipeline_rank == 0 else nullcontext():
            updates.append(trained.update(batch, mini_batch, objective))
        if kind == BAD_WEIGHT:
            said = trained.broken_weights()
            assert said == f"rank {layout.ranks - 1}: decoder.final_layernorm.weight", said
            weight.data[:1] = kept
        assert trained.broken_weights() is None
        states.append(state(trained))
    return updates, states, float(trained.optimizer.get_loss_scale())
