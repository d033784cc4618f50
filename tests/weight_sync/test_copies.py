"""Works of several threads: each once, every piece hashed where it went, and no thread left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
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


def nothing(thread: int) -> None:
    """Needs no time."""


@dataclass
class Some:
    """Works of a few pieces; which threads found places and were done, in the order of what they did."""

    numbers: Sequence[int]
    made: Sequence[np.ndarray]
    at_begin: Callable[[int], None] = nothing
    at_end: Callable[[int], None] = nothing
    threads: list[int] = field(default_factory=list)
    words: list[np.ndarray] = field(default_factory=list)

    def places(self, thread: int) -> Sequence[np.ndarray]:
        self.threads.append(thread)
        self.at_begin(thread)
        self.words = [np.zeros((len(self.made[one]), 18000), dtype=np.int32)[:, ::2] for one in self.numbers]
        return self.words

    def copied(self, thread: int) -> None:
        self.threads.append(thread)
        assert self.is_there()
        self.at_end(thread)

    def is_there(self) -> bool:
        pairs = zip(self.words, self.numbers, strict=True)
        return all(np.array_equal(place, self.made[number]) for place, number in pairs)


def pieces(count: int = NUM_PIECES) -> list[np.ndarray]:
    """Matrices of other numbers each, which go to every second column of their places; most of them so large that numpy and
    xxhash let go of Python's lock: then threads do work beside each other."""
    draws = (np.random.default_rng(number) for number in range(count))
    return [draw.integers(-9, 9, (number % 7 + 1, 9000), dtype=np.int32) for number, draw in enumerate(draws)]


def works(made: Sequence[np.ndarray], size: int = 3) -> list[Some]:
    return [Some(range(first, min(first + size, len(made))), made) for first in range(0, len(made), size)]


def sums(made: Sequence[np.ndarray]) -> list[int]:
    return [piece_checksum(words, 7, number) for number, words in enumerate(made)]


def ignored(count: int) -> None:
    """Nobody waits for it."""


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> object:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_every_work_is_done_once_and_all_its_pieces_are_hashed(num_threads: int) -> None:
    made, counts = pieces(), list[int]()
    chosen = works(made)
    one = Copies(made, chosen, 7, num_threads)

    def copied(count: int) -> None:
        counts.append(count)
        assert all(work.is_there() for work in chosen if work.numbers[-1] < count)

    one.run(copied)
    assert all(work.is_there() for work in chosen) and one.left == []
    assert all(len(work.threads) == 2 and len(set(work.threads)) == 1 for work in chosen)
    assert one.sums.tolist() == sums(made)
    assert counts == sorted(counts) and (num_threads > 1 or counts == [8 * n for n in range(1, 13)])
    assert one.verify_s > 0.0


@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_arrives_otherwise_than_it_was_has_another_hash(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is hashed where it was copied to: a copy that went wrong is seen, and one of memory that changed meanwhile."""
    made = pieces()

    def wrong(place: np.ndarray, words: np.ndarray) -> None:
        place[:] = words
        if words is made[70]:
            place[-1, -1] ^= 1

    chosen = works(made)
    chosen[70 // 3].is_there = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(copies.np, "copyto", wrong)
    one = Copies(made, chosen, 7, num_threads)
    one.run(ignored)
    assert np.flatnonzero(one.sums != np.array(sums(made), dtype=np.uint64)).tolist() == [70]


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_one_that_was_given_up_copies_no_further(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    done, copy, made = list[int](), np.copyto, pieces(2000)

    def counted(place: np.ndarray, words: np.ndarray) -> None:
        done.append(1)
        copy(place, words)

    def copied(count: int) -> None:
        raise TimeoutError("given up")

    monkeypatch.setattr(copies.np, "copyto", counted)
    with pytest.raises(TimeoutError, match="given up"):
        Copies(made, works(made), 7, num_threads).run(copied)
    assert 8 <= len(done) < len(made)


@pytest.mark.parametrize("step", ["at_begin", "at_end"])
def test_what_another_thread_cannot_do_is_raised_and_ends_them_all(step: str) -> None:
    made = pieces()
    chosen = works(made)
    one = Copies(made, chosen, 7, 2)

    def fail(thread: int) -> None:
        if thread:
            raise MemoryError("no room for a module")
        end = time.monotonic() + PATIENT_S
        while not one._stopped and time.monotonic() < end:
            time.sleep(0.001)

    for work in chosen:
        setattr(work, step, fail)
    with pytest.raises(MemoryError, match="no room"):
        one.run(ignored)
    assert sum(bool(work.threads) for work in chosen) <= 2


@pytest.mark.parametrize(
    ("own", "num_threads", "shared"), [(1, 2, 1), (2, 2, 1), (3, 4, 1), (7, 4, 2), (16, 4, 4), (4, 1, 4)]
)
def test_threads_share_the_openmp_threads_and_give_them_back(own: int, num_threads: int, shared: int) -> None:
    """Also in vLLM's worker, which keeps everybody from choosing them in torch's way."""
    found, before = dict[int, int](), torch.get_num_threads()
    barrier = threading.Barrier(num_threads)

    def look(thread: int) -> None:
        barrier.wait(PATIENT_S)
        found[thread] = torch.get_num_threads()

    made = pieces(num_threads)
    chosen = works(made, 1)
    for work in chosen:
        work.at_begin = look
    torch.set_num_threads(own)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "set_num_threads", ignored)
            Copies(made, chosen, 7, num_threads).run(ignored)
            assert found == dict.fromkeys(range(num_threads), shared)
            assert torch.get_num_threads() == own
    finally:
        torch.set_num_threads(before)


def test_workers_share_the_cores_of_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for cores, workers in ((1, 1), (2, 1), (2, 2), (8, 1), (8, 4), (2, 4)):
        monkeypatch.setattr(copies.os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        found.append(num_copy_threads(workers))
    assert found == [1, 2, 1, 4, 2, 1]
