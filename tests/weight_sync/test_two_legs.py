"""Two legs between GPUs: messages that wait for each other, as NCCL's do, never wait in a circle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megarl.models.layout import Layout, RolloutLayout
from megarl.weight_sync.buckets import sync_rounds, sync_stream
from megarl.weight_sync.group import BucketSender
from megarl.weight_sync.manifest import WeightManifest
from megarl.weight_sync.plan import sync_plan
from tests.weight_sync.test_buckets import SHAPE

pytestmark = pytest.mark.sync
# What starts together: the sizes of the messages to ("send") and from ("receive") each rank, in their order.
Batch = dict[tuple[str, int], deque[int]]


class Recorder:
    """In the place of the group of the ranks, or of an engine: records messages, and takes them for done."""

    lost: dict[int, str] = {}

    def __init__(self) -> None:
        self.batches: deque[Batch] = deque()
        self._is_open = False

    @contextmanager
    def together(self) -> Iterator[None]:
        self.batches.append({})
        self._is_open = True
        yield
        self._is_open = False
        if not self.batches[-1]:
            self.batches.pop()

    def send(self, content: torch.Tensor, member: int, *more: Any) -> None:
        self._add("send", content, member)

    def receive(self, content: torch.Tensor, member: int, *more: Any) -> None:
        self._add("receive", content, member)

    def finish(self, *arguments: Any) -> bool:
        return True

    def _add(self, end: str, content: torch.Tensor, member: int) -> None:
        if not self._is_open:
            self.batches.append({})
        self.batches[-1].setdefault((end, member), deque()).append(len(content))


class Engines(Recorder):
    def start(self, call: str, engine: int, worker: int, content: torch.Tensor, what: str) -> None:
        """A bucket is handed over ("send"), or free again ("receive")."""


def batches_of(rank: int, layout: Layout, manifest: WeightManifest, by_layer: bool) -> deque[Batch]:
    plan = sync_plan(SHAPE, layout, manifest.rollout)
    streams = [sync_stream(SHAPE, plan, worker, manifest) for worker in range(manifest.rollout.workers)]
    group = Recorder()
    engines: Any = Engines()
    store: Any = None
    rounds = sync_rounds(plan, streams, by_layer)
    sender = BucketSender(streams, rounds, rank, engines, store, manifest)
    sender._ranks = group  # type: ignore[assignment]
    sender.begin(manifest)
    for entries in rounds:
        sender.send(entries, sender.room(entries))
    sender.finish()
    return group.batches


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize(
    ("layout", "rollout", "servers"),
    [
        (Layout(2), RolloutLayout(), ((0,), (1,))),
        (Layout(2, 3), RolloutLayout(2), ((0, 1), (2, 3), (4, 5))),
        (Layout(1, 3, 2), RolloutLayout(2), ((3, 2), (0, 1), (5, 4))),
        (Layout(4), RolloutLayout(1, 2), ((0, 0), (1, 2))),
    ],
)
def test_no_two_ranks_wait_for_each_other(
    layout: Layout, rollout: RolloutLayout, servers: tuple[tuple[int, ...], ...], by_layer: bool
) -> None:
    """Each rank's batches go in their order, and each message only together with its other end."""
    engines = tuple(range(len(servers)))
    manifest = WeightManifest(
        version=1, attempt=1, plan_hash="", layout=layout, rollout=rollout, mode="reshard", precision="fp32",
        bucket_bytes=8192, timeout_s=60.0, num_engines=len(servers), engines=engines, transport="group", port=0,
        groups=engines, merges=by_layer, servers=servers,
    )  # fmt: skip
    queues = [batches_of(rank, layout, manifest, by_layer) for rank in range(layout.ranks)]
    total = sum(map(len, queues))
    while passed := [
        (rank, peer)
        for rank, queue in enumerate(queues)
        for end, peer in (queue[0] if queue else ())
        if end == "send" and queues[peer] and ("receive", rank) in queues[peer][0]
    ]:
        for rank, peer in passed:
            sent, received = queues[rank][0], queues[peer][0]
            assert sent.pop(("send", peer)) == received.pop(("receive", rank)), "other messages than the peer waits for"
        for queue in queues:
            if queue and not queue[0]:
                queue.popleft()
    assert total > 20 and not any(queues), [queue and queue[0] for queue in queues]
