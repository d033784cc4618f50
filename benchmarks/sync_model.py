"""A model of the time that a weight sync takes, step by step, from the real plan; `weight_sync_scale.py` prints it.

The schedule is that of a run. The rules are the same on a cluster and on one machine, where they are measured against the
code (`sync_rates.py`); only rates and what is shared differ.

- A thread, and a link in one direction, does its steps in order, each without a break. Between processes a step starts the
  latency after what it waits for.
- A rank packs its parts in the order of (bucket, engine, worker) into two buckets: the next one once the last but one has
  left.
- A message leaves once its part is packed and the worker's last bucket but one is in place, in the same order. So one that
  waits for a slow worker keeps back those behind it. Sending and receiving take the time of the link each, at the same time,
  and do not disturb each other; the network between the links has room for all.
- A bucket is copied into the weights when all of its parts are there, while the other one travels. Buckets are cut to the
  byte; real ones hold whole rows and checksums.
- On a cluster links are the GPU's own: NVLink inside a node, its network card to others. Where engines of one node hold the
  same shard the first receives it, and passes each bucket on over NVLink, to one after the other.
- On one machine threads share the cores; of steps that could start the one goes first that has been ready for longest. The
  engines behind the first read its buckets themselves.
- In place, on one machine, the threads of a worker copy and hash one piece after the other. A rank hashes its own pieces
  when every worker has copied all of them.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from megarl.weight_sync.plan import ReshardPlan

NUM_BUCKETS = 2
# [bucket][part] -> (source rank, bytes)
Parts = list[list[tuple[int, int]]]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Reader:
    """A worker that receives: its buckets, its node, and how many workers of the node take what it received."""

    buckets: Parts
    node: int
    followers: int = 0


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
class Cluster:
    """Rates are bytes a second, in one direction of one GPU; the latency is seconds a message. `pack` is the rate at which a
    rank fills a bucket, `place` that at which a worker empties one. `source_nodes` [ranks] are theirs."""

    node_gpus: int
    nvlink: float
    nic: float
    pack: float
    place: float
    latency: float
    source_nodes: tuple[int, ...] = ()
    num_cores: int = sys.maxsize  # each GPU and each link has its own

    def link(self, rank: int, reader: Reader) -> tuple[str, Rates]:
        """Over which of their links a rank sends to a reader, and the rates."""
        near = self.source_nodes[rank] == reader.node
        rate = self.nvlink if near else self.nic
        return "NVLink" if near else "network card", Rates(self.pack, rate, rate, self.place)

    def place_all(self, reader: Reader, who: Hashable, size: int, through: list[_Step]) -> list[_Step]:
        """The steps in which everyone who takes a bucket puts it in place, and those before."""
        own = _Step(("worker", who), size / self.place, self.latency).after(*through)
        if not reader.followers:
            return [own]
        passed = _Step(("hand over", who), reader.followers * size / self.nvlink, self.latency).after(*through)
        return [own, passed, _Step(("followers", who), size / self.place, self.latency).after(passed)]


@dataclass(frozen=True)
class Machine:
    """Processes that share cores; `latency` is in seconds. Everybody is on node 0."""

    num_cores: int
    rates: Rates
    latency: float
    copy_threads: int = 0  # of a worker that reads in place; none where messages travel

    def link(self, rank: int, reader: Reader) -> tuple[str, Rates]:
        """As `Cluster.link`."""
        return "", self.rates

    def place_all(self, reader: Reader, who: Hashable, size: int, through: list[_Step]) -> list[_Step]:
        """As `Cluster.place_all`."""
        threads = [("worker", who, engine) for engine in range(1 + reader.followers)]
        return [_Step(thread, size / self.rates.place, self.latency).after(*through) for thread in threads]


@dataclass(eq=False, slots=True)
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


def bucket_parts(plan: ReshardPlan, copies: np.ndarray, itemsize: int, bucket_bytes: int) -> Parts:
    """What each source rank contributes to each bucket when copies in this order fill one after the other."""
    ends = np.cumsum(plan.sizes[copies] * itemsize)
    starts = ends - plan.sizes[copies] * itemsize
    first, last = starts // bucket_bytes, (ends - 1) // bucket_bytes
    counts = last - first + 1
    piece = np.repeat(np.arange(len(copies)), counts)
    bucket = first[piece] + np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    size = np.minimum(ends[piece], (bucket + 1) * bucket_bytes) - np.maximum(starts[piece], bucket * bucket_bytes)
    ranks = int(plan.source_rank.max()) + 1
    keys, inverse = np.unique(bucket * ranks + plan.source_rank[copies][piece], return_inverse=True)
    parts: Parts = [[] for _ in range(int(last[-1]) + 1)]
    for key, total in zip(keys.tolist(), np.bincount(inverse, size).astype(np.int64).tolist(), strict=True):
        parts[key // ranks].append((key % ranks, total))
    return parts


def sync_seconds(readers: Sequence[Reader], resources: Cluster | Machine) -> float:
    """When the last worker of the last engine has all in place and verified. `readers` are those that receive, engine by
    engine."""
    if isinstance(resources, Machine) and resources.copy_threads:
        steps = _steps_in_place(readers, resources)
    else:
        steps = _steps_of_messages(readers, resources)
    return _run(steps, resources.num_cores) + resources.latency


def _steps_of_messages(readers: Sequence[Reader], resources: Cluster | Machine) -> list[_Step]:
    steps: list[_Step] = []
    sent: dict[int, list[list[_Step]]] = defaultdict(list)  # by rank and part
    placed: list[list[list[_Step]]] = [[] for _ in readers]  # by reader and bucket
    for bucket in range(max(len(reader.buckets) for reader in readers)):
        for number, reader in enumerate(readers):
            if bucket >= len(reader.buckets):
                continue
            room = _before(placed[number], NUM_BUCKETS)
            through: list[_Step] = []
            for rank, size in reader.buckets[bucket]:
                link, rates = resources.link(rank, reader)
                pack = _Step(("rank", rank), size / rates.write, 0.0).after(*_before(sent[rank], NUM_BUCKETS))
                send = _Step(("out", rank, link), size / rates.send, resources.latency).after(pack, *room)
                receive = _Step(("in", number, link), size / rates.receive, resources.latency).after(pack, *room)
                sent[rank].append([send])
                through += [send, receive]
                steps += [pack, send, receive]
            size = sum(size for _, size in reader.buckets[bucket])
            placed[number].append(resources.place_all(reader, number, size, through))
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


def _before(steps: list[list[Value]], distance: int) -> list[Value]:
    """Those that are so many before the next, if there are any."""
    return steps[-distance] if len(steps) >= distance else []


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
            heapq.heappush(ready, (max(now, since.pop(step)), next(count), step))

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
