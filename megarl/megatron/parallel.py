"""This rank's coordinates in a layout, its process groups, and the collectives for metadata, tokens and sums.

Roles may be sharded differently over the same ranks. megatron-core keeps the process groups of one layout in the globals of
`parallel_state`, which many of its modules read; so each `Place` keeps the globals of its layout and swaps them in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl import platform
from megarl.data.sample import Sample
from megarl.models.layout import Layout
from megarl.schedule import Plan
from megarl.telemetry.clock import span

from megatron.core import parallel_state, tensor_parallel  # isort: skip
from megatron.core.tensor_parallel import get_cuda_rng_tracker  # isort: skip


Value = TypeVar("Value")
_control: dist.ProcessGroup | None = None


def _read_globals() -> dict[str, Any]:
    """Return megatron-core's parallel state: its module's globals, named `_LIKE_THIS` except for the list of groups."""
    names = [name for name in vars(parallel_state) if name.startswith("_") and name.isupper()]
    return {name: getattr(parallel_state, name) for name in [*names, "_global_process_group_list"]}


# The state before initialisation, so that a call outside every place fails instead of using a wrong role's groups.
_NO_PLACE = _read_globals()


@dataclass(frozen=True)
class Place:
    """This rank's coordinates in a layout, and the layout's process groups."""

    layout: Layout
    rank: int
    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    context_rank: int
    device: torch.device
    tensor_group: dist.ProcessGroup = field(repr=False, compare=False)
    context_group: dist.ProcessGroup = field(repr=False, compare=False)
    # The ranks that run the same tokens: tensor and pipeline ranks of a data and context rank.
    model_parallel_group: dist.ProcessGroup = field(repr=False, compare=False)
    _globals: Mapping[str, Any] = field(repr=False, compare=False)
    _random_states: dict[str, Any] = field(
        repr=False, compare=False
    )  # of megatron-core's tracker; they differ by tensor rank

    @property
    def is_source(self) -> bool:
        """Whether this rank holds the results of its data-parallel rank (last stage, tensor and context rank 0)."""
        return self.rank == self.source_of(self.data_rank)

    @property
    def is_leader(self) -> bool:
        """Whether this rank fetches the tokens of its model-parallel group (first stage, tensor rank 0)."""
        return self.rank == self.leader

    @property
    def leader(self) -> int:
        """The rank that fetches the tokens of this rank's model-parallel group."""
        return self.layout.rank(0, 0, self.data_rank, self.context_rank)

    def source_of(self, data_rank: int) -> int:
        return self.layout.rank(0, self.layout.pipeline - 1, data_rank)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this layout's groups megatron-core's groups inside the context.

        Everything that builds, runs, saves or loads a model runs inside; outside, megatron-core has no groups.
        """
        tracker = get_cuda_rng_tracker()
        globals_before, states_before = _read_globals(), tracker.get_states()
        vars(parallel_state).update(self._globals)
        tracker.set_states(dict(self._random_states))
        try:
            yield
        finally:
            self._random_states.update(tracker.get_states())
            tracker.set_states(states_before)
            vars(parallel_state).update(globals_before)


def start_parallel(layouts: Iterable[Layout], seed: int, timeout_s: float, local_rank: int) -> dict[Layout, Place]:
    """Make the process groups of each layout. Collective, with the same layouts on every rank.

    Raises ValueError if the number of started ranks is not the layout's.
    """
    return {layout: _start_place(layout, seed, timeout_s, local_rank) for layout in dict.fromkeys(layouts)}


def _start_place(layout: Layout, seed: int, timeout_s: float, local_rank: int) -> Place:
    world = dist.get_world_size()
    if world != layout.ranks:
        raise ValueError(f"trainer.ranks = {layout.ranks}, but {world} ranks were started; start as many")
    globals_before = _read_globals()
    vars(parallel_state).update(_NO_PLACE)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=virtual_pipeline(layout),
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor_size,
            distributed_timeout_minutes=timeout_s / 60,  # becomes a timedelta, which takes fractions
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        return Place(
            layout=layout,
            rank=dist.get_rank(),
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
            data_rank=parallel_state.get_data_parallel_rank(),
            context_rank=parallel_state.get_context_parallel_rank(),
            device=platform.current.device(local_rank),
            tensor_group=parallel_state.get_tensor_model_parallel_group(),
            context_group=parallel_state.get_context_parallel_group(),
            model_parallel_group=parallel_state.get_model_parallel_group(),
            _globals=_read_globals(),
            _random_states=get_cuda_rng_tracker().get_states(),
        )
    finally:
        get_cuda_rng_tracker().reset()
        vars(parallel_state).update(globals_before)


def virtual_pipeline(layout: Layout) -> int | None:
    """Return the number of model chunks of a stage as megatron-core counts them: None for one chunk."""
    return layout.virtual_pipeline if layout.virtual_pipeline > 1 else None


def reduce_scalars(values: Mapping[str, float], place: Place, op: str) -> dict[str, float]:
    """Return the sum (op "sum") or maximum (op "max") of the values over the place's data-parallel sources, on every rank.

    The mapping must have the same keys on every source; other ranks may pass an empty one. Collective.
    """
    keys: list[list[str]] = [sorted(values)] if place.is_source else [[]]
    source = place.source_of(0)
    dist.broadcast_object_list(keys, src=source, device=place.device)
    neutral = 0.0 if op == "sum" else float("-inf")
    terms = [values[key] if place.is_source else neutral for key in keys[0]]
    flat = torch.tensor(terms, dtype=torch.float64, device=place.device)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
    return dict(zip(keys[0], flat.tolist(), strict=True))


def start_control(timeout_s: float) -> dist.ProcessGroup:
    """Make the gloo group for metadata. Its deadline covers a rollout: while rank 0 waits for the engines, all other ranks
    wait for rank 0."""
    global _control
    _control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return _control


def broadcast_from_first(value: Value | None) -> Value:
    """Return rank 0's value on every rank."""
    box: list[Any] = [value]
    with span("wait_ranks"):
        dist.broadcast_object_list(box, src=0, group=_control)
    return box[0]


def gather_to_all(value: Value) -> list[Value]:
    """Return every rank's value, in rank order, on every rank."""
    boxes: list[Any] = [None] * dist.get_world_size()
    with span("wait_ranks"):
        dist.all_gather_object(boxes, value, group=_control)
    return boxes


def on_any_rank(flag: bool) -> bool:
    """Return whether `flag` is set on any rank. Collective."""
    flags = torch.tensor([flag], dtype=torch.int32)
    with span("wait_ranks"):
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=_control)
    return bool(flags)


def same_everywhere(number: int) -> bool:
    """Return whether all ranks have the same `number` of at most 63 bits. Collective."""
    largest = torch.tensor([number, -number], dtype=torch.int64)
    with span("wait_ranks"):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=_control)
    return bool(largest[0] == -largest[1])


def distribute_samples(payload: Any, plans: Iterable[Plan], place: Place) -> dict[int, Sample]:
    """Return the tokens of every sequence that `plans`, all of the place's layout, run on this data-parallel rank.

    The leader fetches the tokens and broadcasts them inside its model-parallel group, so that a rank holds only the tokens
    that it runs.
    """
    wanted = {sample for plan in plans for sample in plan.samples_of(place.data_rank)}
    with span("wait_data"):  # the leader waits for the engines' node, and its group for the leader
        box: list[Any] = [payload.fetch(sorted(wanted)) if place.is_leader else None]
        dist.broadcast_object_list(box, src=place.leader, group=place.model_parallel_group, device=place.device)
    return box[0]
