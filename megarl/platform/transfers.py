"""Copies between host and GPU that nobody waits for, and where torch's varlen attention runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; any type of torch may begin there


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays on the device, as views of one buffer that is copied from pinned memory."""
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    starts = list(accumulate(sizes, initial=0))
    staged = _pinned(starts[-1])
    for array, start in zip(arrays, starts, strict=False):
        staged.numpy()[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
    # The allocator of pinned memory keeps the staging buffer until the copy is made.
    placed = staged.to(device, non_blocking=True)
    return [
        placed[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def start_to_device(copy: Tensor, device: torch.device, event: Any) -> tuple[Tensor, Any]:
    """A tensor that a copy of the host's is written into beside the computation, and the event that it is complete at.

    The copy begins when `event` has passed and the computation has come to this call. The caller waits for the second event
    before it uses or frees the tensor.
    """
    # The computation's own memory: what it frees earlier is free by the time that the copy begins.
    arriving = torch.empty_like(copy, device=device, pin_memory=False)
    stream = stream_of(device, "in")
    stream.wait_stream(torch.cuda.current_stream())
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        arriving.copy_(copy, non_blocking=True)
        return arriving, stream.record_event()


@cache
def stream_of(device: torch.device, direction: str) -> torch.cuda.Stream:
    """The stream of the copies in one direction, "in" or "out": the bus carries both at once."""
    return torch.cuda.Stream(device)


def has_varlen_attention(capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's varlen attention runs on a device of this compute capability (None: no GPU).

    The limits are those of its FlashAttention 2 kernels (torch 2.13, `mha_varlen_fwd` and `mha_varlen_bwd`): Ampere or
    newer, 16-bit, heads of at most 256 and a multiple of 8.
    """
    if capability is None or capability < (8, 0) or dtype not in (torch.float16, torch.bfloat16):
        return False
    return head_dim <= 256 and head_dim % 8 == 0


def varlen_attention() -> Callable[..., Any]:
    """torch's own; the flash-attn package has the same kernels."""
    from torch.nn.attention.varlen import varlen_attn  # here: it registers operators, which a CPU has no use for

    return varlen_attn
