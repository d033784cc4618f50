"""Whether a run's trace accounts for every second of every rank, against the ranks' own wall clocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from megarl.telemetry.clock import UNACCOUNTED
from megarl.telemetry.trace import FOLDER, SCALE

MOST_SHARE = 0.01
READING_S = 2e-3  # two clocks are read one after the other, and events are rounded to microseconds


class Sums(NamedTuple):
    """Of one rank, over all its steps but the last; in seconds."""

    wall: float  # by time.time: from the start of the first of them to the start of the last one
    spans: dict[str, float]  # by name, what no span inside has; what is left of a phase is `unaccounted` there
    outside: float  # in no phase


def sums_of(run: Path) -> list[Sums]:
    """The ranks' sums from their files alone."""
    sums = []
    for path in sorted((run / FOLDER).glob("rank-*.jsonl")):
        lines = [line for line in map(json.loads, path.read_text().splitlines()) if "step" in line]
        assert len(lines) > 1, f"{path}: of the last step no other clock says how long it was"
        spans: dict[str, float] = {}
        outside = 0.0
        for line in lines[:-1]:
            outside += _add(line, spans)
        sums.append(Sums(lines[-1]["start"] - lines[0]["start"], spans, outside))
    return sums


def _add(line: dict, spans: dict[str, float]) -> float:
    """Add a step's spans to the sums; its seconds in no phase. An event lies in the next one that is one level less deep."""
    inside: list[float] = []  # by depth: seconds of closed events whose parent is still open
    outside = line["seconds"]
    for name, depth, _, lasted in line["events"]:  # in the order of their ends
        inside += [0.0] * (depth + 2 - len(inside))
        self_time = lasted - inside[depth + 1]
        assert self_time >= -SCALE * READING_S, f"{name}: its spans are longer than it is"
        inside[depth + 1] = 0.0
        inside[depth] += lasted
        key = name if depth else UNACCOUNTED
        spans[key] = spans.get(key, 0.0) + self_time / SCALE
        if depth == 0:
            outside -= lasted / SCALE
    return outside


def check_spans(run: Path, ranks: int) -> None:
    """The spans of each rank sum to its wall time within one part in a hundred, with what lies outside of phases, and that
    alone is no more than as much."""
    by_rank = sums_of(run)
    assert len(by_rank) == ranks
    for rank, sums in enumerate(by_rank):
        total = sum(sums.spans.values()) + sums.outside
        assert abs(total - sums.wall) <= MOST_SHARE * sums.wall + READING_S, f"rank {rank}: {total} s of {sums.wall} s"
        assert -READING_S <= sums.outside <= MOST_SHARE * sums.wall, f"rank {rank}: {sums.outside} s are in no phase"
