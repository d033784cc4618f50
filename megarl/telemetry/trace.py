"""`trace/` of a run directory: the timeline of each rank and rollout engine, and all timelines in one file for Perfetto.

`rank-00000.jsonl` has a line for each step, and for the time before the first step and after the last one: `rank`, `host`,
`step` or `part`, `start` (rank 0's clock, seconds since 1970), `seconds` and `events`: name, depth (0 for a phase), start in
the step and length. `engine-00000.jsonl`, written by rank 0, has `engine`, `host`, `step`, `start`, `busy` (pairs of start
and length) and `requests`: name, group, arrival, begin, first token, end, number of tokens, weight version. Times are in
microseconds from `start`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megarl.telemetry.clock import WAIT, StepTimes
from megarl.telemetry.disk import LineFile, read_lines

FOLDER = "trace"
SCALE = 1_000_000  # Chrome's format counts microseconds
FIRST_PROCESS = 1_000_000  # process number of engine 0 in the merged trace, above any rank


class TraceWriter:
    """Appends the steps of one rank to its file, flushed."""

    def __init__(self, run: Path, rank: int, host: str, offset_s: float) -> None:
        """`offset_s`: how far this rank's clock is ahead of rank 0's."""
        self._owner, self._offset_s = {"rank": rank, "host": host}, offset_s
        self._file = LineFile(run / FOLDER / f"rank-{rank:05d}.jsonl")

    def write(self, step: int | str, times: StepTimes) -> None:
        """Append a step, or a part of the run with a name: before the first step or after the last one."""
        line = self._owner | {"part" if isinstance(step, str) else "step": step, "start": times.start - self._offset_s}
        events = [[name, depth, round(start * SCALE), round(spent * SCALE)] for name, depth, start, spent in times.events]
        self._file.append(json.dumps(line | {"seconds": times.seconds, "events": events}))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def clock_offsets(readings: Sequence[Sequence[float]]) -> list[float]:
    """Return how many seconds each rank's clock is ahead of rank 0's clock, from readings after common barriers. The error
    is the time between two ranks leaving a barrier."""
    return [median(here - first for here, first in zip(rank, readings[0], strict=True)) for rank in readings]


class RequestTimes(NamedTuple):
    """The times of one completion, in seconds since 1970 of the engine's clock. `group` is that of the prompt, -1 for a
    greedy completion. `begun` is when the scheduler admitted it; `version` is the weight version that sampled its last
    token. A time that vLLM did not record is 0."""

    name: str
    group: int
    arrived: float
    begun: float
    first_token: float
    ended: float
    tokens: int
    version: int


@dataclass(frozen=True)
class EngineReport:
    """What an engine did since its last report. `now` is its clock at the answer, in seconds since 1970; `busy` holds
    (start, seconds) of each time with requests in flight. `num_preempted` counts how often vLLM took a request's cache away;
    it is 0 if the engine records no times. Rank 0 fills in `engine`, `host` and `offset_s`, by which the engine's clock is
    ahead of rank 0's."""

    now: float
    busy: tuple[tuple[float, float], ...] = ()
    requests: tuple[RequestTimes, ...] = ()
    num_preempted: int = 0
    engine: int = 0
    host: str = ""
    offset_s: float = 0.0

    @property
    def busy_s(self) -> float:
        return sum(seconds for _, seconds in self.busy)


def write_engines(run: Path, step: int, start: float, engines: Sequence[EngineReport]) -> None:
    """Append a line for each engine: a step that began at `start` on rank 0's clock."""
    for report in engines:
        engine_start = start + report.offset_s
        requests = [
            [name, group, *(round((moment - engine_start) * SCALE) for moment in moments), tokens, version]
            for name, group, *moments, tokens, version in report.requests
        ]
        busy = [[round((begun - engine_start) * SCALE), round(spent * SCALE)] for begun, spent in report.busy]
        line = {"engine": report.engine, "host": report.host, "step": step, "start": start}
        file = LineFile(run / FOLDER / f"engine-{report.engine:05d}.jsonl")
        file.append(json.dumps(line | {"busy": busy, "requests": requests}))
        file.close()


def read_traces(run: str | Path, owner: str) -> list[list[dict[str, Any]]]:
    """Return the lines of each "rank" or "engine" that has written any, the steps last. A repeated step appears as it ran
    last."""
    traces = []
    for path in sorted((Path(run) / FOLDER).glob(f"{owner}-*.jsonl")):
        parts, steps = [], dict[int, dict[str, Any]]()
        for line in read_lines(path):
            if "part" in line:
                parts.append(line)
            else:
                steps = {step: earlier for step, earlier in steps.items() if step < line["step"]}
                steps[line["step"]] = line
        if parts or steps:
            traces.append([*parts, *steps.values()])
    return traces


def merge(run: str | Path) -> dict[str, Any]:
    """Return all traces in Chrome's format: a process is a rank or an engine; a slice is a step, phase, span or request.
    Raises ValueError without a trace."""
    ranks = read_traces(run, "rank")
    if not ranks:
        folder = Path(run) / FOLDER
        raise ValueError(f"{folder} has no rank-*.jsonl: the run was started with run.trace: none, or has made no step yet")
    events: list[dict[str, Any]] = []
    for lines in ranks:
        rank = lines[-1]["rank"]
        events.append(_name("process_name", rank, f"rank {rank} on {lines[-1]['host']}"))
        for line in lines:
            start, kind = round(line["start"] * SCALE), "part" if "part" in line else "step"
            name = line["part"] if kind == "part" else f"step {line['step']}"
            events.append(_slice(rank, 0, kind, name, start, round(line["seconds"] * SCALE)))
            for name, depth, begun, spent in line["events"]:
                kind = "wait" if name.startswith(WAIT) else "span" if depth else "phase"
                events.append(_slice(rank, 0, kind, name, start + begun, spent))
    for lines in read_traces(run, "engine"):
        events += _engine_events(lines)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _engine_events(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of an engine: lane 0 shows when the engine had requests; each request has a lane that is free."""
    engine = steps[-1]["engine"]
    process, num_lanes = FIRST_PROCESS + engine, 0
    events = [_name("process_name", process, f"rollout engine {engine} on {steps[-1]['host']}")]
    for step in steps:
        start = round(step["start"] * SCALE)
        events += [_slice(process, 0, "engine", "generating", start + begun, spent) for begun, spent in step["busy"]]
        lanes = in_lanes([(begun, ended) for _, _, _, begun, _, ended, _, _ in step["requests"]])
        num_lanes = max([num_lanes, *lanes])
        for lane, request in zip(lanes, step["requests"], strict=True):
            request_name, group, arrived, begun, first, ended, tokens, version = request
            details = {"request": request_name, "step": step["step"], "tokens": tokens, "version": version,
                       "queued_ms": (begun - arrived) / 1000}  # fmt: skip
            name = "greedy completion" if group < 0 else f"group {group}"
            events.append(_slice(process, lane, "request", name, start + begun, ended - begun) | {"args": details})
            events.append(_slice(process, lane, "request", "first token", start + begun, first - begun))
    names = ["generating", *(f"requests, lane {lane}" for lane in range(1, num_lanes + 1))]
    return events + [_name("thread_name", process, name) | {"tid": lane} for lane, name in enumerate(names)]


def in_lanes(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return a lane, from 1, for each span of (start, end), with no overlap in a lane and as few lanes as possible."""
    lanes = [0] * len(spans)
    ends: list[tuple[int, int]] = []  # of the last span of each lane, with the lane
    for number in sorted(range(len(spans)), key=spans.__getitem__):
        start, end = spans[number]
        lanes[number] = heappop(ends)[1] if ends and ends[0][0] <= start else len(ends) + 1
        heappush(ends, (end, lanes[number]))
    return lanes


def _slice(process: int, lane: int, kind: str, name: str, start: int, spent: int) -> dict[str, Any]:
    return {"ph": "X", "pid": process, "tid": lane, "cat": kind, "name": name, "ts": start, "dur": max(spent, 0)}


def _name(kind: str, process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "args": {"name": name}}
