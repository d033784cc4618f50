"""A model of the time that a weight sync takes, event by event, from the real plan; `weight_sync_scale.py` prints it.

What it assumes:

- A worker (or the one that receives for a node) has two buckets. A bucket is asked for when it is free; each of its parts is
  one message from one trainer rank. When all are there it is copied into the weights, while the other one travels.
- A rank packs and sends a part as soon as it is asked for, first come first served; it never waits for a slow worker.
- Links are the GPU's own: what a rank sends takes turns on its link (NVLink inside a node, its network card to others) at
  the link's rate, and so does what a worker receives. A message begins to arrive when it begins to leave. The network
  between the cards has room for all of them at once, and sending and receiving do not disturb each other.
- Asking and arriving take the latency each. Buckets are cut to the byte; real ones hold whole rows and checksums.
- Workers of several engines that are on one node and hold the same shard share one copy: the first receives it and passes
  each bucket on over NVLink, to one after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.reshard.plan import ReshardPlan

NUM_BUCKETS = 2
# [bucket][part] -> (source rank, bytes)
Parts = list[list[tuple[int, int]]]


@dataclass(frozen=True)
class Cluster:
    """Rates are bytes a second, in one direction of one GPU; the latency is seconds a message. `pack` is the rate at which a
    rank fills a bucket, `place` that at which a worker empties one."""

    node_gpus: int
    nvlink: float
    nic: float
    pack: float
    place: float
    latency: float

    def rate(self, same_node: bool) -> float:
        return self.nvlink if same_node else self.nic


@dataclass(frozen=True)
class Reader:
    """A worker that receives: its buckets, its node, and how many workers of the node take what it received."""

    buckets: Parts
    node: int
    followers: int = 0


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


class _State:
    """A reader on its way: how many parts of each open bucket are missing, and when each of its ports is free."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.missing = [len(parts) for parts in reader.buckets]
        self.arrived = [0.0] * len(reader.buckets)
        self.link = [0.0, 0.0]  # network card, NVLink
        self.copy = self.pass_on = 0.0


def sync_seconds(readers: Sequence[Reader], source_nodes: Sequence[int], cluster: Cluster) -> float:
    """When the last worker has its last bucket in place."""
    states = [_State(reader) for reader in readers]
    sender_free = [[0.0, 0.0] for _ in source_nodes]
    events: list[tuple[float, int, int, int, int, bool]] = []  # (time, number, reader, bucket, part, is on its way)
    number = 0

    def ask(time: float, reader: int, bucket: int) -> None:
        nonlocal number
        if bucket < len(states[reader].reader.buckets):
            for part, (_, size) in enumerate(states[reader].reader.buckets[bucket]):
                number += 1
                heapq.heappush(events, (time + cluster.latency + size / cluster.pack, number, reader, bucket, part, False))

    for reader in range(len(states)):
        for bucket in range(NUM_BUCKETS):
            ask(0.0, reader, bucket)
    end = 0.0
    while events:
        time, _, reader, bucket, part, leaving = heapq.heappop(events)
        state = states[reader]
        source, size = state.reader.buckets[bucket][part]
        same_node = source_nodes[source] == state.reader.node
        seconds = size / cluster.rate(same_node)
        if not leaving:
            start = max(time, sender_free[source][same_node])
            sender_free[source][same_node] = start + seconds
            number += 1
            heapq.heappush(events, (start, number, reader, bucket, part, True))
            continue
        begin = max(state.link[same_node], time)
        state.link[same_node] = begin + seconds
        state.arrived[bucket] = max(state.arrived[bucket], begin + seconds + cluster.latency)
        state.missing[bucket] -= 1
        if state.missing[bucket] == 0:
            free = _place(state, bucket, cluster)
            end = max(end, free)
            ask(free, reader, bucket + NUM_BUCKETS)
    return end


def _place(state: _State, bucket: int, cluster: Cluster) -> float:
    """When a bucket that has arrived is in the weights of everyone who takes it."""
    size = sum(size for _, size in state.reader.buckets[bucket])
    state.copy = max(state.copy, state.arrived[bucket]) + size / cluster.place
    if not state.reader.followers:
        return state.copy
    state.pass_on = max(state.pass_on, state.arrived[bucket]) + state.reader.followers * size / cluster.nvlink
    return max(state.copy, state.pass_on + cluster.latency + size / cluster.place)
