"""Copying with several threads: every piece once, hashed where it went, and no thread left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from megarl.sync import copies
from megarl.sync.copies import Copies, PieceCopy, num_copy_threads
from megarl.sync.in_place import hashed_parts, piece_checksum

pytestmark = pytest.mark.sync


def pieces(count: int = 100) -> list[PieceCopy]:
    """Matrices of other numbers each, to every second column of their places; most of them so large that numpy and xxhash
    let go of Python's lock: then threads do work beside each other."""
    draws = (np.random.default_rng(number) for number in range(count))
    words = [draw.integers(-9, 9, (number % 7 + 1, 9000), dtype=np.int32) for number, draw in enumerate(draws)]
    places = (np.zeros((len(one), 18000), dtype=np.int32)[:, ::2] for one in words)
    return [PieceCopy(one, place, 3 * number) for number, (one, place) in enumerate(zip(words, places, strict=True))]


def is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> object:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_every_piece_is_copied_and_hashed_once(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(parts: Sequence[np.ndarray], version: int, number: int) -> int:
        hashed.append(number)
        return piece_checksum(parts, version, number)

    monkeypatch.setattr(copies, "piece_checksum", counted)
    made, counts = pieces(), list[int]()
    one = Copies(made, 7, num_threads)

    def copied(count: int) -> None:
        counts.append(count)
        assert all(np.array_equal(piece.place, piece.words) for piece in made[:count])

    one.run(copied)
    assert all(np.array_equal(piece.place, piece.words) for piece in made)
    assert sorted(hashed) == [piece.number for piece in made]
    assert one.sums.tolist() == [piece_checksum(hashed_parts(piece.words), 7, piece.number) for piece in made]
    assert counts == sorted(counts) and (num_threads > 1 or counts == [8 * n for n in range(1, 13)])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_arrives_otherwise_than_it_was_has_another_hash(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is hashed where it was copied to: a copy that went wrong is seen, and one of memory that changed meanwhile."""
    made = pieces()

    def wrong(place: np.ndarray, words: np.ndarray) -> None:
        place[:] = words
        if words is made[70].words:
            place[-1, -1] ^= 1

    monkeypatch.setattr(copies.np, "copyto", wrong)
    one = Copies(made, 7, num_threads)
    one.run(lambda count: None)
    right = np.array([piece_checksum(hashed_parts(piece.words), 7, piece.number) for piece in made], dtype=np.uint64)
    assert np.flatnonzero(one.sums != right).tolist() == [70]


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_one_that_was_given_up_copies_no_further(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    large, done, copy = np.zeros(1 << 19, dtype=np.int32), list[int](), np.copyto  # large: no thread takes them all at once

    def counted(place: np.ndarray, words: np.ndarray) -> None:
        done.append(1)
        copy(place, words)

    def copied(count: int) -> None:
        raise TimeoutError("given up")

    monkeypatch.setattr(copies.np, "copyto", counted)
    with pytest.raises(TimeoutError, match="given up"):
        Copies([PieceCopy(large, np.empty_like(large), 0)] * 500, 7, num_threads).run(copied)
    assert 8 <= len(done) < 500


def test_what_another_thread_cannot_do_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(parts: Sequence[np.ndarray], version: int, number: int) -> int:
        if not is_main():
            raise MemoryError("no room for the copy of a piece")
        time.sleep(0.001)
        return 0

    monkeypatch.setattr(copies, "piece_checksum", fails)
    with pytest.raises(MemoryError, match="no room"):
        Copies(pieces(), 7, 2).run(lambda count: None)


def test_what_is_copied_last_is_hashed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread that copied it, where the caller's has found nothing more to hash just before."""
    taken, waits, copy, hash_next = threading.Event(), threading.Event(), np.copyto, Copies._hash_next

    def slow(place: np.ndarray, words: np.ndarray) -> None:
        if is_main():
            assert taken.wait(60)
        else:
            taken.set()
            time.sleep(0.1)  # the caller's thread looks for more meanwhile
        copy(place, words)

    def hash_late(self: Copies) -> bool:
        if is_main():
            return hash_next(self) or not waits.wait(60)
        if self._unhashed:
            waits.set()
            time.sleep(0.1)  # the caller's thread goes on meanwhile
        return hash_next(self)

    monkeypatch.setattr(copies.np, "copyto", slow)
    monkeypatch.setattr(Copies, "_hash_next", hash_late)
    made = pieces(2)
    one = Copies(made, 7, 2)
    one.run(lambda count: None)
    assert one.sums.tolist() == [piece_checksum(hashed_parts(piece.words), 7, piece.number) for piece in made]


def test_a_thread_that_does_nothing_but_hash_holds_no_rank_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was copied is said to be, though that thread has copied nothing of it."""
    made, counts = pieces(200), list[int]()

    def slow(parts: Sequence[np.ndarray], version: int, number: int) -> int:
        time.sleep(0.0005 if is_main() else 0.001)
        return 0

    monkeypatch.setattr(copies, "piece_checksum", slow)
    Copies(made, 7, 2).run(counts.append)
    assert counts == sorted(counts) and counts[-1] > len(made) / 2


def test_where_no_thread_can_be_started_none_goes_on_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []

    class Limited(threading.Thread):
        def start(self) -> None:
            if started:
                raise RuntimeError("can't start new thread")
            started.append(self)
            super().start()

    monkeypatch.setattr(copies, "Thread", Limited)
    with pytest.raises(RuntimeError, match="can't start"):
        Copies(pieces(), 7, 4).run(lambda count: None)
    assert not started[0].is_alive()


def test_nothing_to_copy_is_no_failure() -> None:
    one = Copies([], 7, 2)
    one.run(lambda count: None)
    assert len(one.sums) == 0


def test_workers_share_the_cores_of_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for cores, workers in ((1, 1), (2, 1), (2, 2), (8, 1), (8, 4), (2, 4)):
        monkeypatch.setattr(copies.os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        found.append(num_copy_threads(workers))
    assert found == [1, 2, 1, 4, 2, 1]
