"""Collectives of megatron-core that gloo lacks or does badly, by functions that replace those of the same name.

Uneven parts: ranks that share an expert's tensors gather the tokens that each was sent, and no two were sent the same
number. NCCL takes uneven parts; for gloo every part is padded to the longest.

A group of one rank: megatron-core's distributed optimizer gathers parameters and scatters gradients whatever the size of the
group. gloo copies the buffer onto itself in a thread of its own, with a team of OpenMP threads. libgomp counts these too;
once it manages more threads than there are cores it lets none wait in a loop, and every small product pays for the kernel to
wake the others (torch 2.13; two threads on two cores: passes are 1.1 to 1.3 times slower). Ranks of a larger group whose
gathers gloo copies still pay it, where they have several threads.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


def install_uneven(mappings: ModuleType) -> None:
    """Replace the gather and reduce-scatter of `mappings` by ones that take uneven parts."""
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


def install_alone(buffers: ModuleType) -> None:
    """Replace the gather and reduce-scatter of `param_and_grad_buffer` by ones that do nothing in a group of one.

    The module binds the second one anew under `reduce_scatter_with_fp32_accumulation`, which megarl never sets.
    """
    buffers.dist_all_gather_func = _unless_alone(buffers.dist_all_gather_func)  # type: ignore[attr-defined]
    buffers.dist_reduce_scatter_func = _unless_alone(buffers.dist_reduce_scatter_func)  # type: ignore[attr-defined]


def _unless_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    def collective(output: Tensor, own: Tensor, *more: Any, group: Any, **named: Any) -> Any:
        if group.size() > 1:
            return function(output, own, *more, group=group, **named)
        if output.data_ptr() != own.data_ptr():
            output.copy_(own)
        return None  # nothing to wait for

    return collective
