"""Two legs between GPUs: messages that wait for each other, as NCCL's do, never wait in a circle."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from megarl.models.layout import Layout, RolloutLayout
from megarl.weight_sync.group import BucketSender
from megarl.weight_sync.manifest import WeightManifest
from megarl.weight_sync.plan import engine_plan
from megarl.weight_sync.stream import bucket_sequence, sync_stream
from tests.weight_sync.test_stream import SHAPE

pytestmark = pytest.mark.sync
Messages = deque[tuple[str, int]]


class Recorder:
    """In the place of the group of the ranks, or of an engine: records messages, and takes them for done."""

    lost: dict[int, str] = {}

    def __init__(self) -> None:
        self.messages: Messages = deque()

    def send(self, content: torch.Tensor, member: int, *more: Any) -> None:
        self.messages.append(("send", member))

    def receive(self, content: torch.Tensor, member: int, *more: Any) -> None:
        self.messages.append(("receive", member))

    def finish(self, *arguments: Any) -> bool:
        return True


def messages_of(rank: int, layout: Layout, manifest: WeightManifest, by_layer: bool) -> Messages:
    plan, workers = engine_plan(SHAPE, layout, manifest.rollout), manifest.rollout.workers
    streams = [
        sync_stream(SHAPE, plan, number % workers, manifest.turn(number), torch.float32, 8192, None)
        for number in range(manifest.num_orders * workers)
    ]
    group = Recorder()
    engines: Any = Recorder()
    store: Any = None
    sender = BucketSender(streams, rank, engines, store, None, manifest)
    sender._ranks = group  # type: ignore[assignment]
    sender.begin(manifest)
    for bucket, number in bucket_sequence(plan, streams, by_layer):
        if streams[number].part(bucket, rank) is None:
            sender.receive(number, bucket)
        else:
            sender.room(number)
            sender.send(number, bucket)
    sender.finish()
    return group.messages


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
    """Each rank's messages go in their order, and each only together with its other end."""
    engines = tuple(range(len(servers)))
    manifest = WeightManifest(
        version=1, attempt=1, plan_hash="", layout=layout, rollout=rollout, mode="reshard", precision="fp32",
        bucket_bytes=8192, timeout_s=60.0, engines=engines, num_engines=len(engines), transport="group", on_device=False,
        store=("", 0), groups=engines, by_layer=by_layer, servers=servers,
    )  # fmt: skip
    queues = [messages_of(rank, layout, manifest, by_layer) for rank in range(layout.ranks)]
    total = sum(map(len, queues))
    while True:
        ready = [
            (rank, peer)
            for rank, queue in enumerate(queues)
            if queue and queue[0][0] == "send" and queues[peer := queue[0][1]] and queues[peer][0] == ("receive", rank)
        ]
        if not ready:
            break
        for rank, peer in ready:
            if queues[rank][0] == ("send", peer) and queues[peer][0] == ("receive", rank):
                queues[rank].popleft()
                queues[peer].popleft()
    assert total > 20 and not any(queues), [queue and queue[0] for queue in queues]
