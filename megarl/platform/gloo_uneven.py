"""Uneven parts for gloo, which gathers and scatters even ones only.

Ranks that share an expert's tensors gather the tokens that each was sent, and no two were sent the same number. NCCL takes
that; for gloo every part is padded to the longest. The functions stand in for those of the same name in
`megatron.core.tensor_parallel.mappings`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


def install(mappings: ModuleType) -> None:
    """Replace the module's gather and reduce-scatter by ones that take uneven parts."""
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_along_first_dim(own: Tensor, group: Any, output_split_sizes: Any = None, *more: Any, **named: Any) -> Tensor:
        even = _even(output_split_sizes, group)
        return gather(own, group, output_split_sizes, *more, **named) if even else _gather(own, group, output_split_sizes)

    def reduce_scatter_along_first_dim(
        parts: Tensor, group: Any, input_split_sizes: Any = None, *more: Any, **named: Any
    ) -> Tensor:
        even = _even(input_split_sizes, group)
        return (
            scatter(parts, group, input_split_sizes, *more, **named) if even else _scatter(parts, group, input_split_sizes)
        )

    mappings._gather_along_first_dim = gather_along_first_dim  # type: ignore[attr-defined]
    mappings._reduce_scatter_along_first_dim = reduce_scatter_along_first_dim  # type: ignore[attr-defined]


def _even(sizes: Any, group: Any) -> bool:
    return sizes is None or group.size() == 1 or len(set(sizes)) == 1


def _gather(own: Tensor, group: Any, sizes: list[int]) -> Tensor:
    """Everyone's `own` [rows of the rank, ...], one after the other."""
    longest = max(sizes)
    parts = [own.new_empty(longest, *own.shape[1:]) for _ in sizes]
    dist.all_gather(parts, _padded(own, longest), group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _scatter(parts: Tensor, group: Any, sizes: list[int]) -> Tensor:
    """This rank's part of the sum over everyone's `parts` [sum of sizes, ...]."""
    longest, rank = max(sizes), group.rank()
    padded = [_padded(part, longest) for part in parts.split(list(sizes))]
    own = torch.empty_like(padded[rank])
    dist.reduce_scatter(own, padded, group=group)
    return own[: sizes[rank]].contiguous()


def _padded(part: Tensor, rows: int) -> Tensor:
    """`part` with rows of zeros behind it."""
    return pad(part, (0, 0) * (part.dim() - 1) + (0, rows - len(part))).contiguous()
