"""Collectives of megatron-core that gloo lacks or runs badly; the replacements have the same names.

Uneven parts: ranks that share an expert's tensors gather different numbers of tokens. NCCL takes uneven parts; for gloo
every part is padded to the longest.

Groups of one rank: megatron-core's distributed optimizer gathers and scatters at any group size. gloo copies the buffer onto
itself in a thread with its own OpenMP team. With more threads than cores under libgomp, no thread waits in a loop
any more, and every small product pays for a wake-up (torch 2.13; two threads on two cores: passes take 1.1 to 1.3 times as
long). Ranks of larger groups still pay it where they have several threads.
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
    """Replace the gather and the reduce-scatter of megatron-core's `mappings` by ones that take uneven parts."""
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_along_first_dim(
        local: Tensor, group: Any, output_split_sizes: Any = None, *more: Any, **named: Any
    ) -> Tensor:
        """Concatenate every rank's `local` [rows of the rank, ...]."""
        sizes = output_split_sizes
        if _is_even(sizes, group):
            return gather(local, group, sizes, *more, **named)
        longest = max(sizes)
        parts = [local.new_empty(longest, *local.shape[1:]) for _ in sizes]
        dist.all_gather(parts, _padded(local, longest), group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatter_along_first_dim(
        parts: Tensor, group: Any, input_split_sizes: Any = None, *more: Any, **named: Any
    ) -> Tensor:
        """Return this rank's part of the sum over every rank's `parts` [sum of sizes, ...]."""
        sizes = input_split_sizes
        if _is_even(sizes, group):
            return scatter(parts, group, sizes, *more, **named)
        longest, rank = max(sizes), group.rank()
        padded = [_padded(part, longest) for part in parts.split(list(sizes))]
        local = torch.empty_like(padded[rank])
        dist.reduce_scatter(local, padded, group=group)
        return local[: sizes[rank]].contiguous()

    mappings._gather_along_first_dim = gather_along_first_dim  # type: ignore[attr-defined]
    mappings._reduce_scatter_along_first_dim = reduce_scatter_along_first_dim  # type: ignore[attr-defined]


def _is_even(sizes: Any, group: Any) -> bool:
    return sizes is None or group.size() == 1 or len(set(sizes)) == 1


def _padded(part: Tensor, num_rows: int) -> Tensor:
    """Append rows of zeros."""
    return pad(part, (0, 0) * (part.dim() - 1) + (0, num_rows - len(part))).contiguous()


def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return the gather or reduce-scatter of `param_and_grad_buffer` that only copies in a group of one.

    The module rebinds its reduce-scatter under `reduce_scatter_with_fp32_accumulation`, which megarl never sets.
    """

    def replacement(output: Tensor, local: Tensor, *more: Any, group: Any, **named: Any) -> Any:
        if group.size() > 1:
            return collective(output, local, *more, group=group, **named)
        if output.data_ptr() != local.data_ptr():
            output.copy_(local)
        return None  # no work to wait for

    return replacement
