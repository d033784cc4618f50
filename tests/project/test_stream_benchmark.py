"""The benchmark of the stream, small: a stream hides what a synchronous run waits for, and missed targets are named."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.stream import BARRIER, STREAMED, Cell, Sizes, missed, run_cells
from tests.ranks import run_ranks

SIZES = Sizes(steps=3, slots=4, step_s=0.6, warmup=2, engines=2, groups=8, members=4)


def run_both() -> list[dict[str, Any]]:
    return run_cells([Cell("1:1 S=0", 0, 1.0), Cell("1:1 S=2", 2, 1.0)], SIZES)


@pytest.mark.nightly
def test_a_stream_is_nearer_to_the_bound_than_waiting_for_each_batch() -> None:
    [(waiting, stream)] = run_ranks(run_both, 1)
    assert min(waiting["seconds"]) > SIZES.step_s, "training alone takes as long"
    assert stream["of_bound"] < waiting["of_bound"]
    assert waiting["loop_share"] > 0 and stream["loop_share"] > 0


def test_missed_targets_are_named() -> None:
    row = {"max_staleness": 2, "of_bound": 1.0, "loop_share": 0.01}
    reached = [
        row | {"name": "1:1 S=0", "max_staleness": 0, "of_bound": 2.5, "step_s": 9.0},
        row | {"name": "1:1 S=2", "step_s": 4.0},
        row | {"name": "512 a second S=2", "of_bound": 1.2, "step_s": 1.2},
        row | {"name": BARRIER, "max_staleness": 0, "step_s": 6.0},
        row | {"name": STREAMED, "max_staleness": 0, "step_s": 5.0},
    ]
    assert missed(reached) == []
    slow = [reached[0], reached[1] | {"of_bound": 1.2, "step_s": 5.1}, reached[2] | {"loop_share": 0.06}]
    slow += [reached[3] | {"step_s": 5.5}, reached[4]]
    assert [text[0] for text in missed(slow)] == ["1", "3", "2", "4"]
