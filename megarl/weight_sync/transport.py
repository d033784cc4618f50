"""The transports of a weight sync: what they are made of, which one a run takes, and how long each end waits.

Every trainer rank fills its parts of the buckets of each stream. Where engines read the same memory there is one stream for
each worker number, and every engine has a receiver of it. Where each engine gets messages, there is one stream for each
worker of each engine, so that engines ask different ranks at the same time (`WeightManifest.orders`). A bucket is used again
once it has arrived, so neither end holds more than `NUM_BUCKETS` buckets.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from megarl.planner.placement import PlacementError
from megarl.weight_sync.manifest import WeightManifest

NUM_BUCKETS = 2  # one is written while the other is read
# How many times `weight_sync.timeout_s` each end waits. An end that waits for a process which may be waiting itself must
# wait longer. Otherwise both give up at once, and the wrong engine is started again. In shared memory a trainer rank waits
# once for the engines; with messages a leading engine waits once for its followers.
ENGINE_WAITS = 2  # an engine for a trainer rank's part of a bucket
SENDER_WAITS = 2  # a trainer rank for a leading engine
LEADER_WAITS = 3  # a leading engine for a trainer rank, which may be waiting for another engine
FOLLOWER_WAITS = 4  # a follower for the leading engine
# Rank 0 for an engine's report at the end of a sync, by transport: one more wait where an engine may wait for the leading
# engine to offer its device's memory.
REPORT_WAITS = {
    "shared_memory": 1 + ENGINE_WAITS,
    "cuda_ipc": 2 + ENGINE_WAITS,
    "gloo": 1 + FOLLOWER_WAITS,
    "nccl": 2 + FOLLOWER_WAITS,
}
# Seconds between two looks of a wait. The first looks do not sleep: most waits are short.
EAGER_LOOKS = 20
LOOK_S = 0.0002
READ_LOOK_S = 0.005  # where a rank waits for a whole version to be read: a look takes 50 us from cores that workers need
WATCH_S = 0.05


class Means(NamedTuple):
    """Whether parts travel in messages, or trainer ranks write them where engines read; and whether buckets lie in the
    memory of devices, or of hosts."""

    messages: bool
    on_device: bool


TRANSPORTS = {
    "shared_memory": Means(messages=False, on_device=False),
    "cuda_ipc": Means(messages=False, on_device=True),
    "gloo": Means(messages=True, on_device=False),
    "nccl": Means(messages=True, on_device=True),
}


def choose_transport(
    wanted: str, device: str, one_host: bool, separate: bool, no_peer_access: tuple[int, int] | None = None
) -> str:
    """Resolve `weight_sync.transport`: `auto` takes the fastest transport that works.

    That is buckets in device memory where `device` is "cuda", and messages where trainer ranks and engines are on several
    hosts. NCCL needs `separate` devices (`rollout.placement`), since no two members may share one. `no_peer_access` names
    two of the run's devices on one host that cannot reach each other's memory, which `cuda_ipc` needs; `auto` then takes
    another transport and prints why. Raises PlacementError for a transport that this machine, or this run, cannot have.
    """
    no_peers = None
    if no_peer_access is not None:
        no_peers = "GPUs {} and {} cannot reach each other's memory (no peer access)".format(*no_peer_access)
    if wanted == "auto":
        if device != "cuda":
            return "shared_memory" if one_host else "gloo"
        if not one_host:
            return "nccl" if separate else "gloo"
        if no_peers is None:
            return "cuda_ipc"
        chosen = "nccl" if separate else "shared_memory"
        print(f"weight_sync.transport = auto takes {chosen} and not cuda_ipc: {no_peers}", file=sys.stderr)
        return chosen
    means = TRANSPORTS[wanted]
    if means.on_device and device != "cuda":
        raise PlacementError(f"weight_sync.transport = {wanted} needs GPUs, and trainer ranks run on {device}; use auto")
    if not means.messages and not one_host:
        raise PlacementError(f"weight_sync.transport = {wanted} needs all trainer ranks and engines on one host; use auto")
    if wanted == "cuda_ipc" and no_peers is not None:
        raise PlacementError(f"weight_sync.transport = cuda_ipc needs GPUs that are peers, and {no_peers}; use auto")
    return wanted


def engines_of(stream: int, manifest: WeightManifest) -> tuple[int, ...]:
    """The leading engines that take a stream, by its number `order * workers + worker`."""
    if manifest.orders == 1:
        return manifest.leading
    engine = stream // manifest.rollout.workers
    return (engine,) if engine in manifest.leading else ()


def wait_until(
    ready: Callable[[], bool], timeout_s: float, watch: Callable[[], None] | None = None, look_s: float = LOOK_S
) -> bool:
    """Look every `look_s` until `ready`; False at the deadline. `watch` is called now and then, and may raise."""
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
        time.sleep(look_s)
    return True
