"""What the ranks of the router-replay tests run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from megarl.megatron.batch import Batch, pack
from megarl.megatron.role import Role
from megarl.models import ModelShape
from megarl.models.layout import Layout
from megarl.recipe.role_sections import MemorySection
from tests.engine_cases import UpdateMetrics, engine, measure, planned, small_batch, start

# One choice a sample: [tokens - 1, layers with experts, experts a token], or None where none was recorded.
Routing = dict[int, np.ndarray | None]


def another_choice(shape: ModelShape, batch: Batch, seed: int = 5) -> Routing:
    """Experts that no router chose."""
    assert shape.experts is not None
    generator = np.random.default_rng(seed)
    layers = sum(shape.has_experts(layer) for layer in range(shape.num_layers))
    routing: Routing = {}
    for sample, length in enumerate(batch.lengths):
        scores = generator.random((length - 1, layers, shape.experts.count))
        routing[sample] = scores.argsort(-1)[..., : shape.experts.per_token].astype(np.uint8)
    return routing


def with_routing(batch: Batch, routing: Routing) -> Batch:
    samples = {
        number: dataclasses.replace(sample, completion=dataclasses.replace(sample.completion, routing=routing[number]))
        for number, sample in batch.samples.items()
    }
    return dataclasses.replace(batch, samples=samples)


def replay(
    directory: str, layout: Layout, max_tokens: int, memory: Mapping[str, Any], updates: int = 2
) -> tuple[list[UpdateMetrics], dict[str, float]]:
    """What an actor measures that replays another choice than its own, and the metrics of the replay."""
    place = start(layout)
    actor = engine(directory, place, lr=1e-2, router_replay=True, memory=MemorySection(**memory))
    batch = small_batch(actor.shape.vocab)
    routing = another_choice(actor.shape, batch)
    routing[3] = None
    measured = [measure(actor, with_routing(batch, routing), max_tokens) for _ in range(updates)]
    assert actor.router_replay is not None
    return measured, actor.router_replay.take_metrics()


class Recorder:
    """In the place of a router's replay: keeps what the router chooses."""

    def get_replay_topk(self, scores: Any, topk: int, groups: Any, chosen_groups: Any, default: Callable[..., Any]) -> Any:
        values, self.chosen = default(scores, topk, groups, chosen_groups)
        return values, self.chosen


def own_choice(actor: Role, batch: Batch) -> Routing:
    """What the routers of one rank choose in a forward phase, for all tokens but each sequence's last."""
    from megatron.core.transformer.moe.router import TopKRouter

    recorders = []
    for module in actor.models[0].modules():
        if isinstance(module, TopKRouter):
            recorders.append(Recorder())
            module.router_replay = recorders[-1]
    mini_batch = planned(batch, actor.place.layout, max_tokens=400)
    ((micro,),) = mini_batch.micro_batches
    actor.forward(batch, mini_batch)
    bounds = pack(batch, micro, actor.place.device, actor.place.layout).bounds.tolist()
    chosen = torch.stack([recorder.chosen for recorder in recorders], 1).numpy().astype(np.uint8)
    return {sample: chosen[at : at + batch.lengths[sample] - 1] for sample, at in zip(micro.samples, bounds, strict=False)}


def replay_own(directory: str) -> tuple[list[UpdateMetrics], list[UpdateMetrics], list[UpdateMetrics], dict[str, float]]:
    """Return UpdateMetrics without replay, with the engine's own choice replayed, and of an engine that may replay and has
    no record: one update each, all from the same weights. And the metrics of the second."""
    place = start(Layout())
    batch = small_batch(ModelShape.from_directory(directory).vocab)
    routing = own_choice(engine(directory, place), batch)
    plain, replaying, without = (engine(directory, place, lr=1e-2, router_replay=on) for on in (False, True, True))
    expected = [measure(plain, batch, 400)]
    measured = [measure(replaying, with_routing(batch, routing), 400)]
    assert replaying.router_replay is not None
    return expected, measured, [measure(without, batch, 400)], replaying.router_replay.take_metrics()
