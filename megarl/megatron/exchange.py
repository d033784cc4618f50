"""How a step's metadata and tokens reach the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.data.sample import Sample
from megarl.megatron.parallel import Place
from megarl.schedule import Plan
from megarl.telemetry.clock import span

Value = TypeVar("Value")
_control: dist.ProcessGroup | None = None


def start_control(timeout_s: float) -> dist.ProcessGroup:
    """The gloo group for metadata. Its deadline is that of a rollout, not of a collective: while rank 0 waits for the
    engines, all others wait for rank 0."""
    global _control
    _control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return _control


def broadcast_from_first(value: Value | None) -> Value:
    """Rank 0's value, on every rank."""
    box: list[Any] = [value]
    with span("wait_ranks"):
        dist.broadcast_object_list(box, src=0, group=_control)
    return box[0]


def gather_to_all(value: Value) -> list[Value]:
    """Every rank's value, in rank order, on every rank; for metadata."""
    boxes: list[Any] = [None] * dist.get_world_size()
    with span("wait_ranks"):
        dist.all_gather_object(boxes, value, group=_control)
    return boxes


def on_any_rank(flag: bool) -> bool:
    """Whether `flag` is set on some rank, on every rank: one tiny all-reduce."""
    found = torch.tensor([flag], dtype=torch.int32)
    with span("wait_ranks"):
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=_control)
    return bool(found)


def same_everywhere(number: int) -> bool:
    """Whether all ranks have the same `number` of 63 bits, on every rank: one tiny all-reduce."""
    largest = torch.tensor([number, -number], dtype=torch.int64)
    with span("wait_ranks"):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=_control)
    return bool(largest[0] == -largest[1])


def distribute_samples(payload: Any, plans: Iterable[Plan], place: Place) -> dict[int, Sample]:
    """The tokens of every sequence that some of `plans`, all of the place's layout, runs on this data-parallel rank.

    Its leader fetches them from where the engines left them and passes them on inside its model-parallel group: no rank
    holds the tokens of the whole batch unless it runs them.
    """
    wanted = {
        sample
        for plan in plans
        for mini_batch in plan.mini_batches
        for micro_batch in mini_batch.micro_batches[place.data_rank]
        for sample in micro_batch.samples
    }
    with span("wait_data"):  # there the leader waits for the engines' node, and here its group for it
        box: list[Any] = [payload.fetch(sorted(wanted)) if place.is_leader else None]
        dist.broadcast_object_list(box, src=place.leader, group=place.model_parallel_group, device=place.device)
    return box[0]
