"""Copy mapped weights into an engine on a CPU, with as many threads as the worker has cores.

The unit is a *work*: the boxes of a module, of some small modules of a layer, or one box of a large module. A thread copies
the pieces of a work, hashes the copies while they are in its cache, and then has vLLM pack the modules. Where vLLM keeps
only the packed form of a module, spare memory holds the module until its work is packed, and then modules of the next work.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import torch

# By name, before a vLLM worker on a CPU replaces `torch.set_num_threads` by a function that does nothing (0.32).
from torch import set_num_threads
from torch.multiprocessing.reductions import StorageWeakRef

from megarl.weight_sync.buckets import NUM_BUCKETS, LocalBox

Result = TypeVar("Result")
MOST_THREADS = 4  # more threads gain little, because they share the memory's bandwidth
# Rows whose length is a multiple of SAME_PLACE_BYTES share few places of a CPU's nearest cache. The 64 rows that oneDNN
# packs at a time then evict each other, and packing takes up to three times as long (bf16, 4096 columns, Zen 4).
LINE_BYTES, SAME_PLACE_BYTES = 64, 1024
# To find the places of a module takes several times as long between two copies as right after another module. So small
# modules share a work.
WORK_BYTES = 4 << 20


class SpareMemory:
    """Memory for parameters that are packed right after they are written, lent to one work after another. On a CPU the
    first touch of fresh memory takes several times as long as later ones; on a device torch's allocator reuses memory."""

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []  # one for each parameter of a work
        self._loans: list[StorageWeakRef] = []  # of the first blocks
        self.num_lent = 0

    def take(self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device, apart: bool = False) -> torch.Tensor:
        """Lend a tensor with unknown content until `take_back`. The rows of a matrix may lie `apart`."""
        number, self.num_lent = len(self._loans), self.num_lent + 1
        if device.type != "cpu" or not math.prod(size):
            return torch.empty(size, dtype=dtype, device=device)
        stored = (size[0], apart_bytes(size[1] * dtype.itemsize) // dtype.itemsize) if apart else size
        num_bytes = math.prod(stored) * dtype.itemsize
        if number == len(self._blocks) or len(self._blocks[number]) < num_bytes:
            block = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # To make small pages takes several times as long as to write to them; the kernel makes large ones faster.
            with contextlib.suppress(OSError):  # a kernel without large pages
                block.madvise(mmap.MADV_HUGEPAGE)
            self._blocks[number : number + 1] = [block]
        whole = torch.frombuffer(self._blocks[number], dtype=dtype, count=math.prod(stored)).view(stored)
        self._loans.append(StorageWeakRef(whole.untyped_storage()))
        return whole[:, : size[1]] if apart else whole

    def take_back(self) -> None:
        """End all loans. A block that is still referred to is not lent again: vLLM keeps its weights there."""
        lent, self._blocks = self._blocks[: len(self._loans)], self._blocks[len(self._loans) :]
        self._blocks[:0] = [block for block, loan in zip(lent, self._loans, strict=True) if loan.expired()]
        self._loans, self.num_lent = [], 0


def apart_bytes(row_bytes: int) -> int:
    """Return the bytes from one row to the next, so that few rows share a place in the cache."""
    return row_bytes + (LINE_BYTES if row_bytes % SAME_PLACE_BYTES == 0 else 0)


class Works(NamedTuple):
    """The numbers of the boxes of each work, and the number of threads that have spare memory."""

    each: Sequence[Sequence[int]]
    most_threads: int


def divide(
    boxes: Sequence[LocalBox], sizes: Mapping[str, tuple[int, int]], is_large: Callable[[str], bool], bucket_bytes: int
) -> Works:
    """Divide all boxes of a version into works: one for each module, or for modules of a layer that are small together; but
    one for each box of a large module, which is written in place. `sizes` are [rows, columns] of every parameter."""
    by_module: dict[str, list[int]] = {}
    for number, box in enumerate(boxes):
        by_module.setdefault(box.owner, []).append(number)
    large: list[list[int]] = []
    # The modules of each layer: bytes, bytes of each parameter in spare memory, and numbers of boxes.
    layers: dict[str, list[tuple[int, list[int], list[int]]]] = {}
    for owner, numbers in by_module.items():
        if is_large(owner):
            large += [[number] for number in numbers]
            continue
        itemsizes = {boxes[number].parameter: boxes[number].dtype.itemsize for number in numbers}
        matrices = [(sizes[name][0], sizes[name][1] * itemsize) for name, itemsize in itemsizes.items()]
        stored = [rows * apart_bytes(row_bytes) for rows, row_bytes in matrices]
        layer = layers.setdefault(owner.partition(".layers.")[2].partition(".")[0], [])
        layer.append((sum(rows * row_bytes for rows, row_bytes in matrices), stored, numbers))
    works: list[list[int]] = []
    spare: list[list[int]] = []  # bytes of each parameter of each work
    for layer in layers.values():
        left = 0  # bytes of the last work
        # The largest module first: the first parameters of works share a block.
        for _, stored, numbers in sorted(layer, key=lambda module: -module[0]):
            if sum(stored) > left:
                works.append([])
                spare.append([])
                left = WORK_BYTES
            works[-1] += numbers
            spare[-1] += stored
            left -= sum(stored)
    # The spare memory of all threads together is at most the largest layer and two buckets. The first parameters of all
    # works share one block of a thread's spare memory, the second parameters another, and so on.
    thread_bytes = sum(map(max, zip_longest(*spare, fillvalue=0)))
    room = max((sum(num_bytes for num_bytes, *_ in layer) for layer in layers.values()), default=0)
    room += NUM_BUCKETS * bucket_bytes
    return Works(large + works, min(MOST_THREADS, max(1, room // max(1, thread_bytes))))


def num_threads(works: Works, workers: int) -> int:
    """Return the threads of each of an engine's workers, which share the cores of this process and are otherwise idle."""
    return max(1, min(works.most_threads, len(os.sched_getaffinity(0)) // workers))


def in_threads(works: Works, threads: int, do: Callable[[Sequence[int], SpareMemory], Result]) -> list[Result]:
    """Call `do` once for each work, with spare memory of the thread, and return the results. After a failure, works that
    have not begun are dropped.

    Threads take the next work by themselves. If the caller waited for each result, it would wake up after every work and
    take the GIL from the threads: that cost a fifth of a sync of 270 MB."""
    left = iter(works.each)

    @torch.no_grad()  # the mode of a thread
    def run(_: int) -> list[Result]:
        spare = SpareMemory()
        try:
            return [do(work, spare) for work in left]
        except BaseException:  # raised again
            for _work in left:
                pass
            raise

    if threads == 1:  # in this thread, whose OpenMP threads exist and are bound to their cores
        return run(0)
    # The threads divide this process's OpenMP threads, and the core that `cores.worker_threads` leaves to scheduling.
    before = torch.get_num_threads()
    set_num_threads(max(1, min(before, (before + 1) // threads)))
    try:
        # A thread adopts torch's number of OpenMP threads when it first asks (2.13).
        with ThreadPoolExecutor(threads, "weights", torch.get_num_threads) as pool:
            return [result for results in pool.map(run, range(threads)) for result in results]
    finally:
        set_num_threads(before)
