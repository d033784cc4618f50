"""`trace/rank-00000.jsonl` of each rank, and one file of all ranks for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megarl.telemetry.clock import WAIT, StepTimes
from megarl.telemetry.disk import LineFile, parse_lines, read_lines
from megarl.telemetry.engine_trace import FOLDER, SCALE, engine_events

BLOCK = 1 << 16  # bytes read at a time from the end of a file


class TraceWriter:
    """Appends a rank's steps to its own file, a line a step, flushed. Its first line says whose they are.

    A line has `step`, `start` (rank 0's clock, in seconds since 1970), `seconds`, `dropped` (events that were too many)
    and `events`: name, depth (0 for a phase), and start in the step and length, both in microseconds.
    """

    def __init__(self, run: Path, rank: int, host: str, offset_s: float) -> None:
        """`offset_s`: how far this rank's clock is ahead of rank 0's."""
        self._offset_s = offset_s
        self._whose = {"rank": rank, "host": host, "offset_s": offset_s}
        self._file = LineFile(run / FOLDER / f"rank-{rank:05d}.jsonl")
        self._write(self._whose)

    def write(self, step: int, times: StepTimes) -> None:
        """Append a step."""
        self._write({"step": step} | self._content(times))

    def write_part(self, part: str, times: StepTimes) -> None:
        """Append what is no step: how the rank started, or what it did behind the last step. It is told from a step by the
        file's first words, which it says again, so that it counts as a first line, too."""
        self._write(self._whose | {"part": part} | self._content(times))

    def _content(self, times: StepTimes) -> dict[str, Any]:
        events = [[name, depth, round(start * SCALE), round(lasted * SCALE)] for name, depth, start, lasted in times.events]
        begun = times.start - self._offset_s
        return {"start": begun, "seconds": times.seconds, "dropped": times.dropped, "events": events}

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.append(json.dumps(line))


def clock_offsets(readings: Sequence[Sequence[float]]) -> list[float]:
    """How far each rank's clock is ahead of rank 0's, in seconds, from what each read when it came out of the same few
    barriers: right but for the time in which ranks leave a barrier one after another."""
    return [median(own - first for own, first in zip(rank, readings[0], strict=True)) for rank in readings]


@dataclass(frozen=True)
class RankSteps:
    """Lines that a rank wrote (see TraceWriter), in order; a step that was repeated after a resume is there as it ran
    last."""

    rank: int
    host: str
    steps: list[dict[str, Any]]
    parts: list[dict[str, Any]]  # what is no step: each start, and what came behind the last step


def read_ranks(run: str | Path, last: int | None = None, most: int | None = None) -> tuple[list[RankSteps], int]:
    """What the first `most` ranks kept (None: all), of how many. With `last` only so many of the last steps are read,
    however long the files are. Empty where there is no trace."""
    found = []
    paths = sorted((Path(run) / FOLDER).glob("rank-*.jsonl"))
    for path in paths[:most]:
        steps: dict[int, dict[str, Any]] = {}
        parts: list[dict[str, Any]] = []
        whose: dict[str, Any] = {}
        for content in read_lines(path) if last is None else _ends(path, last):
            if "step" in content:
                steps = {step: known for step, known in steps.items() if step < content["step"]}
                steps[content["step"]] = content
            else:
                whose = content
            if "part" in content:
                parts.append(content)
        if whose:  # not killed before its first line
            chosen = list(steps.values())
            found.append(RankSteps(whose["rank"], whose["host"], chosen if last is None else chosen[-last:], parts))
    return found, len(paths)


def _ends(path: Path, last: int) -> list[dict[str, Any]]:
    """The first line of a file and at least its `last` ones, with some more before them, as a kill may have torn one; the
    first of those is cut anywhere, and no JSON then."""
    with path.open("rb") as file:
        first = file.readline()
        start = position = file.seek(0, os.SEEK_END)
        text = b""
        while position > len(first) and text.count(b"\n") < 2 * last + 2:
            position = max(len(first), start - max(BLOCK, 2 * (start - position)))
            file.seek(position)
            text = file.read(start - position)
    return parse_lines(first + text)


def merge(run: str | Path) -> dict[str, Any]:
    """All ranks' steps as one trace in Chrome's format: a process is a rank, a slice is a step, a phase or a span.

    Raises ValueError where there is no trace.
    """
    ranks, _ = read_ranks(run)
    events: list[dict[str, Any]] = []
    for one in ranks:
        events.append({"ph": "M", "name": "process_name", "pid": one.rank,
                       "args": {"name": f"rank {one.rank} on {one.host}"}})  # fmt: skip
        for step in [*one.parts, *one.steps]:
            events += _slices(one.rank, step)
    if not events:
        folder = Path(run) / FOLDER
        raise ValueError(f"{folder} has no rank-*.jsonl: the run was started with run.trace: none, or has made no step yet")
    return {"traceEvents": events + engine_events(Path(run)), "displayTimeUnit": "ms"}


def _slices(rank: int, step: dict[str, Any]) -> list[dict[str, Any]]:
    start = round(step["start"] * SCALE)
    name = step["part"] if "part" in step else f"step {step['step']}"
    whole = {"ph": "X", "pid": rank, "tid": 0, "cat": "part" if "part" in step else "step", "name": name, "ts": start,
             "dur": round(step["seconds"] * SCALE)}  # fmt: skip
    slices = [
        {"ph": "X", "pid": rank, "tid": 0, "cat": _kind(name, depth), "name": name, "ts": start + begun, "dur": lasted}
        for name, depth, begun, lasted in step["events"]
    ]
    return [whole, *slices]


def _kind(name: str, depth: int) -> str:
    return "wait" if name.startswith(WAIT) else "span" if depth else "phase"
