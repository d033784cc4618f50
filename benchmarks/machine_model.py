"""A model of the time that a weight sync takes between processes of one machine, step by step, from the real plan;
`weight_sync_scale.py --machine` prints it.

What it assumes:

- Threads share the machine's cores, and the memory has room for all of them. A thread does its steps in order, each without
  a break; of those that could start the one goes first that has been ready for longest. Between processes a step starts the
  latency after what it waits for.
- Messages: a rank packs and checksums a part once the last but one has left; then its network's thread sends it and the
  worker's receives it, at the same time, once every engine has read the last bucket but one. Each engine verifies and copies
  a bucket when all of its parts are there.
- In place: the threads of a worker copy and hash one piece after the other. A rank hashes its own pieces when every worker
  has copied all of them. Pieces are cut to the byte; real ones end with a parameter.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from benchmarks.sync_model import NUM_BUCKETS, Reader

Value = TypeVar("Value")


class Rates(NamedTuple):
    """Bytes a second of one thread.

    `write`: a rank packs and checksums; in place it checksums alone. `send`, `receive`: the network of a rank, and of a
    worker; infinite in place, where there is none. `place`: a worker verifies and copies.
    """

    write: float
    send: float
    receive: float
    place: float


@dataclass(frozen=True)
class Machine:
    """Processes that share cores; `latency` is in seconds."""

    num_cores: int
    rates: Rates
    latency: float
    copy_threads: int = 0  # of a worker that reads in place; none where messages travel


@dataclass(eq=False)
class _Step:
    """`seconds` of a thread's time, `latency` after the last of the steps that it waits for."""

    thread: Hashable
    seconds: float
    latency: float
    num_missing: int = 0
    next: list[_Step] = field(default_factory=list)

    def after(self, *steps: _Step) -> _Step:
        for step in steps:
            step.next.append(self)
        self.num_missing += len(steps)
        return self


def machine_seconds(readers: Sequence[Reader], machine: Machine) -> float:
    """When the last worker of the last engine has all in place and verified. Everybody is on node 0."""
    steps = _steps_in_place(readers, machine) if machine.copy_threads else _steps_of_messages(readers, machine)
    return _run(steps, machine.num_cores) + machine.latency


def _steps_of_messages(readers: Sequence[Reader], machine: Machine) -> list[_Step]:
    steps: list[_Step] = []
    sent: dict[int, list[_Step]] = defaultdict(list)  # by rank
    placed: list[list[list[_Step]]] = [[] for _ in readers]  # by reader and bucket, of each engine
    for bucket in range(max(len(reader.buckets) for reader in readers)):
        for number, reader in enumerate(readers):
            if bucket >= len(reader.buckets):
                continue
            room = [step for engines in _before(placed[number], NUM_BUCKETS) for step in engines]
            through: list[_Step] = []
            for rank, size in reader.buckets[bucket]:
                pack = _Step(("rank", rank), size / machine.rates.write, 0.0).after(*_before(sent[rank], NUM_BUCKETS))
                send = _Step(("out", rank), size / machine.rates.send, machine.latency).after(pack, *room)
                receive = _Step(("in", number), size / machine.rates.receive, machine.latency).after(pack, *room)
                sent[rank].append(send)
                through += [send, receive]
                steps += [pack, send, receive]
            seconds = sum(size for _, size in reader.buckets[bucket]) / machine.rates.place
            threads = [("worker", number, engine) for engine in range(1 + reader.followers)]
            placed[number].append([_Step(thread, seconds, machine.latency).after(*through) for thread in threads])
            steps += placed[number][-1]
    return steps


def _steps_in_place(readers: Sequence[Reader], machine: Machine) -> list[_Step]:
    steps: list[_Step] = []
    own: dict[int, float] = defaultdict(float)  # bytes that a rank hashes
    copied: dict[int, list[_Step]] = defaultdict(list)  # and what it waits for
    for number, reader in enumerate(readers):
        for engine in range(1 + reader.followers):
            for piece, parts in enumerate(reader.buckets):
                thread = ("worker", number, engine, piece % machine.copy_threads)
                placed = _Step(thread, sum(size for _, size in parts) / machine.rates.place, 0.0)
                steps.append(placed)
                for rank, part in parts:
                    copied[rank].append(placed)
                    own[rank] += 0 if engine else part
    return steps + [
        _Step(("rank", rank), own[rank] / machine.rates.write, machine.latency).after(*copied[rank]) for rank in sorted(own)
    ]


def _before(steps: list[Value], distance: int) -> list[Value]:
    """The one that is so many before the next, if there is one."""
    return steps[-distance:][:1] if len(steps) >= distance else []


def _run(steps: Sequence[_Step], num_cores: int) -> float:
    """Seconds until all steps are done; those of a thread are given in its order."""
    turns: dict[Hashable, list[_Step]] = defaultdict(list)
    for step in reversed(steps):
        turns[step.thread].append(step)
    since = {step: 0.0 for step in steps if not step.num_missing}  # when all was there that a step waits for
    engaged: set[Hashable] = set()  # threads with a step among these two, by the time it may start and that it ends
    ready: list[tuple[float, int, _Step]] = []
    running: list[tuple[float, int, _Step]] = []
    count, now = itertools.count(), 0.0

    def offer(thread: Hashable) -> None:
        if thread not in engaged and turns[thread] and turns[thread][-1] in since:
            engaged.add(thread)
            step = turns[thread].pop()
            heapq.heappush(ready, (max(now, since[step]), next(count), step))

    for thread in list(turns):
        offer(thread)
    while ready or running:
        if ready and len(running) < num_cores and (not running or max(ready[0][0], now) <= running[0][0]):
            start, _, step = heapq.heappop(ready)
            now = max(now, start)
            heapq.heappush(running, (now + step.seconds, next(count), step))
            continue
        now, _, step = heapq.heappop(running)
        engaged.discard(step.thread)
        for following in step.next:
            following.num_missing -= 1
            if not following.num_missing:
                since[following] = now + following.latency
                offer(following.thread)
        offer(step.thread)
    assert not any(turns.values()), "a step waits for one that never ends"
    return now
