"""A model of the time that a weight sync takes, step by step, from the real plan; `weight_sync_scale.py` prints it.

The schedule is that of a run. The rules are the same on a cluster and on one machine, where `sync_rates.py` measures what
the model predicts; only the rates and what is shared differ.

- A thread, and a link in one direction, does its steps in order, each without a break. Between processes a step starts the
  latency after what it waits for.
- A rank packs its parts in the order of (bucket, engine, worker) into two buckets: the next part once the message of the
  last part but one has left.
- A message leaves once its part is packed and the worker's last bucket but one is in place, in the same order. So a message
  that waits for a slow worker holds up the messages behind it. Sending and receiving take the time of the link each, at the
  same time, and do not disturb each other; the network between the links has room for all.
- A bucket is copied into the weights when all of its parts have arrived, while the other bucket travels.
- In two legs a trainer rank, the server, receives for a worker. Whenever the server comes to a bucket of its worker in the
  order above, it waits for the bucket before and hands that over, waits until the worker has read the bucket before that,
  and then receives. Its own part it copies into the bucket. All ranks are in one group: the messages of a rank, sent and
  received, take turns.
- On a cluster each GPU has links of its own: NVLink inside a node, a network card to other nodes.
- On one machine threads share the cores; of the steps that could start, the step goes first that has been ready for longest.
- With `mapped` the threads of a worker copy and hash one piece after another. A rank hashes its pieces once every worker has
  copied all of them, once for all engines.
"""

from __future__ import annotations

import heapq
import sys
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megarl.weight_sync.transport import NUM_BUCKETS

# [bucket][part] -> (source rank, bytes); with `mapped` pieces stand for buckets
Parts = Sequence[Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Reader:
    """A worker of an engine: its buckets, its node, and in two legs the trainer rank that serves it."""

    buckets: Parts
    node: int = 0
    engine: int = 0
    server: int | None = None


class Rates(NamedTuple):
    """Bytes a second of one thread.

    `write`: a rank packs and computes checksums; with `mapped` checksums alone. `send`, `receive`: the network of a rank and
    of a worker. `place`: a worker verifies and copies. `copy`: a server copies its own part.
    """

    write: float
    send: float
    receive: float
    place: float
    copy: float


@dataclass(frozen=True)
class Cluster:
    """Bytes a second of each GPU: of its links in one direction, and of a copy in its memory, as which packing and placing
    count. The latency is seconds a message. `source_nodes` [ranks] are the nodes of the trainer ranks."""

    node_gpus: int
    nvlink: float
    nic: float
    copy: float
    latency: float
    source_nodes: tuple[int, ...] = ()
    num_cores: int = sys.maxsize  # every GPU and every link works by itself
    copy_threads: int = 0

    def link(self, rank: int, reader: Reader) -> tuple[str, Rates]:
        """Over which of their links a rank sends to a reader, and the rates."""
        near = self.source_nodes[rank] == reader.node
        rate = self.nvlink if near else self.nic
        return "NVLink" if near else "network card", Rates(self.copy, rate, rate, self.copy, self.copy)


@dataclass(frozen=True)
class Machine:
    """Processes that share cores; the latency is in seconds. With `copy_threads` each worker maps the weights."""

    num_cores: int
    rates: Rates
    latency: float
    copy_threads: int = 0

    def link(self, rank: int, reader: Reader) -> tuple[str, Rates]:
        """As `Cluster.link`."""
        return "", self.rates


@dataclass(eq=False, slots=True)
class _Step:
    """`seconds` of each of its threads, `latency` after the last of the steps that it waits for."""

    threads: tuple[Hashable, ...]
    seconds: float
    latency: float
    num_missing: int = 0
    since: float = 0.0
    number: int = 0
    next: list[_Step] = field(default_factory=list)
    next_of_threads: list[_Step] = field(default_factory=list)

    def after(self, *steps: _Step) -> _Step:
        for step in steps:
            step.next.append(self)
        self.num_missing += len(steps)
        return self


def sync_seconds(readers: Sequence[Reader], resources: Cluster | Machine) -> float:
    """When the last worker of the last engine has verified everything in place. `readers` come engine by engine."""
    steps = _mapped_steps(readers, resources) if resources.copy_threads else _message_steps(readers, resources)
    return _run(steps, resources.num_cores) + resources.latency


def _message_steps(readers: Sequence[Reader], resources: Cluster | Machine) -> list[_Step]:
    steps: list[_Step] = []
    sent: dict[int, list[list[_Step]]] = defaultdict(list)  # by rank and part
    arriving: list[list[_Step]] = [[] for _ in readers]  # of the last bucket of each reader
    placed: list[list[_Step]] = [[] for _ in readers]  # by reader and bucket

    def step(seconds: float, latency: float, after: Sequence[_Step], *threads: Hashable) -> _Step:
        steps.append(_Step(threads, seconds, latency).after(*after))
        return steps[-1]

    def place(number: int, bucket: int) -> None:
        """The steps in which a bucket gets from the server to its place, or from the worker's own memory."""
        reader, through, latency = readers[number], arriving[number], resources.latency
        rates = resources.link(reader.buckets[bucket][0][0], reader)[1]
        if reader.server is not None:
            through = [step(0.0, latency, through, ("rank", reader.server))]
        size = sum(size for _, size in reader.buckets[bucket])
        placed[number].append(step(size / rates.place, latency, through, ("worker", number)))

    for bucket in range(max(len(reader.buckets) for reader in readers)):
        for number, reader in enumerate(readers):
            if bucket >= len(reader.buckets):
                continue
            if reader.server is not None and bucket:
                place(number, bucket - 1)
            room = [placed[number][bucket - NUM_BUCKETS]] if bucket >= NUM_BUCKETS else []
            into: list[Hashable] = []
            if reader.server is not None:
                room = [step(0.0, resources.latency, room, ("rank", reader.server))]
                into = [("messages", reader.server)]
            arriving[number] = []
            for rank, size in reader.buckets[bucket]:
                link, rates = resources.link(rank, reader)
                local = rank == reader.server
                before = sent[rank][-NUM_BUCKETS] if len(sent[rank]) >= NUM_BUCKETS else []
                pack_s = size / rates.write + (size / rates.copy if local else 0.0)
                pack = step(pack_s, 0.0, before, ("rank", rank))
                if local:  # the server comes back to the bucket after its own part
                    sent[rank].append([])
                    continue
                out: list[Hashable] = [("messages", rank)] if into else []
                ready = [pack, *room]
                send = step(size / rates.send, resources.latency, ready, ("out", rank, link), *out)
                receive = step(size / rates.receive, resources.latency, ready, ("in", number, link), *into)
                sent[rank].append([send])
                arriving[number] += [send, receive]
            if reader.server is None:
                place(number, bucket)
    for number, reader in enumerate(readers):
        if reader.server is not None:
            place(number, len(reader.buckets) - 1)
    return steps


def _mapped_steps(readers: Sequence[Reader], resources: Cluster | Machine) -> list[_Step]:
    steps: list[_Step] = []
    hashed: dict[int, float] = defaultdict(float)  # bytes that a rank hashes
    copied: dict[int, list[_Step]] = defaultdict(list)  # and the steps that it waits for
    for number, reader in enumerate(readers):
        for piece, parts in enumerate(reader.buckets):
            for rank, size in parts:
                thread = ("worker", number, piece % resources.copy_threads)
                rates = resources.link(rank, reader)[1]
                steps.append(_Step((thread,), size / rates.place, 0.0))
                copied[rank].append(steps[-1])
                hashed[rank] += 0 if reader.engine else size / rates.write
    hashes = [_Step((("rank", rank),), seconds, resources.latency).after(*copied[rank]) for rank, seconds in hashed.items()]
    return steps + hashes


def _run(steps: Sequence[_Step], num_cores: int) -> float:
    """Seconds until all steps are done; the steps of a thread are given in its order."""
    last: dict[Hashable, _Step] = {}
    for number, step in enumerate(steps):
        step.number = number
        for thread in step.threads:
            if thread in last:
                last[thread].next_of_threads.append(step)
                step.num_missing += 1
            last[thread] = step
    # (time, number, step): of steps that can start, since when; and of steps that run, until when.
    ready = [(0.0, step.number, step) for step in steps if not step.num_missing]
    running: list[tuple[float, int, _Step]] = []
    now = 0.0
    while ready or running:
        if ready and len(running) < num_cores and (not running or max(ready[0][0], now) <= running[0][0]):
            since, number, step = heapq.heappop(ready)
            now = max(now, since)
            heapq.heappush(running, (now + step.seconds, number, step))
            continue
        now, _, step = heapq.heappop(running)
        for latencies, following_steps in ((True, step.next), (False, step.next_of_threads)):
            for following in following_steps:
                following.since = max(following.since, now + (following.latency if latencies else 0.0))
                following.num_missing -= 1
                if not following.num_missing:
                    heapq.heappush(ready, (following.since, following.number, following))
    return now
