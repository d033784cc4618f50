"""`trace/rank-00000.jsonl` of each rank, and one file of all ranks for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megarl.telemetry.clock import WAIT, StepTimes

FOLDER = "trace"
SCALE = 1_000_000  # the format's unit of time is the microsecond


class TraceWriter:
    """Appends a rank's steps to its own file, a line a step, flushed. Its first line says whose they are.

    A line has `step`, `start` (rank 0's clock, in seconds since 1970), `seconds`, `dropped` (events that were too many)
    and `events`: name, depth (0 for a phase), and start in the step and length, both in microseconds.
    """

    def __init__(self, run: Path, rank: int, host: str, offset_s: float) -> None:
        """`offset_s`: how far this rank's clock is ahead of rank 0's."""
        path = run / FOLDER / f"rank-{rank:05d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._offset_s = offset_s
        is_torn = _is_torn(path)
        self._file = path.open("a", encoding="utf-8")
        if is_torn:
            self._file.write("\n")
        self._write({"rank": rank, "host": host, "offset_s": offset_s})

    def write(self, step: int, times: StepTimes) -> None:
        """Append a step."""
        events = [[name, depth, round(start * SCALE), round(lasted * SCALE)] for name, depth, start, lasted in times.events]
        begun = times.start - self._offset_s
        self._write({"step": step, "start": begun, "seconds": times.seconds, "dropped": times.dropped, "events": events})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _is_torn(path: Path) -> bool:
    """Whether a kill cut the last line short."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def clock_offsets(readings: Sequence[Sequence[float]]) -> list[float]:
    """How far each rank's clock is ahead of rank 0's, in seconds, from what each read when it came out of the same few
    barriers: right but for the time in which ranks leave a barrier one after another."""
    return [median(own - first for own, first in zip(rank, readings[0], strict=True)) for rank in readings]


def merge(run: str | Path) -> dict[str, Any]:
    """All ranks' steps as one trace in Chrome's format: a process is a rank, a slice is a step, a phase or a span.

    A step that was repeated after a resume is there once, as it ran last. Raises ValueError where there is no trace.
    """
    folder = Path(run) / FOLDER
    events: list[dict[str, Any]] = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        steps: dict[int, dict[str, Any]] = {}
        whose: dict[str, Any] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                content = json.loads(line)
            except ValueError:  # cut short by a kill
                continue
            if "step" in content:
                steps = {step: known for step, known in steps.items() if step < content["step"]}
                steps[content["step"]] = content
            else:
                whose = content
        if not whose:  # killed before its first line
            continue
        events.append({"ph": "M", "name": "process_name", "pid": whose["rank"],
                       "args": {"name": f"rank {whose['rank']} on {whose['host']}"}})  # fmt: skip
        for step in steps.values():
            events += _slices(whose["rank"], step)
    if not events:
        raise ValueError(f"{folder} has no rank-*.jsonl: the run was started with run.trace: none, or has made no step yet")
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slices(rank: int, step: dict[str, Any]) -> list[dict[str, Any]]:
    start = round(step["start"] * SCALE)
    whole = {"ph": "X", "pid": rank, "tid": 0, "cat": "step", "name": f"step {step['step']}", "ts": start,
             "dur": round(step["seconds"] * SCALE)}  # fmt: skip
    slices = [
        {"ph": "X", "pid": rank, "tid": 0, "cat": _kind(name, depth), "name": name, "ts": start + begun, "dur": lasted}
        for name, depth, begun, lasted in step["events"]
    ]
    return [whole, *slices]


def _kind(name: str, depth: int) -> str:
    return "wait" if name.startswith(WAIT) else "span" if depth else "phase"
