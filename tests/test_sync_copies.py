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
    """Matrices of other numbers each, to every second column of their places."""
    words = [np.random.default_rng(number).integers(-9, 9, (number % 7 + 1, 50), dtype=np.int32) for number in range(count)]
    return [PieceCopy(one, np.zeros((len(one), 100), dtype=np.int32)[:, ::2]) for one in words]


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
    assert sorted(hashed) == list(range(len(made)))
    assert one.sums.tolist() == [piece_checksum(hashed_parts(piece.words), 7, n) for n, piece in enumerate(made)]
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
    right = np.array([piece_checksum(hashed_parts(piece.words), 7, n) for n, piece in enumerate(made)], dtype=np.uint64)
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
        Copies([PieceCopy(large, np.empty_like(large))] * 500, 7, num_threads).run(copied)
    assert 8 <= len(done) < 500


def test_what_another_thread_cannot_do_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(parts: Sequence[np.ndarray], version: int, number: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("no room for the copy of a piece")
        time.sleep(0.001)
        return 0

    monkeypatch.setattr(copies, "piece_checksum", fails)
    with pytest.raises(MemoryError, match="no room"):
        Copies(pieces(), 7, 2).run(lambda count: None)


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
