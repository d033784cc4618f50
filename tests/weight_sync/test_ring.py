"""How a trainer rank waits for workers that read in place of its memory: it takes little of their time, and is there when
they are done. Clock and workers are simulated, the ring is real."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.weight_sync import ring as ring_module
from megarl.weight_sync import transport
from megarl.weight_sync.ring import SESSION_SHIFT, Ring, RingSender
from megarl.weight_sync.transport import EAGER_LOOKS, READ_LOOK_S, WATCH_S

pytestmark = pytest.mark.sync
SESSION = 3
# By engine and worker, the pieces that it has read after so many seconds.
Progress = Callable[[int, int, float], int]


@pytest.fixture(scope="module")
def rings() -> Iterator[list[Ring]]:
    """Of two workers, and two engines."""
    made = [Ring.create(f"look-{worker}", 1, 2, 4096) for worker in range(2)]
    yield made
    for one in made:
        one.close()


def wait(
    rings: Sequence[Ring],
    counts: Sequence[int],
    progress: Progress,
    gone: Sequence[int] = (),
    sizes: Sequence[int] | None = None,
) -> list[float]:
    """When a rank looked, in simulated seconds, after the first looks without a sleep: it ends with the last one."""
    now, looks = [0.0], list[float]()
    sender = RingSender(rings, [], 0, 1e9, None)
    sender.begin_for(SESSION, (0, 1))
    for worker, one in enumerate(rings):
        one.gone[:], one.read[:] = 0, (SESSION - 1) << SESSION_SHIFT | counts[worker] // 2  # an earlier sync's
    for engine in gone:
        sender.lose(engine)

    def sleep(seconds: float) -> None:
        now[0] += seconds
        for worker, one in enumerate(rings):
            for engine in range(2):
                if found := progress(engine, worker, now[0]):
                    one.read[engine] = SESSION << SESSION_SHIFT | min(found, counts[worker])
        looks.append(now[0])

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_module, "time", clock)
        patch.setattr(transport, "time", clock)
        before = [np.concatenate([[0], np.cumsum(sizes or [7] * (count + 5))]) for count in counts]
        sender.wait_copied(counts, before)
    return looks[EAGER_LOOKS - 1 :]


@settings(deadline=None, max_examples=60)
@given(st.floats(0.002, 20.0), st.integers(50, 5000))
def test_a_rank_that_waits_looks_seldom_and_ends_in_time(rings: list[Ring], needed_s: float, count: int) -> None:
    """Workers read evenly, the slowest one in `needed_s`; an engine that was given up reads nothing."""

    def progress(engine: int, worker: int, now: float) -> int:
        return 0 if engine == 1 else int(count * (1 + worker) * now / needed_s)

    looks = wait(rings, [count, count], progress, gone=[1])
    assert needed_s - 1e-9 <= looks[-1] <= needed_s + 2 * READ_LOOK_S + needed_s / count
    halvings = np.log2(max(needed_s, READ_LOOK_S) / READ_LOOK_S)
    assert len(looks) <= needed_s / WATCH_S + 3 * halvings + 2 * needed_s / count / READ_LOOK_S + 12


@pytest.mark.parametrize("jump", [0.0, 0.3, 0.9])
def test_after_a_worker_that_gets_faster_it_ends_in_time_too(rings: list[Ring], jump: float) -> None:
    """It has read a share when it reads all that is left at once, after 0.7 s."""

    def progress(engine: int, worker: int, now: float) -> int:
        return 1000 if now >= 0.7 else int(1000 * jump * now / 0.7)

    assert 0.7 <= wait(rings, [1000, 0], progress)[-1] <= 0.7 + WATCH_S


def test_where_nothing_was_read_yet_it_looks_as_if_all_could_be_there_at_once(rings: list[Ring]) -> None:
    looks = wait(rings, [10, 10], lambda engine, worker, now: 10 if now > 0.03 else 0)
    assert np.allclose(np.diff(looks), READ_LOOK_S) and 0.03 <= looks[-1] <= 0.03 + 2 * READ_LOOK_S


def test_it_looks_again_when_half_of_what_the_slowest_engine_has_left_should_be_read(rings: list[Ring]) -> None:
    """Engine 0 reads at half the rate of the other, and what an earlier sync left in the counters is none of it."""

    def progress(engine: int, worker: int, now: float) -> int:
        return int(1000 * (1 + engine) * now / 0.08)

    looks = wait(rings, [1000, 1000], progress)
    assert looks[0] == pytest.approx(READ_LOOK_S), "nothing was read before"
    for now, after in zip(looks[:-1], looks[1:], strict=True):
        assert after - now == pytest.approx(max((0.08 - now) / 2, READ_LOOK_S), rel=0.1)


def test_large_pieces_that_come_first_make_nobody_think_that_all_of_them_take_long(rings: list[Ring]) -> None:
    """An embedding has few pieces and half of the elements, which a worker reads evenly; those behind them are others'."""
    sizes = [900] * 10 + [100] * 90 + [1] * 50
    ends = np.cumsum(sizes[:100])
    looks = wait(rings, [100, 0], lambda engine, worker, now: int((ends <= ends[-1] * now / 0.09).sum()), sizes=sizes)
    assert 0.09 <= looks[-1] <= 0.09 + 2 * READ_LOOK_S and len(looks) < 20


def test_an_engine_may_read_on_while_a_rank_looks_how_far_it_is(rings: list[Ring], monkeypatch: pytest.MonkeyPatch) -> None:
    """All that this rank has, and some of what is others', between two looks at the same counter."""
    sender = RingSender(rings, [], 0, 1e9, None)
    sender.begin_for(SESSION, (0,))
    rings[0].read[0] = SESSION << SESSION_SHIFT | 5
    behind = sender._behind

    def read_on(worker: int, num_read: int) -> np.ndarray:
        found = behind(worker, num_read)
        rings[0].read[0] = SESSION << SESSION_SHIFT | 14
        return found

    rings[0].gone[:] = 0
    monkeypatch.setattr(sender, "_behind", read_on)
    assert sender._share_read(0, np.arange(11)) == 1.0
