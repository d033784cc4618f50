"""How a worker copies weights that it reads in place into its engine, with as many threads as it has cores for.

The unit is a *work*: the boxes of one module, or one box of a large module. A thread copies the pieces of a work, hashes
them where they went, while they are in its cache, and then has vLLM pack the module. Memory for modules of which only the
packed form lives is lent to one module after another.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from threading import Thread
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from megarl.weight_sync.in_place import piece_checksum, words_of
from megarl.weight_sync.transport import NUM_BUCKETS

Matrix = TypeVar("Matrix", torch.Tensor, np.ndarray)
MOST_THREADS = 4  # more gain little: they share the memory's rate
# After so many pieces a worker reports its progress and looks whether it was given up: that costs as much as a small piece.
RELEASE_PIECES = 8
HUGE_PAGE_BYTES = 2 << 20
# Lines of a CPU's nearest cache. Rows of this many bytes, or a multiple, share a few places of the cache, and the 64 rows
# that oneDNN packs at a time drive each other out: packing takes up to three times as long (bf16, 4096 columns, Zen 4).
LINE_BYTES, SAME_PLACE_BYTES = 64, 1024


class Box(NamedTuple):
    """A rectangle of a local parameter: `content` [rows, cols] belongs at (row, col), and the `scales` of FP8 blocks at the
    place of their blocks. The content of a box that is read in place is also there as `words`: whole numbers, which numpy
    handles in a fraction of torch's time."""

    parameter: str
    row: int
    col: int
    content: torch.Tensor
    scales: torch.Tensor | None = None
    words: np.ndarray | None = None

    @property
    def in_words(self) -> np.ndarray:
        """The words of a box that is read in place."""
        assert self.words is not None, "what comes in buckets has no words"
        return self.words

    def within(self, matrix: Matrix) -> Matrix:
        """Where the box belongs in the whole parameter, [rows, columns], or in its words. Raises ValueError where the
        parameter is smaller."""
        rows, cols = self.content.shape
        place = matrix[self.row : self.row + rows, self.col : self.col + cols]
        if place.shape != (rows, cols):
            raise ValueError(
                f"a matrix of {tuple(matrix.shape)} ends before {self.row + rows} x {self.col + cols} of {self.parameter}"
            )
        return place


class Work(Protocol):
    """Some pieces of a version, which one thread copies, and what the thread does then. Threads are numbered; the caller is
    thread 0. Both methods are called once in each version, in order, by the same thread."""

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the pieces among all pieces of the version."""

    def places(self, thread: int) -> Sequence[np.ndarray]:
        """Where each piece belongs, as words of the same shape."""

    def copied(self, thread: int) -> None:
        """Called when all pieces are there."""


class Works(NamedTuple):
    """Works, where each piece of a version belongs to at most one; there is spare memory for `most_threads` threads."""

    each: Sequence[Work] = ()
    most_threads: int = MOST_THREADS


class Copies:
    """Does each work once, in order as threads become free. numpy releases the GIL while it copies, xxhash (4.1) above
    64 KiB, and vLLM while it packs.

    `sums` [pieces] are uint64 checksums of the copies. `verify_s` and `pack_s` are the seconds of hashing and of finishing
    works, divided by the number of threads.
    """

    def __init__(self, pieces: Sequence[np.ndarray], works: Sequence[Work], version: int, num_threads: int) -> None:
        """`pieces` are all pieces of a version, as words. Pieces of no work stay where they are."""
        self.sums = np.zeros(len(pieces), dtype=np.uint64)
        self._pieces, self._version, self._works = pieces, version, deque(works)
        self._done = bytearray(len(pieces))  # 1 for a piece that is copied and hashed
        self._hashing_s, self._ending_s = [0.0] * num_threads, [0.0] * num_threads
        self._stopped = False
        self._errors: list[BaseException] = []  # of other threads than the caller's

    @property
    def verify_s(self) -> float:
        return sum(self._hashing_s) / len(self._hashing_s)

    @property
    def pack_s(self) -> float:
        return sum(self._ending_s) / len(self._ending_s)

    @property
    def left(self) -> list[int]:
        """The numbers of the pieces that are not copied."""
        return [number for number, done in enumerate(self._done) if not done]

    def run(self, copied: Callable[[int], None]) -> None:
        """Do all works; no thread is left behind. `copied(count)` is called now and then, when the first `count` pieces are
        there; it may raise."""

        def help_thread(thread: int) -> None:
            torch.get_num_threads()  # a thread adopts torch's number of OpenMP threads when it first asks (2.13)
            try:
                self._do(thread, lambda count: None)
            except BaseException as error:  # `run` raises it in the caller's thread
                self._errors.append(error)
                self._stopped = True

        num_threads = len(self._hashing_s) if self._works else 1
        names = {thread: f"weights {thread}" for thread in range(1, num_threads)}
        others = [Thread(target=help_thread, name=name, args=(thread,), daemon=True) for thread, name in names.items()]
        with shared_cores(num_threads):
            try:
                for other in others:
                    other.start()
                self._do(0, copied)
            except BaseException:  # whatever happened, threads must stop; raised again
                self._stopped = True
                raise
            finally:
                for other in others:
                    if other.ident is not None:  # it was started
                        other.join()
                # Their tracebacks refer to this object: break the cycle.
                errors, self._errors = self._errors, []
        if errors:
            raise errors.pop()

    @torch.no_grad()  # the mode of a thread
    def _do(self, thread: int, copied: Callable[[int], None]) -> None:
        num_pieces = 0
        while not self._stopped:
            try:
                work = self._works.popleft()
            except IndexError:  # another thread may have taken the last work
                return
            for number, place in zip(work.numbers, work.places(thread), strict=True):
                if self._stopped:
                    return
                np.copyto(place, self._pieces[number])
                begun = time.perf_counter()
                self.sums[number] = piece_checksum(place, self._version, number)
                self._hashing_s[thread] += time.perf_counter() - begun
                self._done[number] = 1
                num_pieces += 1
                if num_pieces % RELEASE_PIECES == 0:
                    first = self._done.find(0)
                    copied(len(self._done) if first < 0 else first)
            begun = time.perf_counter()
            work.copied(thread)
            self._ending_s[thread] += time.perf_counter() - begun


@contextlib.contextmanager
def shared_cores(num_threads: int) -> Iterator[None]:
    """Divide this process's OpenMP threads, and the core that `cores.worker_threads` leaves to scheduling, among threads."""
    before = torch.get_num_threads()
    # vLLM's workers on CPUs replace `torch.set_num_threads` by a function that does nothing (0.32).
    set_num_threads: Callable[[int], None] = torch._C.set_num_threads
    set_num_threads(max(1, min(before, (before + 1) // num_threads)))
    try:
        yield
    finally:
        set_num_threads(before)


def num_copy_threads(workers: int) -> int:
    """Copy threads of each of an engine's workers: they share the cores of this process, and do nothing else meanwhile."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // workers))


def apart_bytes(row_bytes: int) -> int:
    """Bytes from one row to the next, so that few rows share a place in the cache."""
    return row_bytes + (LINE_BYTES if row_bytes % SAME_PLACE_BYTES == 0 else 0)


class SpareMemory:
    """Memory for parameters that are packed right after they are written, lent to one module after another: the first touch
    of fresh memory takes several times as long as later ones."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []  # one for each parameter of a module
        self._taken = 0

    @property
    def in_use(self) -> bool:
        """Whether any memory is lent."""
        return self._taken > 0

    def take(self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device, apart: bool = False) -> torch.Tensor:
        """Lend a tensor with unknown content until `take_back`. The rows of a matrix may lie `apart`."""
        stored = (size[0], apart_bytes(size[1] * dtype.itemsize) // dtype.itemsize) if apart else size
        num_bytes = math.prod(stored) * dtype.itemsize
        if self._taken == len(self._blocks):
            self._blocks.append(_Block(0, device))
        if self._blocks[self._taken].num_bytes < num_bytes:
            self._blocks[self._taken] = _Block(num_bytes, device)
        block = self._blocks[self._taken]
        self._taken += 1
        return block.lent(size, stored, dtype)

    def words(self, matrix: torch.Tensor) -> np.ndarray:
        """The words of the tensor that was lent last, or of another matrix in host memory (`words_of`)."""
        words = self._blocks[self._taken - 1].words(matrix) if self._taken else None
        return words_of(matrix) if words is None else words

    def take_back(self) -> None:
        """End all loans. Blocks that somebody still refers to are not lent again: vLLM kept its weights there."""
        self._blocks = [block for block in self._blocks if _num_references(block.memory) <= block.references]
        self._taken = 0

    def clear(self) -> None:
        self._blocks, self._taken = [], 0


class _Block:
    """Memory, uint8 [bytes], with the views that it was lent as: modules of one kind have the same sizes, and making views
    anew between two copies, which take the cache from Python, took a tenth of a sync's transfer."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        if device.type != "cpu" or num_bytes < HUGE_PAGE_BYTES:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        else:
            # The kernel makes large pages at four times the rate of small pages, which take several times as long as the
            # writes to them.
            mapping = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without large pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
            self.memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self.num_bytes, self._place = num_bytes, self.memory.data_ptr()
        self._views: dict[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._words: dict[tuple[torch.Size, tuple[int, ...], torch.dtype], np.ndarray] = {}
        self.references = 1  # of this block itself

    def lent(self, size: tuple[int, ...], stored: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor each time, so that a kept reference counts. The `stored` matrix may have longer rows."""
        key = size, stored, dtype
        if key not in self._views:
            whole = self.memory[: math.prod(stored) * dtype.itemsize].view(dtype).view(stored)
            self._views[key] = whole[..., : size[-1]]
            del whole
            self.references = _num_references(self.memory)
        return self._views[key].detach()

    def words(self, matrix: torch.Tensor) -> np.ndarray | None:
        """The words of a matrix in this memory; None for any other matrix."""
        if matrix.data_ptr() != self._place:
            return None
        key = matrix.shape, matrix.stride(), matrix.dtype
        if key not in self._words:
            others = _num_references(self.memory) - self.references
            self._words[key] = words_of(matrix)
            self.references = _num_references(self.memory) - others
        return self._words[key]


def _num_references(tensor: torch.Tensor) -> int:
    """How many tensors share a tensor's storage, including itself."""
    storage = tensor.untyped_storage()  # holds another reference
    return torch._C._storage_Use_Count(storage._cdata) - 1


class Writer(Protocol):
    """Knows the modules of the engine: the receiver."""

    def is_large(self, owner: str) -> bool:
        """Whether a module is written in place, and takes long to copy."""

    def address(self, parameter: str) -> int:
        """Address of a parameter, 0 where only its packed form lives."""

    def target(self, parameter: str, dtype: torch.dtype, spare: SpareMemory) -> torch.Tensor:
        """Where to write a parameter, [rows, columns]: in its place, or in spare memory."""

    def complete(self, owner: str, spare: SpareMemory) -> None:
        """Called when a module, or a part of a large module, has come."""


class ModuleWork:
    """The boxes of one module, or one box of a large module, by the numbers of their pieces.

    The places of the boxes stay the same until a parameter moves, and are kept: between two copies Python is slow, since
    each copy takes the cache from it. The kept places hold the memory, so nothing else can get the same address.
    """

    def __init__(
        self, writer: Writer, owner: str, boxes: Sequence[Box], numbers: Sequence[int], spares: Sequence[SpareMemory]
    ) -> None:
        """`spares` is the spare memory of each thread."""
        self.numbers = numbers
        self._writer, self._owner, self._spares = writer, owner, spares
        self._boxes = [boxes[number] for number in numbers]
        self._places: list[np.ndarray] = []
        self._addresses: dict[str, int] = {}  # empty: the places are not known

    def places(self, thread: int) -> Sequence[np.ndarray]:
        writer, known, spare = self._writer, self._addresses, self._spares[thread]
        if known and all(writer.address(parameter) == address for parameter, address in known.items()):
            return self._places
        self._places, self._addresses = [], {}
        words = {}
        for parameter, dtype in {box.parameter: box.content.dtype for box in self._boxes}.items():
            words[parameter] = spare.words(writer.target(parameter, dtype, spare))
        places = [box.within(words[box.parameter]) for box in self._boxes]
        if not spare.in_use:  # a kept reference would stop it from being lent again
            self._places, self._addresses = places, {parameter: writer.address(parameter) for parameter in words}
        return places

    def copied(self, thread: int) -> None:
        self._writer.complete(self._owner, self._spares[thread])


def module_works(
    writer: Writer,
    boxes: Sequence[Box],
    sizes: Mapping[str, tuple[int, int]],
    spares: Sequence[SpareMemory],
    bucket_bytes: int,
) -> Works:
    """Divide all `boxes` of a version into works: a work for each module, and for each piece of a large module. Ranks see a
    worker's progress by the order of the boxes. `sizes` are [rows, columns] of every parameter."""
    by_module: dict[str, list[int]] = {}
    for number, box in enumerate(boxes):
        by_module.setdefault(box.parameter.rpartition(".")[0], []).append(number)
    works: list[ModuleWork] = []
    matrices: dict[str, list[tuple[int, int]]] = {}
    for owner, numbers in by_module.items():
        if writer.is_large(owner):
            works += [ModuleWork(writer, owner, boxes, [number], spares) for number in numbers]
        else:
            works.append(ModuleWork(writer, owner, boxes, numbers, spares))
            itemsizes = {boxes[number].parameter: boxes[number].content.itemsize for number in numbers}
            matrices[owner] = [(sizes[name][0], sizes[name][1] * itemsize) for name, itemsize in itemsizes.items()]
    # Spare memory of all threads together takes no more than the largest layer and two buckets, which nobody has here. The
    # first parameter of one module has the same spare memory as the first parameter of the next, and so on.
    layers: dict[str, int] = {}
    for owner, each in matrices.items():
        layer = owner.partition(".layers.")[2].partition(".")[0]
        layers[layer] = layers.get(layer, 0) + sum(rows * row_bytes for rows, row_bytes in each)
    spare = [[rows * apart_bytes(row_bytes) for rows, row_bytes in each] for each in matrices.values()]
    thread_bytes = sum(map(max, zip_longest(*spare, fillvalue=0)))
    room = max(layers.values(), default=0) + NUM_BUCKETS * bucket_bytes
    return Works(works, min(len(spares), max(1, room // max(1, thread_bytes))))
