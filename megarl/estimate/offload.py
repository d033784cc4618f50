"""Sizes of what offloading adds on a GPU: pinned memory of the host, and activations that come back early."""

from __future__ import annotations

# Activations that are on their way back, or back before the backward pass asks for them, take at most this much of the
# device; one tensor may be larger.
PREFETCH_BYTES = 256 << 20


def pinned_bytes(size: int) -> int:
    """Bytes of the host that a pinned buffer of `size` bytes takes: torch's allocator (2.13, `CachingHostAllocator`) rounds
    up to a power of two."""
    return 1 << (size - 1).bit_length() if size else 0
