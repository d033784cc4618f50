"""Memory that a worker lends to one module after the other while it takes new weights."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import torch

from megarl.weight_sync.in_place import words_of

HUGE_PAGE_BYTES = 2 << 20
# Lines of a CPU's nearest cache. Rows that are so many bytes long, or a multiple, share a few of its places, and the 64 rows
# that oneDNN packs at a time drive each other out: packing takes up to three times as long (bf16, 4096 columns, Zen 4).
LINE_BYTES, SAME_PLACE_BYTES = 64, 1024


def apart_bytes(row_bytes: int) -> int:
    """From the beginning of a row to that of the next, so that few of them share a place in the cache."""
    return row_bytes + (LINE_BYTES if row_bytes % SAME_PLACE_BYTES == 0 else 0)


class SpareMemory:
    """Memory for parameters that are packed right after they were written, the same for one module after the other: the
    first touch of fresh memory takes several times longer than every later one."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []  # one for each parameter of a module
        self._taken = 0

    @property
    def in_use(self) -> bool:
        """Whether anything was taken and not taken back."""
        return self._taken > 0

    def take(self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device, apart: bool = False) -> torch.Tensor:
        """A tensor with unknown content, which nobody uses after `take_back`. The rows of a matrix may lie `apart`."""
        stored = (size[0], apart_bytes(size[1] * dtype.itemsize) // dtype.itemsize) if apart else size
        num_bytes = math.prod(stored) * dtype.itemsize
        if self._taken == len(self._blocks):
            self._blocks.append(_Block(torch.empty(0, dtype=torch.uint8, device=device)))
        if self._blocks[self._taken].num_bytes < num_bytes:
            self._blocks[self._taken] = _Block(_fresh(num_bytes, device))
        block = self._blocks[self._taken]
        self._taken += 1
        return block.lent(size, stored, dtype)

    def words(self, matrix: torch.Tensor) -> np.ndarray:
        """What was taken last, or another matrix of the host's memory, as `words_of` says."""
        found = self._blocks[self._taken - 1].words(matrix) if self._taken else None
        return words_of(matrix) if found is None else found

    def take_back(self) -> None:
        """What was taken may be given out again, but for blocks that somebody still refers to: vLLM kept its weights
        there."""
        self._blocks = [block for block in self._blocks if not block.is_kept()]
        self._taken = 0

    def clear(self) -> None:
        self._blocks, self._taken = [], 0


class _Block:
    """Memory, uint8 [bytes], and what it was lent as: modules of one kind have the same sizes, and making views anew between
    two copies, which take the cache from Python, took a tenth of a sync's transfer."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.num_bytes, self._place = memory, len(memory), memory.data_ptr()
        self._views: dict[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._words: dict[tuple[torch.Size, tuple[int, ...], torch.dtype], np.ndarray] = {}
        self._own_references = 1

    def lent(self, size: tuple[int, ...], stored: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Another tensor each time, so that it is seen where somebody keeps it. What it is `stored` as has longer rows."""
        key = size, stored, dtype
        if key not in self._views:
            whole = self.memory[: math.prod(stored) * dtype.itemsize].view(dtype).view(stored)
            self._views[key] = whole[..., : size[-1]]
            del whole
            self._own_references = _num_references(self.memory)
        return self._views[key].detach()

    def words(self, matrix: torch.Tensor) -> np.ndarray | None:
        """None for what does not lie here."""
        if matrix.data_ptr() != self._place:
            return None
        key = matrix.shape, matrix.stride(), matrix.dtype
        if key not in self._words:
            others = _num_references(self.memory) - self._own_references
            self._words[key] = words_of(matrix)
            self._own_references = _num_references(self.memory) - others
        return self._words[key]

    def is_kept(self) -> bool:
        """Whether anybody else has a tensor on it."""
        return _num_references(self.memory) > self._own_references


def _fresh(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes]. On a CPU in large pages: the kernel makes these at four times the rate of small ones, which take
    several times as long as what is written to them."""
    if device.type != "cpu" or num_bytes < HUGE_PAGE_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _num_references(tensor: torch.Tensor) -> int:
    """How many tensors share this one's storage, itself among them."""
    storage = tensor.untyped_storage()  # one more reference
    return torch._C._storage_Use_Count(storage._cdata) - 1
