"""Copying what a worker reads in place, with as many threads as it has cores for."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Thread
from typing import NamedTuple

import numpy as np

from megarl.sync.in_place import hashed_parts, piece_checksum

# More of them gain little: they share the memory's rate.
MOST_THREADS = 4
# So often a worker that reads in place says how far it is, and sees whether it was given up: it takes a small piece's time.
RELEASE_PIECES = 8
# Pieces that are copied and not yet hashed: so many are still in the cache that cores share.
MOST_UNHASHED = 4


class PieceCopy(NamedTuple):
    """The words of a piece, where they belong, and its number among all of a version's."""

    words: np.ndarray
    place: np.ndarray
    number: int


class Copies:
    """Copies pieces, and hashes where they were copied to. The caller's thread copies; the others hash what was copied, and
    copy when nothing waits for them. It hashes where more waits than is still in the cache, and where it has no others.
    numpy lets go of Python's lock meanwhile, and so does xxhash (4.1) above 64 KiB.

    `sums` [pieces] are uint64; `verify_s` is what the caller's thread spent on hashes, or waited for others to make.
    """

    def __init__(self, pieces: Sequence[PieceCopy], version: int, num_threads: int) -> None:
        self.sums, self.verify_s = np.zeros(len(pieces), dtype=np.uint64), 0.0
        self._pieces, self._version = pieces, version
        self._next = itertools.count()
        self._behind = [0] * num_threads  # behind which piece each thread is: all before the least are copied
        self._unhashed: deque[int] = deque()
        self._errors: list[BaseException] = []

    def run(self, copied: Callable[[int], None]) -> None:
        """`copied` is told now and then that so many pieces are, the first ones; it may raise. No thread is left behind."""
        others = [Thread(target=self._help, args=(thread,), daemon=True) for thread in range(1, len(self._behind))]
        try:
            for other in others:
                other.start()
            self._lead(copied, MOST_UNHASHED if others else 0)
        except BaseException:  # whatever the way out, threads are to stop; raised again
            self._unhashed.clear()  # only here: else what another one has just copied might go without its hash
            raise
        finally:
            self._next = itertools.count(len(self._pieces))  # there is nothing left to take
            begun = time.perf_counter()
            for other in others:
                if other.ident is not None:  # it was started
                    other.join()
            self.verify_s += time.perf_counter() - begun
        if self._errors:
            raise self._errors[0]

    def _lead(self, copied: Callable[[int], None], most: int) -> None:
        """What the caller's thread does: at most so many pieces wait for their hash when it copies the next one."""
        for number in itertools.count(1):
            if self._errors or not self._copy_next(0):
                break
            begun = time.perf_counter()
            while len(self._unhashed) > most and self._hash_next():
                pass
            self.verify_s += time.perf_counter() - begun
            if number % RELEASE_PIECES == 0 and not self._errors:
                copied(min(self._behind))
        begun = time.perf_counter()
        while self._hash_next():
            pass
        self.verify_s += time.perf_counter() - begun

    def _help(self, thread: int) -> None:
        try:
            while True:
                if self._hash_next():
                    # What it takes to copy lies behind all that the caller's thread has taken: it holds nobody up.
                    self._behind[thread] = max(self._behind[thread], self._behind[0])
                elif not self._copy_next(thread):
                    break
        except BaseException as error:  # raised by `run`, where somebody hears of it
            self._errors.append(error)
            self._next = itertools.count(len(self._pieces))  # the others end, too

    def _copy_next(self, thread: int) -> bool:
        """Whether there was a piece left."""
        number = next(self._next)
        if number >= len(self._pieces):
            self._behind[thread] = number
            return False
        piece = self._pieces[number]
        np.copyto(piece.place, piece.words)
        self._behind[thread] = number + 1
        self._unhashed.append(number)
        return True

    def _hash_next(self) -> bool:
        """Whether there was one that is copied and not hashed."""
        try:
            number = self._unhashed.popleft()
        except IndexError:  # another thread may have been faster
            return False
        piece = self._pieces[number]
        self.sums[number] = piece_checksum(hashed_parts(piece.place), self._version, piece.number)
        return True


def num_copy_threads(workers: int) -> int:
    """Of each of an engine's workers, who share the cores that this process may use, and stand still while they copy."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // workers))
