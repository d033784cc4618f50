"""What a transport must offer at its two ends, and how both of them wait.

Every trainer rank fills its own parts of the buckets of each stream. Where engines read the same memory there is one stream
a worker number, and every engine has a receiver of it; where each gets messages of its own, one of each worker of each
engine, so that they ask unlike ranks at the same time (`WeightManifest.orders`). A bucket is used again once it has arrived,
so neither end holds more than `NUM_BUCKETS` of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from megarl.weight_sync.manifest import WeightManifest

# One is written while the other is read.
NUM_BUCKETS = 2
# How many times `weight_sync.timeout_s` an end waits. Who waits for one that may itself be waiting must wait longer: else
# both give up at once, and the wrong engine is started again. In shared memory a trainer rank waits once for the engines.
ENGINE_WAITS = 2  # an engine for a trainer rank's part of a bucket
# Where messages travel a leading engine waits once for its followers.
SENDER_WAITS = 2  # a trainer rank for a leading engine
LEADER_WAITS = 3  # a leading engine for a trainer rank, which may be waiting for another one
FOLLOWER_WAITS = 4  # a follower for the engine that leads
# Rank 0 for what an engine says at the end of a sync, by transport.
# Once more where an engine may wait for the one that leads to offer its device's memory.
REPORT_WAITS = {
    "shared_memory": 1 + ENGINE_WAITS,
    "cuda_ipc": 2 + ENGINE_WAITS,
    "gloo": 1 + FOLLOWER_WAITS,
    "nccl": 2 + FOLLOWER_WAITS,
}
# How long a wait sleeps between two looks: at first not at all, as most waits are short.
EAGER_LOOKS = 20
LOOK_S = 0.0002
# At least so long where a rank waits for a whole version to be read: what it spends on looking, workers lack.
READ_LOOK_S = 0.001
WATCH_S = 0.05


class Means(NamedTuple):
    """What a transport is made of: whether parts travel in messages, or trainer ranks write them where engines read; and
    whether buckets lie in the memory of devices, or of hosts."""

    messages: bool
    on_device: bool


TRANSPORTS = {
    "shared_memory": Means(messages=False, on_device=False),
    "cuda_ipc": Means(messages=False, on_device=True),
    "gloo": Means(messages=True, on_device=False),
    "nccl": Means(messages=True, on_device=True),
}


def engines_of(stream: int, manifest: WeightManifest) -> tuple[int, ...]:
    """Which of the engines that receive from trainer ranks themselves a stream goes to, by its number: `order * workers +
    worker`."""
    if manifest.orders == 1:
        return manifest.leading
    engine = stream // manifest.rollout.workers
    return (engine,) if engine in manifest.leading else ()


class Sender(Protocol):
    """A trainer rank's end of the streams to all workers, each known by its number (`engines_of`)."""

    sent_bytes: int  # since `begin`, with checksums
    lost: dict[int, str]  # engines that this rank gave up since `begin`, and why

    @property
    def buckets(self) -> torch.Tensor:
        """The memory of all buckets, uint8 [NUM_BUCKETS, bytes]."""

    def begin(self, manifest: WeightManifest) -> None:
        """Start over, for the manifest's engines alone."""

    def serves(self, stream: int) -> bool:
        """Whether a stream has to be written: not where nobody takes it any more."""

    def room(self, stream: int, bucket: int) -> torch.Tensor:
        """Memory of a bucket, uint8 [capacity], once it may be written. Raises SyncAborted where another rank failed."""

    def send(self, stream: int, bucket: int) -> None:
        """This rank's part of the bucket that `room` gave last is complete."""

    def finish(self) -> None:
        """Wait until all that was sent has left this rank's memory."""

    def lose(self, engine: int) -> None:
        """Wait for this engine no more: it is gone."""

    def abort(self) -> None:
        """Tell the engines that no more will come; on the way out of a failure."""

    def close(self) -> None:
        """Give everything back."""


class Receiver(Protocol):
    """A worker's end of its stream."""

    def take(self, bucket: int) -> torch.Tensor:
        """A bucket's bytes, uint8 [capacity], once all of its parts are there. Raises SyncError at the deadline."""

    def release(self, bucket: int) -> None:
        """The bucket was read and may be written again."""

    def give_up(self) -> None:
        """Read no more, so that nobody waits for this worker."""


def wait_until(
    ready: Callable[[], bool],
    timeout_s: float,
    watch: Callable[[], None] | None = None,
    look_s: Callable[[], float] = lambda: LOOK_S,
) -> bool:
    """Look until `ready`, `look_s` apart; False at the deadline. `watch` is called now and then meanwhile, and may raise."""
    looks, begun = 0, time.monotonic()
    watched = begun
    while not ready():
        looks += 1
        if looks < EAGER_LOOKS:
            time.sleep(0)
            continue
        now = time.monotonic()
        if now - begun > timeout_s:
            return False
        if watch is not None and now - watched > WATCH_S:
            watch()
            watched = now
        time.sleep(look_s())
    return True
