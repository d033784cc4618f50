"""Whether a run's trace accounts for every second of every rank, against the ranks' own wall clocks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from megarl.telemetry.trace import FOLDER, SCALE

MOST_SHARE = 0.01
READING_S = 2e-3  # two clocks are read one after the other, and events are rounded to microseconds


def check_spans(run: Path, ranks: int) -> None:
    """Check each rank's steps except the last, whose length no other clock measures. They sum to the rank's wall time within
    one part in a hundred, and all but as little of that time is in phases."""
    files = sorted((run / FOLDER).glob("rank-*.jsonl"))
    assert len(files) == ranks
    for file in files:
        *lines, last = [line for line in map(json.loads, file.read_text().splitlines()) if "step" in line]
        assert lines, f"{file} has one step"
        wall_s = last["start"] - lines[0]["start"]  # by time.time
        total_s = sum(line["seconds"] for line in lines)
        assert abs(total_s - wall_s) <= MOST_SHARE * wall_s + READING_S, f"{file}: {total_s} s of {wall_s} s"
        outside_s = total_s - sum(_phase_seconds(line["events"]) for line in lines)
        assert -READING_S <= outside_s <= MOST_SHARE * wall_s, f"{file}: {outside_s} s are in no phase"


def _phase_seconds(events: list[Any]) -> float:
    """Return the seconds of a step in phases, and check that each phase and span is as long as the spans inside it, which
    have ended before it."""
    inside = Counter[int]()  # by depth: length of the events whose parent is still open
    for name, depth, _, length in events:
        assert inside[depth + 1] <= length + SCALE * READING_S, f"{name}: its spans are longer than it is"
        inside[depth + 1] = 0
        inside[depth] += length
    assert not any(inside[depth] for depth in inside if depth), "a span is in no phase"
    return inside[0] / SCALE
