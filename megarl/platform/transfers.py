"""Copy between host and GPU without making the host wait, and find torch's varlen attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; suits every dtype


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return the arrays on the device, as views of one buffer that is copied from pinned memory."""
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    starts = list(accumulate(sizes, initial=0))
    staged = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for array, start in zip(arrays, starts, strict=False):
        staged.numpy()[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
    # The pinned allocator keeps the staging buffer until the copy is made.
    placed = staged.to(device, non_blocking=True)
    return [
        placed[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


def start_to_device(copy: Tensor, device: torch.device, event: Any) -> tuple[Tensor, Any]:
    """Start to copy a host tensor to the device; return the device tensor and the event of its completion.

    The copy starts after `event` and after the computation queued so far. Wait for the returned event before using or
    freeing the tensor.
    """
    # Allocate in the computation's stream: memory that this stream freed before is free when the copy starts.
    arriving = torch.empty_like(copy, device=device, pin_memory=False)
    stream = stream_of(device, "in")
    stream.wait_stream(torch.cuda.current_stream())
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        arriving.copy_(copy, non_blocking=True)
        return arriving, stream.record_event()


@cache
def stream_of(device: torch.device, direction: str) -> torch.cuda.Stream:
    """Return the stream for copies "in" or "out"; the bus carries both directions at once."""
    return torch.cuda.Stream(device)


def has_varlen_attention(capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether torch's varlen attention runs at this compute capability (None: no GPU).

    These are the limits of its FlashAttention 2 kernels (torch 2.13, `mha_varlen_fwd` and `mha_varlen_bwd`): Ampere or
    newer, 16-bit, heads of at most 256 and a multiple of 8.
    """
    if capability is None or capability < (8, 0) or dtype not in (torch.float16, torch.bfloat16):
        return False
    return head_dim <= 256 and head_dim % 8 == 0


def varlen_attention() -> Callable[..., Any] | None:
    """Return torch's function, which has the kernels of the flash-attn package; None if this torch's wants as many key heads
    as query heads (2.11)."""
    from torch.nn.attention.varlen import varlen_attn  # here, because it registers operators that a CPU does not need

    return varlen_attn if "enable_gqa" in inspect.signature(varlen_attn).parameters else None
