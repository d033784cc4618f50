"""Works of several threads: each work is done once, every piece is hashed at its place, and no thread is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from megarl.weight_sync import copies
from megarl.weight_sync.copies import Copies, num_copy_threads
from megarl.weight_sync.in_place import piece_checksum

pytestmark = pytest.mark.sync
NUM_PIECES = 100
PATIENT_S = 60.0


@dataclass
class Some:
    """A work of a few pieces that records its threads; it calls `at_begin` and `at_end` with them."""

    numbers: Sequence[int]
    pieces: Sequence[np.ndarray]
    at_begin: Callable[[int], None] = lambda thread: None
    at_end: Callable[[int], None] = lambda thread: None
    threads: list[int] = field(default_factory=list)
    words: list[np.ndarray] = field(default_factory=list)

    def places(self, thread: int) -> Sequence[np.ndarray]:
        self.threads.append(thread)
        self.at_begin(thread)
        # Every second column: a place is not contiguous.
        self.words = [np.zeros((len(self.pieces[number]), 18000), dtype=np.int32)[:, ::2] for number in self.numbers]
        return self.words

    def copied(self, thread: int) -> None:
        self.threads.append(thread)
        assert self.is_there()
        self.at_end(thread)

    def is_there(self) -> bool:
        pairs = zip(self.words, self.numbers, strict=True)
        return all(np.array_equal(place, self.pieces[number]) for place, number in pairs)


def pieces_and_works(count: int = NUM_PIECES, size: int = 3) -> tuple[list[np.ndarray], list[Some]]:
    """Different matrices, most of them so large that numpy and xxhash release the GIL, in works of `size` pieces."""
    draws = (np.random.default_rng(number) for number in range(count))
    pieces = [draw.integers(-9, 9, (number % 7 + 1, 9000), dtype=np.int32) for number, draw in enumerate(draws)]
    return pieces, [Some(range(first, min(first + size, count)), pieces) for first in range(0, count, size)]


def sums(pieces: Sequence[np.ndarray]) -> list[int]:
    return [piece_checksum(words, 7, number) for number, words in enumerate(pieces)]


def ignored(count: int) -> None:
    """Nobody waits for it."""


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_every_work_is_done_once_and_all_its_pieces_are_hashed(num_threads: int) -> None:
    (pieces, works), counts = pieces_and_works(), list[int]()
    run = Copies(pieces, works, 7, num_threads)

    def copied(count: int) -> None:
        counts.append(count)
        assert all(work.is_there() for work in works if work.numbers[-1] < count)

    run.run(copied)
    assert all(work.is_there() for work in works) and run.left == []
    assert all(len(work.threads) == 2 and len(set(work.threads)) == 1 for work in works)
    assert run.sums.tolist() == sums(pieces)
    assert counts == sorted(counts) and (num_threads > 1 or counts == [8 * n for n in range(1, 13)])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_copy_that_went_wrong_has_another_hash(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash is of the place: it also shows memory that changed during the copy."""
    pieces, works = pieces_and_works()

    def wrong(place: np.ndarray, words: np.ndarray) -> None:
        place[:] = words
        if words is pieces[70]:
            place[-1, -1] ^= 1

    works[70 // 3].is_there = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(copies.np, "copyto", wrong)
    run = Copies(pieces, works, 7, num_threads)
    run.run(ignored)
    assert np.flatnonzero(run.sums != np.array(sums(pieces), dtype=np.uint64)).tolist() == [70]


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_a_worker_that_was_given_up_copies_no_further(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (pieces, works), copied_pieces, copy = pieces_and_works(2000), list[int](), np.copyto

    def counted(place: np.ndarray, words: np.ndarray) -> None:
        copied_pieces.append(1)
        copy(place, words)

    def copied(count: int) -> None:
        raise TimeoutError("given up")

    monkeypatch.setattr(copies.np, "copyto", counted)
    with pytest.raises(TimeoutError, match="given up"):
        Copies(pieces, works, 7, num_threads).run(copied)
    assert 8 <= len(copied_pieces) < len(pieces)


@pytest.mark.parametrize("step", ["at_begin", "at_end"])
def test_a_failure_of_another_thread_is_raised_and_ends_all_threads(step: str) -> None:
    pieces, works = pieces_and_works()
    run = Copies(pieces, works, 7, 2)

    def fail(thread: int) -> None:
        if thread:
            raise MemoryError("no room for a module")
        end = time.monotonic() + PATIENT_S
        while not run._stopped and time.monotonic() < end:
            time.sleep(0.001)

    for work in works:
        setattr(work, step, fail)
    with pytest.raises(MemoryError, match="no room"):
        run.run(ignored)
    assert sum(bool(work.threads) for work in works) <= 2


@pytest.mark.parametrize(("before", "num_threads", "shared"), [(1, 2, 1), (3, 4, 1), (7, 4, 2), (4, 1, 4)])
def test_threads_share_the_openmp_threads_and_give_them_back(before: int, num_threads: int, shared: int) -> None:
    """Also in vLLM's worker, which replaces `torch.set_num_threads`."""
    (pieces, works), seen, initial = pieces_and_works(num_threads, 1), dict[int, int](), torch.get_num_threads()
    barrier = threading.Barrier(num_threads)

    def look(thread: int) -> None:
        barrier.wait(PATIENT_S)
        seen[thread] = torch.get_num_threads()

    for work in works:
        work.at_begin = look
    torch.set_num_threads(before)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "set_num_threads", ignored)
            Copies(pieces, works, 7, num_threads).run(ignored)
            assert seen == dict.fromkeys(range(num_threads), shared)
            assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(initial)


def test_workers_share_the_cores_of_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, workers, threads in ((1, 1, 1), (2, 1, 2), (2, 2, 1), (8, 1, 4), (8, 4, 2), (2, 4, 1)):
        monkeypatch.setattr(copies.os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        assert num_copy_threads(workers) == threads
