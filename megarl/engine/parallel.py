"""Which part of the layout this rank is, and the few collectives the phases need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl import platform
from megarl.reshard.boxes import Layout

from megatron.core import parallel_state, tensor_parallel  # isort: skip


@dataclass(frozen=True)
class Place:
    """This rank's coordinates. `is_source`: it holds the results of its data-parallel rank (last stage, tensor rank 0)."""

    layout: Layout
    rank: int
    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    device: torch.device

    @property
    def is_source(self) -> bool:
        return self.tensor_rank == 0 and self.pipeline_rank == self.layout.pipeline - 1

    @property
    def is_leader(self) -> bool:
        """The rank that fetches the tokens of its data-parallel rank (first stage, tensor rank 0)."""
        return self.tensor_rank == 0 and self.pipeline_rank == 0

    def source_of(self, data_rank: int) -> int:
        return self.layout.rank(0, self.layout.pipeline - 1, data_rank)


def start_parallel(layout: Layout, seed: int, timeout_s: float, local_rank: int) -> Place:
    """Cut the started process group into megatron-core's groups.

    Raises ValueError where the number of started ranks is not the layout's.
    """
    world = dist.get_world_size()
    if world != layout.ranks:
        raise ValueError(f"trainer.ranks = {layout.ranks}, but {world} ranks were started; start as many")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        distributed_timeout_minutes=timeout_s / 60,  # becomes a timedelta, which takes fractions
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Place(
        layout=layout,
        rank=dist.get_rank(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        device=platform.current.device(local_rank),
    )


def reduce_scalars(values: Mapping[str, float], place: Place, op: str) -> dict[str, float]:
    """Sum (op "sum") or maximum (op "max") over the data-parallel sources, known to every rank.

    The mapping must have the same keys on every source; other ranks may pass an empty one. Raises whatever the
    collective raises at its deadline.
    """
    keys: list[list[str]] = [sorted(values)] if place.is_source else [[]]
    source = place.source_of(0)
    dist.broadcast_object_list(keys, src=source, device=place.device)
    neutral = 0.0 if op == "sum" else float("-inf")
    own = [values[key] if place.is_source else neutral for key in keys[0]]
    flat = torch.tensor(own, dtype=torch.float64, device=place.device)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
    return dict(zip(keys[0], flat.tolist(), strict=True))
