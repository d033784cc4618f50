"""A model of the time that a weight sync takes, step by step, from the real plan; `weight_sync_scale.py` prints it.

The schedule is that of a run. The rules are the same on a cluster and on one machine, where `sync_rates.py` measures what
the model predicts; only the rates and what is shared differ.

- A thread, and a link in one direction, does its steps in order, each without a break. Between processes a step starts the
  latency after what it waits for.
- Buckets travel in rounds. A rank packs its parts of a round once for all engines, as soon as its last round but one is
  done. Then it starts the round: all of its messages to an engine together, once those of the round before are done.
- A worker starts to receive a bucket once its last bucket but one is in place and the bucket before has arrived.
- The messages of a round leave a rank once all workers to which it sends have started them, and arrive at a worker once all
  ranks have. Sending and receiving take the time of the link each, at the same time, and do not disturb each other; the
  network between the links has room for all.
- A bucket is copied into the weights when all of its parts have arrived, while the other bucket travels.
- In two legs a trainer rank, the server, receives for a worker. It starts a round once the worker has read the last bucket
  but one; its own part it copies into the bucket. All ranks are in one group: what a rank sends and receives in a round
  starts together, once its round before is done, which the rank hands over when it has started the next.
- On a cluster each GPU has links of its own: NVLink inside a node, a network card to other nodes.
- On one machine threads share the cores; of the steps that could start, the step goes first that has been ready for longest.
- With `mapped` the threads of a worker copy and hash one piece after another. A rank hashes its pieces once every worker has
  copied all of them, once for all engines.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from megarl.weight_sync.buckets import NUM_BUCKETS, Round

# [bucket][part] -> (source rank, bytes); with `mapped` pieces stand for buckets
Parts = Sequence[Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Reader:
    """A worker of an engine: its buckets, its node, its number, and in two legs the trainer rank that serves it."""

    buckets: Parts
    node: int = 0
    engine: int = 0
    worker: int = 0
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


def sync_seconds(readers: Sequence[Reader], rounds: Sequence[Round], resources: Cluster | Machine) -> float:
    """When the last worker of the last engine has verified everything in place. `rounds` are those of an engine's workers;
    where weights are mapped there are none."""
    steps = _mapped_steps(readers, resources) if resources.copy_threads else _message_steps(readers, rounds, resources)
    return _run(steps, resources.num_cores) + resources.latency


def _message_steps(readers: Sequence[Reader], rounds: Sequence[Round], resources: Cluster | Machine) -> list[_Step]:
    steps: list[_Step] = []
    of_worker, servers = _by_worker(readers), {reader.server for reader in readers if reader.server is not None}
    ranks = sorted({rank for reader in readers for parts in reader.buckets for rank, _ in parts} | servers)
    together: list[dict[int, list[_Step]]] = []  # by round and rank, what ends the rank's messages
    arriving: list[list[_Step]] = [[] for _ in readers]  # of the last bucket of each reader
    placed: list[list[_Step]] = [[] for _ in readers]  # by reader and bucket
    last, latency = dict[int, list[_Step]](), resources.latency  # in two legs, the last messages of a rank

    def step(seconds: float, latency: float, after: Sequence[_Step], *threads: Hashable) -> _Step:
        steps.append(_Step(threads, seconds, latency).after(*after))
        return steps[-1]

    def place(number: int, bucket: int, through: Sequence[_Step]) -> None:
        parts = readers[number].buckets[bucket]
        rates = resources.link(parts[0][0], readers[number])[1]
        placed[number].append(step(sum(size for _, size in parts) / rates.place, latency, through, ("worker", number)))

    def read(number: int, bucket: int) -> list[_Step]:
        """What empties the memory of a bucket."""
        return [placed[number][bucket - NUM_BUCKETS]] if bucket >= NUM_BUCKETS else []

    def complete(done: int) -> None:
        """All ranks wait for a round, and hand its buckets over."""
        for rank in ranks:
            handed = step(0.0, latency, together[done][rank], ("rank", rank))
            for bucket, worker in rounds[done]:
                for number in of_worker[worker]:
                    if readers[number].server == rank:
                        place(number, bucket, [handed])

    for turn, entries in enumerate(rounds):
        if turn >= NUM_BUCKETS:
            complete(turn - NUM_BUCKETS)
        work = _work_of(readers, of_worker, entries, resources)
        emptied: dict[int, list[_Step]] = defaultdict(list)  # what a server waits for
        for bucket, worker in entries:
            for number in of_worker[worker]:
                if (server := readers[number].server) is not None:
                    emptied[server] += read(number, bucket)
        begun: dict[int, _Step] = {}
        for rank in ranks:
            rates = resources.link(rank, readers[0])[1]
            step(work.written[rank] / rates.write, 0.0, [], ("rank", rank))
            started = step(work.copied[rank] / rates.copy, latency, emptied[rank], ("rank", rank))
            begun[rank] = step(0.0, 0.0, [started, *last.get(rank, [])])
        # By worker, of all engines: that the senders, and the receivers, have started the round.
        senders, receivers, ready = {}, {}, {}
        for bucket, worker in entries:
            senders[worker] = step(0.0, 0.0, [begun[rank] for rank in work.ranks_of[worker]])
            for number in of_worker[worker]:
                server = readers[number].server
                room = [*read(number, bucket), *arriving[number]]
                ready[number] = step(0.0, latency, room) if server is None else begun[server]
            receivers[worker] = step(0.0, 0.0, [ready[number] for number in of_worker[worker]])
        sending: dict[int, list[_Step]] = defaultdict(list)
        for (rank, link), seconds in work.out.items():
            after = [begun[rank], *(receivers[worker] for worker in work.workers_of[rank])]
            sending[rank].append(step(seconds, latency, after, ("out", rank, link)))
        arrived: dict[int, list[_Step]] = defaultdict(list)
        for (number, link), seconds in work.into.items():
            after = [ready[number], senders[readers[number].worker]]
            arrived[number].append(step(seconds, latency, after, ("in", number, link)))
        received, ends = {}, defaultdict[int, list[_Step]](list)
        for bucket, worker in entries:
            sent = step(0.0, 0.0, [*chain.from_iterable(sending[rank] for rank in work.ranks_of[worker])])
            received[worker] = step(0.0, 0.0, [*chain.from_iterable(arrived[number] for number in of_worker[worker])])
            for number in of_worker[worker]:
                arriving[number] = [*arrived[number], sent]
                if (server := readers[number].server) is not None:
                    ends[server] += arriving[number]
                else:
                    place(number, bucket, arriving[number])
        for rank in ranks:
            ends[rank] += [*sending[rank], *(received[worker] for worker in work.workers_of[rank])]
        together.append(ends)
        last |= {rank: of_rank for rank, of_rank in ends.items() if of_rank and servers}
    for done in range(max(0, len(rounds) - NUM_BUCKETS), len(rounds)):
        complete(done)
    return steps


class _Work(NamedTuple):
    """What a round takes: bytes that each rank writes, and that each server copies; seconds by link and rank, or reader; and
    who sends to whom."""

    written: Counter[int]
    copied: Counter[int]
    out: defaultdict[tuple[int, str], float]
    into: defaultdict[tuple[int, str], float]
    ranks_of: dict[int, list[int]]  # by worker
    workers_of: defaultdict[int, list[int]]  # by rank


def _work_of(
    readers: Sequence[Reader], of_worker: Mapping[int, Sequence[int]], entries: Round, resources: Cluster | Machine
) -> _Work:
    work = _Work(Counter(), Counter(), defaultdict(float), defaultdict(float), {}, defaultdict(list))
    for bucket, worker in entries:
        parts = readers[of_worker[worker][0]].buckets[bucket]
        work.written.update(dict(parts))
        work.ranks_of[worker] = [rank for rank, _ in parts]
        for rank in work.ranks_of[worker]:
            work.workers_of[rank].append(worker)
        for number in of_worker[worker]:
            reader = readers[number]
            for rank, size in parts:
                if rank == reader.server:
                    work.copied[rank] += size
                    continue
                link, rates = resources.link(rank, reader)
                work.out[rank, link] += size / rates.send
                work.into[number, link] += size / rates.receive
    return work


def _by_worker(readers: Sequence[Reader]) -> dict[int, list[int]]:
    """The numbers of the readers by the number of their worker."""
    of_worker: dict[int, list[int]] = defaultdict(list)
    for number, reader in enumerate(readers):
        of_worker[reader.worker].append(number)
    return of_worker


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
