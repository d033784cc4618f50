"""How long does a sync take on this machine, by the real code of both ends, each in a process of its own?

Ranks pack and send, workers verify and copy into memory of the sizes of their parameters; no engine runs. Of the simplest
case, one rank to one worker, come the rates of both ends. In shared memory they are of the seconds that each end spent on
buckets: who waits for one there looks again and again, which costs processor time and is no work. Where messages travel they
are of processor seconds, which count the threads of the network as well.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tests' rank processes

import torch
import torch.distributed as dist

from megarl.family import ModelShape
from megarl.reshard import megatron, vllm
from megarl.reshard.boxes import Layout, RolloutLayout
from megarl.sync.manifest import WeightManifest
from megarl.sync.publish import EngineFacts, SyncSettings, WeightSync
from megarl.sync.read import StreamReader
from megarl.sync.transport import TRANSPORTS
from tests.ranks import run_ranks

DTYPES = {2: torch.bfloat16, 4: torch.float32}
TIMEOUT_S = 120.0


class Sync(NamedTuple):
    """What is measured: a model, how both ends are cut, engines, transport, bytes of a weight and of a bucket."""

    shape: ModelShape
    trainer: Layout
    rollout: RolloutLayout
    engines: int
    transport: str
    itemsize: int
    bucket_bytes: int


class Measured(NamedTuple):
    """The least of all rounds: seconds from the order to receive until the last worker has all in place, and the seconds
    that all ranks and all workers worked."""

    seconds: float
    rank_work: float
    worker_work: float


class _Workers:
    """Engines of the trainer's rank 0: a process for each of their workers."""

    def __init__(self, sync: Sync) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.ended: list[tuple[float, float]] = []  # (seconds, those that all workers worked) of each version
        self._connections, self._processes = [], []
        for engine in range(sync.engines):
            for worker in range(sync.rollout.workers):
                mine, its = spawn.Pipe()
                process = spawn.Process(target=_read, args=(its, sync, engine, worker), daemon=True)
                process.start()
                self._connections.append(mine)
                self._processes.append(process)
        for connection in self._connections:
            connection.recv()  # it has made its memory

    def ask(self, version: int, engines: Sequence[int]) -> None:
        """`pause` asks."""

    def pause(self, version: int, attempt: int, engines: Sequence[int]) -> Sequence[EngineFacts]:
        return [EngineFacts("here", 1) for _ in engines]

    def begin(self, manifest: WeightManifest) -> None:
        self._begun = time.perf_counter()
        for connection in self._connections:
            connection.send(manifest.as_dict())

    def failed(self) -> Sequence[int]:
        return ()

    def finish(self) -> tuple[tuple[int, ...], dict[str, float]]:
        work = [connection.recv() for connection in self._connections]
        self.ended.append((time.perf_counter() - self._begun, sum(work)))
        return (), {}

    def close(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.send(None)
            process.join(TIMEOUT_S)


def measured(sync: Sync, rounds: int = 40) -> Measured:
    """One sync, `rounds` times after one that warms up."""
    answers = run_ranks(_publish, sync.trainer.ranks, sync, rounds, deadline_s=TIMEOUT_S * rounds)
    work, ended = [answer[0] for answer in answers], answers[0][1]
    rank_work = [sum(one) for one in zip(*work, strict=True)]
    return Measured(min(seconds for seconds, _ in ended), min(rank_work), min(seconds for _, seconds in ended))


def measured_rates(
    shape: ModelShape, itemsize: int, bucket_bytes: int, transport: str, rounds: int = 40
) -> tuple[float, float]:
    """(write, read): bytes a second of a rank that packs and checksums, and of a worker that verifies and copies."""
    found = measured(Sync(shape, Layout(), RolloutLayout(), 1, transport, itemsize, bucket_bytes), rounds)
    sizes = vllm.parameter_sizes(shape, RolloutLayout(), 0).values()
    num_bytes = itemsize * sum(rows * columns for rows, columns in sizes)
    return num_bytes / found.rank_work, num_bytes / found.worker_work


def _publish(sync: Sync, rounds: int) -> tuple[list[float], list[tuple[float, float]]]:
    """On a rank: the seconds that it worked in each round, and on rank 0 what `_Workers.ended` says."""
    torch.set_num_threads(1)
    rank, group = int(os.environ["RANK"]), None
    if sync.trainer.ranks > 1:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    sizes = megatron.parameter_sizes(sync.shape, sync.trainer, rank)
    dtype = DTYPES[sync.itemsize]
    parameters = {name: torch.zeros(size, dtype=dtype) for name, size in sizes.items()}
    settings = SyncSettings(dtype, sync.rollout, sync.engines, sync.bucket_bytes, TIMEOUT_S, transport=sync.transport)
    weights = WeightSync(sync.shape, sync.trainer, settings, "rates", rank, group)
    workers = _Workers(sync) if rank == 0 else None
    work = []
    try:
        for version in range(1, rounds + 2):
            began = time.process_time()
            figures = weights.publish(version, parameters, workers)
            spent = time.process_time() - began
            work.append(spent if TRANSPORTS[sync.transport].messages else figures["sync/pack_s"])
    finally:
        if workers is not None:
            workers.close()
        weights.close()
    return work[1:], workers.ended[1:] if workers is not None else []


def _read(connection: Connection, sync: Sync, engine: int, worker: int) -> None:
    torch.set_num_threads(1)
    reader = StreamReader(sync.shape, worker)
    sizes = vllm.parameter_sizes(sync.shape, sync.rollout, worker)
    targets = {name: torch.zeros(size, dtype=DTYPES[sync.itemsize]) for name, size in sizes.items()}
    connection.send(None)
    while (values := connection.recv()) is not None:
        began, cpu = time.perf_counter(), time.process_time()
        for box in reader.boxes(WeightManifest.from_dict(values), engine):
            box.within(targets[box.parameter]).copy_(box.content)
        busy = time.perf_counter() - began - reader.figures.wait_s
        connection.send(time.process_time() - cpu if TRANSPORTS[sync.transport].messages else busy)
    reader.close()
