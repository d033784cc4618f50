"""How fast are the two ends of a sync through shared memory on this machine? Of the simplest one: one rank to one worker.

The real code of both ends, each in a process of its own, because a bucket that goes from one core to another costs more than
one that stays. Processor seconds, so that waits and other programs do not count; the least of some rounds.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from megarl.family import ModelShape
from megarl.reshard import megatron, vllm
from megarl.reshard.boxes import Layout, RolloutLayout
from megarl.sync.manifest import WeightManifest
from megarl.sync.publish import EngineFacts, SyncSettings, WeightSync
from megarl.sync.read import StreamReader

DTYPES = {2: torch.bfloat16, 4: torch.float32}
TIMEOUT_S = 120.0


class _Worker:
    """The engine, seen from the rank: another process that answers with the processor seconds it took."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.seconds: list[float] = []

    def pause(self, version: int, attempt: int, engines: Sequence[int]) -> Sequence[EngineFacts]:
        return [EngineFacts("here", 1)]

    def begin(self, manifest: WeightManifest) -> None:
        self._connection.send(manifest.as_dict())

    def failed(self) -> Sequence[int]:
        return ()

    def finish(self) -> tuple[tuple[int, ...], dict[str, float]]:
        self.seconds.append(self._connection.recv())
        return (), {}


def measured_rates(shape: ModelShape, itemsize: int, bucket_bytes: int, rounds: int = 8) -> tuple[float, float]:
    """(write, read): bytes a second of a rank that packs and checksums, and of a worker that verifies and copies."""
    spawn = multiprocessing.get_context("spawn")
    mine, its = spawn.Pipe()
    process = spawn.Process(target=_read, args=(its, shape, itemsize), daemon=True)
    process.start()
    torch.set_num_threads(1)
    dtype, worker = DTYPES[itemsize], _Worker(mine)
    sizes = megatron.parameter_sizes(shape, Layout(), 0)
    parameters = {name: torch.zeros(size, dtype=dtype) for name, size in sizes.items()}
    settings = SyncSettings(dtype, RolloutLayout(), 1, bucket_bytes, TIMEOUT_S)
    sync = WeightSync(shape, Layout(), settings, "rates", 0, None)
    seconds = []
    try:
        for version in range(1, rounds + 1):
            began = time.process_time()
            figures = sync.publish(version, parameters, worker)
            seconds.append(time.process_time() - began)
    finally:
        mine.send(None)
        process.join(TIMEOUT_S)
        sync.close()
    return figures["sync/bound_bytes"] / min(seconds), figures["sync/bound_bytes"] / min(worker.seconds)


def _read(connection: Connection, shape: ModelShape, itemsize: int) -> None:
    torch.set_num_threads(1)
    reader = StreamReader(shape, 0)
    sizes = vllm.parameter_sizes(shape, RolloutLayout(), 0)
    targets = {name: torch.zeros(size, dtype=DTYPES[itemsize]) for name, size in sizes.items()}
    while (values := connection.recv()) is not None:
        began = time.process_time()
        for parameter, row, col, content in reader.boxes(WeightManifest.from_dict(values), 0):
            rows, cols = content.shape
            targets[parameter][row : row + rows, col : col + cols].copy_(content)
        connection.send(time.process_time() - began)
    reader.close()
