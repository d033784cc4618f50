"""`trace/engine-00000.jsonl` of each rollout engine, written by rank 0, and its requests in the merged trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any, Protocol

from megarl.telemetry.disk import LineFile, read_lines

FOLDER = "trace"
SCALE = 1_000_000  # the format's unit of time is the microsecond
# Engines are processes of the merged trace, behind any rank.
FIRST_PROCESS = 1_000_000
GENERATING = 0  # the lane that shows when an engine had requests at all


class Times(Protocol):
    """What an engine says of its requests; see `EngineReport`. Its times are of its own clock."""

    @property
    def engine(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def offset_s(self) -> float: ...
    @property
    def busy(self) -> Sequence[tuple[float, float]]: ...
    @property
    def requests(self) -> Sequence[tuple[str, int, float, float, float, float, int, int]]: ...


class EngineTraces:
    """Appends a line for each engine and step, flushed: `step`, `start` (rank 0's clock, in seconds since 1970), `busy` as
    pairs of start and length, and `requests`: name, sample, arrival, begin, first token and end, tokens, weight version. All
    times are in microseconds from `start`. A file's first line says whose it is."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._begun: set[int] = set()

    def write(self, step: int, start: float, engines: Sequence[Times]) -> None:
        """Append a step that began at `start`."""
        for one in engines:
            own = start + one.offset_s  # the engine's clock then
            requests = [
                [name, sample, *(round((moment - own) * SCALE) for moment in moments), tokens, version]
                for name, sample, *moments, tokens, version in one.requests
            ]
            busy = [[round((begun - own) * SCALE), round(lasted * SCALE)] for begun, lasted in one.busy]
            lines = [{"step": step, "start": start, "busy": busy, "requests": requests}]
            if one.engine not in self._begun:
                self._begun.add(one.engine)
                lines.insert(0, {"engine": one.engine, "host": one.host, "offset_s": one.offset_s})
            file = LineFile(self._folder / f"engine-{one.engine:05d}.jsonl")
            for line in lines:
                file.append(json.dumps(line))
            file.close()


def engine_events(run: Path) -> list[dict[str, Any]]:
    """Slices of all engines in Chrome's format: a process is an engine, a slice is a request, from when the scheduler took
    it up, in a lane that is free then; when it had requests at all is a lane of its own."""
    events: list[dict[str, Any]] = []
    for path in sorted((run / FOLDER).glob("engine-*.jsonl")):
        steps: dict[int, dict[str, Any]] = {}
        whose: dict[str, Any] = {}
        for line in read_lines(path):
            if "step" in line:  # one that is done again after a resume is there once
                steps = {step: known for step, known in steps.items() if step < line["step"]}
                steps[line["step"]] = line
            else:
                whose = line
        if whose:
            events += _engine(whose, list(steps.values()))
    return events


def _engine(whose: dict[str, Any], steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    process = FIRST_PROCESS + whose["engine"]
    name = f"rollout engine {whose['engine']} on {whose['host']}"
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}]
    lanes = 0
    for step in steps:
        start = round(step["start"] * SCALE)
        events += [
            _slice(process, GENERATING, "engine", "generating", start + begun, lasted) for begun, lasted in step["busy"]
        ]
        requests = [(*request[:2], *(start + at for at in request[2:6]), *request[6:]) for request in step["requests"]]
        chosen = in_lanes([(begun, ended) for _, _, _, begun, _, ended, _, _ in requests])
        lanes = max(lanes, *chosen, 0) if chosen else lanes
        for lane, (request, sample, arrived, begun, first, ended, tokens, version) in zip(chosen, requests, strict=True):
            said = {"request": request, "step": step["step"], "tokens": tokens, "version": version,
                    "queued_ms": (begun - arrived) / 1000}  # fmt: skip
            name = "greedy completion" if sample < 0 else f"sample {sample}"
            events.append(_slice(process, lane, "request", name, begun, ended - begun) | {"args": said})
            events.append(_slice(process, lane, "request", "first token", begun, first - begun))
    threads = ["generating", *(f"requests, lane {lane}" for lane in range(1, lanes + 1))]
    return events + [
        {"ph": "M", "name": "thread_name", "pid": process, "tid": lane, "args": {"name": name}}
        for lane, name in enumerate(threads)
    ]


def in_lanes(spans: Sequence[tuple[int, int]]) -> list[int]:
    """For spans of (start, end) the lane of each, from 1, so that none overlap and as few are used as can be."""
    lanes = [0] * len(spans)
    busy: list[tuple[int, int]] = []  # ends of what runs, and their lanes
    free: list[int] = []
    used = 0
    for number in sorted(range(len(spans)), key=lambda one: spans[one]):
        start, end = spans[number]
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        if not free:
            used += 1
            free.append(used)
            heapify(free)
        lanes[number] = heappop(free)
        heappush(busy, (end, lanes[number]))
    return lanes


def _slice(process: int, lane: int, kind: str, name: str, start: int, lasted: int) -> dict[str, Any]:
    return {"ph": "X", "pid": process, "tid": lane, "cat": kind, "name": name, "ts": start, "dur": max(lasted, 0)}
