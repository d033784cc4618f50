"""What a rollout engine must know to take one version of the weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.quantised_blocks import quantised_tensors
from megarl.weight_sync.engines import checkpoint_plan, engine_plan
from megarl.weight_sync.order import copy_order, layer_starts
from megarl.weight_sync.plan import ReshardPlan
from megarl.weight_sync.stream import Stream

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPES = {name: dtype for dtype, name in PRECISIONS.items()}


class SyncError(RuntimeError):
    """Weights that did not arrive as they were sent."""


class SyncLate(SyncError, TimeoutError):
    """Weights, or an answer about them, that did not come by a deadline; also on ranks that are told of it."""


class SyncAborted(SyncError):
    """A sync that ended because another process failed; what happened is said by that one."""


@dataclass(frozen=True)
class WeightManifest:
    """One version on its way; plain types, so that it travels as JSON.

    `attempt` counts, from 1, how often it was sent; `session` is new with each attempt of any version. `engines` take part
    in it, of `num_engines` in all, each cut as `rollout` says; `mode`, `transport` and `verify` are the recipe's. `rings`
    names the buckets of each worker number in shared memory.

    `precision` is that of the engine; with `quantization` "fp8" its linear weights travel as FP8 blocks.

    Point-to-point, engines meet the trainer ranks over the store at `store` (host and port). By engine number: `leaders`,
    which one of its node receives for it, and `meetings`, a number that is new where it has to meet the ranks again. With
    `wire` "delta" messages are differences to version `base`, which every leading engine took, or whole where it is None.

    Weights travel in so many `orders`, each to its own engine, or in one to all. In each the workers of an engine begin with
    unlike layers; but `by_layer`, for which there is one order, all workers take the first layer, then all the second.

    `homes` say, by trainer rank, where its parameters are read in place (`in_place.share`); without, they come in buckets.
    """

    version: int
    attempt: int
    session: int
    plan_hash: str
    layout: Layout
    rollout: RolloutLayout
    mode: str
    precision: str
    bucket_bytes: int
    timeout_s: float
    rings: tuple[str, ...]
    engines: tuple[int, ...]
    num_engines: int
    transport: str
    verify: str
    store: tuple[str, int]
    leaders: tuple[int, ...]
    meetings: tuple[int, ...]
    wire: str
    base: int | None
    quantization: str | None
    homes: tuple[str, ...] = ()
    orders: int = 1
    by_layer: bool = False

    @property
    def leading(self) -> tuple[int, ...]:
        """Engines that receive from the trainer ranks themselves."""
        return tuple(sorted({self.leaders[engine] for engine in self.engines}))

    @property
    def followers(self) -> dict[int, tuple[int, ...]]:
        """The engines that read what a leading one receives, itself not among them."""
        pairs = [(self.leaders[engine], engine) for engine in self.engines]
        return {leader: tuple(one for its, one in pairs if its == leader != one) for leader in self.leading}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> WeightManifest:
        """Also takes what JSON or msgpack made of `as_dict` (lists for tuples)."""
        layout, rollout = Layout(**_tuples(values["layout"])), RolloutLayout(**values["rollout"])
        return cls(**_tuples(values) | {"layout": layout, "rollout": rollout})


def sync_plan(shape: ModelShape, layout: Layout, rollout: RolloutLayout, mode: str) -> ReshardPlan:
    """The plan of a sync; both ends compute it and compare `plan.hash`."""
    return {"reshard": engine_plan, "checkpoint": checkpoint_plan}[mode](shape, layout, rollout)


def sync_stream(
    shape: ModelShape,
    plan: ReshardPlan,
    worker: int,
    turn: tuple[int, int] | None,
    dtype: torch.dtype,
    bucket_bytes: int,
    quantization: str | None,
) -> Stream:
    """The stream of one of an engine's workers, in the order of its turn, or by layer (None); both ends compute it. By layer
    no bucket has pieces of two, so that a rank can be through with one for all workers before it begins the next."""
    quantised = quantised_tensors(shape) if quantization == "fp8" else {}
    copies = turn_order(plan, worker, turn)
    apart = layer_starts(plan, copies).tolist() if turn is None else ()
    return Stream.of(plan, copies, dtype.itemsize, bucket_bytes, quantised, apart)


def turn_order(plan: ReshardPlan, worker: int, turn: tuple[int, int] | None) -> np.ndarray:
    """Positions in the plan of the copies to a worker that is reader `turn[0]` of `turn[1]`, or goes by layer as all others
    do (None), int64 [copies]."""
    return copy_order(plan, worker) if turn is None else copy_order(plan, worker, *turn)


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
