"""What `benchmarks/sft.py` makes of its runs, and the rows that both sides read."""

from typing import Any

import pytest

from benchmarks.sft import HELD_OUT, LONGEST, compare, measured, rows_of


def runs(**tokens: int) -> list[dict[str, Any]]:
    """Two seeds of each side; megarl takes half of TRL's seconds."""
    losses = {1: {0: 5.0, 6: 2.0}, 2: {0: 5.2, 6: 2.4}}
    return [
        measured(side, seed, losses[seed], [99, tokens.get(side, 40), 60], [9.0, pace, 1.5 * pace])
        for seed in losses
        for side, pace in (("megarl", 1.0), ("trl", 2.0))
    ]


def test_sides_are_compared_seed_by_seed_by_their_median_step_after_the_first() -> None:
    found = compare(runs())
    assert found["tokens_per_s"] == {"megarl": 40.0, "trl": 20.0} and found["ratios"] == [2.0, 2.0]
    assert [one["step"] for one in found["curve"]] == [0, 6]
    last = found["curve"][-1]
    assert last["megarl"] == last["trl"] == pytest.approx(2.2)
    assert last["error"] == pytest.approx(0.2) and last["furthest"] == 0.0
    with pytest.raises(SystemExit, match="different tokens"):
        compare(runs(trl=41))


def test_no_question_is_drawn_twice() -> None:
    rows = rows_of(1, 10 * HELD_OUT)
    assert len({row["question"] for row in rows}) == 10 * HELD_OUT  # else megarl would leave held-out rows out
    assert max(len(row["question"] + row["answer"]) for row in rows) < LONGEST
