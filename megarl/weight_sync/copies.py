"""What a worker does with weights that it reads in place, with as many threads as it has cores for: each copies some pieces,
hashes them where they went, while they are in its cache, and makes of them what its engine computes with."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Thread
from typing import NamedTuple, Protocol

import numpy as np
import torch

from megarl.weight_sync.in_place import hashed_parts, piece_checksum

# More of them gain little: they share the memory's rate.
MOST_THREADS = 4
# So often a worker that reads in place says how far it is, and sees whether it was given up: it takes a small piece's time.
RELEASE_PIECES = 8


class Work(Protocol):
    """Some pieces of a version, which one thread copies, and what it does with them then. Threads are numbered; the caller's
    is 0. Both methods are called once in each version, one after the other by the same thread."""

    @property
    def numbers(self) -> Sequence[int]:
        """Of the pieces, among all of the version's."""

    def places(self, thread: int) -> Sequence[np.ndarray]:
        """Where each piece belongs, as words of the same shape."""

    def copied(self, thread: int) -> None:
        """All of them are there."""


class Works(NamedTuple):
    """Each piece of a version belongs to one of them at most; so many threads have memory for them."""

    each: Sequence[Work] = ()
    most_threads: int = MOST_THREADS


class Copies:
    """Does works, each once, in their order as far as threads are free. numpy lets go of Python's lock while it copies, and
    so do xxhash (4.1) above 64 KiB and vLLM while it packs.

    `sums` [pieces] are uint64, and made of what was copied. `verify_s` and `pack_s` are what hashes and the ends of works
    took, as if all threads had shared them evenly.
    """

    def __init__(self, pieces: Sequence[np.ndarray], works: Sequence[Work], version: int, num_threads: int) -> None:
        """`pieces` are all of a version, as words. Those of no work are left where they are."""
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
        """The pieces that are not copied."""
        return [number for number, done in enumerate(self._done) if not done]

    def run(self, copied: Callable[[int], None]) -> None:
        """`copied` is told now and then that so many pieces are, the first ones; it may raise. No thread is left behind."""
        num_threads = len(self._hashing_s) if self._works else 1
        names = {thread: f"weights {thread}" for thread in range(1, num_threads)}
        others = [Thread(target=self._help, name=name, args=(thread,), daemon=True) for thread, name in names.items()]
        with shared_cores(num_threads):
            try:
                for other in others:
                    other.start()
                self._do(0, copied)
            except BaseException:  # whatever the way out, threads are to stop; raised again
                self._stopped = True
                raise
            finally:
                for other in others:
                    if other.ident is not None:  # it was started
                        other.join()
                # They have hold of this, by their tracebacks, and are not to be held by it.
                errors, self._errors = self._errors, []
        if errors:
            raise errors.pop()

    def _help(self, thread: int) -> None:
        torch.get_num_threads()  # what torch was told of OpenMP threads, a thread takes over when it first asks (2.13)
        try:
            self._do(thread, lambda count: None)
        except BaseException as error:  # raised by `run`, where somebody hears of it
            self._errors.append(error)
            self._stopped = True

    @torch.no_grad()  # which is a thread's own
    def _do(self, thread: int, copied: Callable[[int], None]) -> None:
        num_pieces = 0
        while (work := self._next()) is not None:
            for number, place in zip(work.numbers, work.places(thread), strict=True):
                if self._stopped:
                    return
                np.copyto(place, self._pieces[number])
                begun = time.perf_counter()
                self.sums[number] = piece_checksum(hashed_parts(place), self._version, number)
                self._hashing_s[thread] += time.perf_counter() - begun
                self._done[number] = 1
                num_pieces += 1
                if num_pieces % RELEASE_PIECES == 0:
                    first = self._done.find(0)
                    copied(len(self._done) if first < 0 else first)
            begun = time.perf_counter()
            work.copied(thread)
            self._ending_s[thread] += time.perf_counter() - begun

    def _next(self) -> Work | None:
        try:
            return None if self._stopped else self._works.popleft()
        except IndexError:  # another thread may have been faster
            return None


@contextlib.contextmanager
def shared_cores(num_threads: int) -> Iterator[None]:
    """Each of so many threads may have as many OpenMP threads as there are cores for it, among those that this process
    computes with, and the one that `cores.worker_threads` leaves to scheduling."""
    own = torch.get_num_threads()
    shared = max(1, min(own, (own + 1) // num_threads))
    # vLLM's workers on CPUs put a function that does nothing in the place of `torch.set_num_threads` (0.32).
    set_num_threads: Callable[[int], None] = torch._C.set_num_threads
    if shared < own:
        set_num_threads(shared)
    try:
        yield
    finally:
        if shared < own:
            set_num_threads(own)


def num_copy_threads(workers: int) -> int:
    """Of each of an engine's workers, who share the cores that this process may use, and stand still while they copy."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // workers))
