"""How long does a sync take on this machine, by the real code of both ends, each in a process of its own?

Ranks pack and send; workers verify and copy into memory of the sizes of their parameters; no engine runs. The rates of the
threads of both ends come from the simplest sync, one rank to one worker: bytes over processor seconds. Where weights are
mapped, threads look again and again while they wait: there the seconds count that a thread did not wait.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tests' rank processes

import torch
import torch.distributed as dist

from benchmarks.sync_model import Rates
from megarl.models import ModelShape
from megarl.models import megatron_weights as megatron
from megarl.models import vllm_weights as vllm
from megarl.models.layout import Layout, RolloutLayout
from megarl.weight_sync.buckets import LocalBox
from megarl.weight_sync.copies import MOST_THREADS, SpareMemory, Works, num_threads
from megarl.weight_sync.manifest import SyncSettings, WeightManifest
from megarl.weight_sync.publish import WeightSync
from megarl.weight_sync.read import WeightReader
from tests.ranks import run_ranks
from tests.sync_cases import BoxWriter

DTYPES = {2: torch.bfloat16, 4: torch.float32}
PRECISIONS = {2: "bf16", 4: "fp32"}
TRANSPORTS = ("mapped", "group", "two_legs")  # in two legs the transport group has servers
TIMEOUT_S = 120.0


class Sync(NamedTuple):
    """What is measured: a model, the layouts of both ends, engines, transport, bytes of a weight and of a bucket."""

    shape: ModelShape
    trainer: Layout
    rollout: RolloutLayout
    engines: int
    transport: str
    itemsize: int
    bucket_bytes: int

    @property
    def servers(self) -> tuple[tuple[int, ...], ...]:
        """The trainer rank that serves each worker, by engine; none where workers receive by themselves."""
        workers, ranks = self.rollout.workers, self.trainer.ranks
        places = [[(engine * workers + worker) % ranks for worker in range(workers)] for engine in range(self.engines)]
        return tuple(map(tuple, places)) if self.transport == "two_legs" else ()

    @property
    def settings(self) -> SyncSettings:
        precision, transport = PRECISIONS[self.itemsize], "mapped" if self.transport == "mapped" else "group"
        form = (precision, self.rollout, self.engines, self.bucket_bytes, TIMEOUT_S)
        return SyncSettings(*form, transport=transport, servers=self.servers)

    def simplest(self, transport: str) -> Sync:
        """The same from one rank to one worker."""
        return self._replace(trainer=Layout(), rollout=RolloutLayout(), engines=1, transport=transport)


class Round(NamedTuple):
    """Seconds of one sync: from the order to receive until the last worker has everything in place; the work of rank 0, of
    its main thread and of its other threads; and the work of all workers, likewise."""

    seconds: float
    write_s: float
    send_s: float
    place_s: float
    receive_s: float


class InTurns(NamedTuple):
    """The rates, seconds of the simplest sync by transport, and seconds of the sync itself.

    Rates and `sync_s` come from medians. `simplest_s` are lower quartiles: what the machine can do, and not what it did
    while other processes were busy, since a prediction is a bound.
    """

    rates: Rates
    simplest_s: dict[str, float]
    sync_s: float


class _Workers:
    """The engines, seen from rank 0: a process for each of their workers."""

    def __init__(self, sync: Sync) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.ended: list[tuple[float, float, float]] = []  # of each version: seconds, `place_s` and `receive_s`
        self._num_engines = sync.engines
        self._connections, self._processes = [], []
        for engine in range(sync.engines):
            for worker in range(sync.rollout.workers):
                connection, theirs = spawn.Pipe()
                process = spawn.Process(target=_read, args=(theirs, sync, engine, worker), daemon=True)
                process.start()
                self._connections.append(connection)
                self._processes.append(process)
        for connection in self._connections:
            connection.recv()  # the process has made its memory

    def ask(self, version: int, engines: Sequence[int]) -> None:
        """`pause` asks."""

    def pause(self, version: int, attempt: int, engines: Sequence[int]) -> Sequence[int]:
        return [1] * self._num_engines

    def begin(self, manifest: WeightManifest) -> None:
        self._begun = time.perf_counter()
        for connection in self._connections:
            connection.send(manifest.as_dict())

    def finish(self) -> tuple[tuple[int, ...], dict[str, float]]:
        work = [connection.recv() for connection in self._connections]
        place_s, receive_s = map(sum, zip(*work, strict=True))
        self.ended.append((time.perf_counter() - self._begun, place_s, receive_s))
        return (), {}

    def close(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.send(None)
            process.join(TIMEOUT_S)


def measured(sync: Sync, rounds: int) -> list[Round]:
    """One sync, `rounds` times after a first one that warms up."""
    return run_ranks(_publish, sync.trainer.ranks, sync, rounds, deadline_s=TIMEOUT_S * rounds)[0]


def measured_in_turns(sync: Sync, turns: int = 8, rounds: int = 8) -> InTurns:
    """Measure the sync and the simplest sync in turns: a machine that others use too is not always as fast."""
    # In two legs one rank has no network: its rates come from `group`, and two legs add the copies of its own part.
    transports = ("group", "two_legs") if sync.transport == "two_legs" else (sync.transport,)
    simplest: dict[str, list[Round]] = {transport: [] for transport in transports}
    synced: list[Round] = []
    for _ in range(turns):
        for transport, of_transport in simplest.items():
            of_transport += measured(sync.simplest(transport), rounds)
        synced += measured(sync, rounds)
    sizes = vllm.parameter_sizes(sync.shape, RolloutLayout(), 0).values()
    num_bytes = sync.itemsize * sum(rows * columns for rows, columns in sizes)
    works = list(zip(*simplest[transports[0]], strict=True))[1:]
    write_s, send_s, place_s, receive_s = map(statistics.median, works)
    copy_s = statistics.median(times.write_s for times in simplest[transports[-1]]) - write_s
    seconds = (write_s, send_s, receive_s, place_s, copy_s)
    rates = Rates(*(num_bytes / work_s if work_s > 0 else math.inf for work_s in seconds))
    quartiles = {transport: quartile([times.seconds for times in rounds_of]) for transport, rounds_of in simplest.items()}
    return InTurns(rates, quartiles, statistics.median(times.seconds for times in synced))


def quartile(seconds: Sequence[float]) -> float:
    """The lower quartile of at least two, never outside of what was measured."""
    return statistics.quantiles(seconds, n=4, method="inclusive")[0]


def _publish(sync: Sync, rounds: int) -> list[Round]:
    """On a rank; on rank 0 what was measured."""
    torch.set_num_threads(1)
    rank, group = int(os.environ["RANK"]), None
    if sync.trainer.ranks > 1:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    sizes, dtype = megatron.parameter_sizes(sync.shape, sync.trainer, rank), DTYPES[sync.itemsize]
    parameters = {name: torch.zeros(size, dtype=dtype) for name, size in sizes.items()}
    maps = sync.transport == "mapped"
    weights = WeightSync(sync.shape, sync.trainer, sync.settings, rank, group)
    workers = _Workers(sync) if rank == 0 else None
    work: list[tuple[float, float]] = []
    try:
        for version in range(1, rounds + 2):
            process_s, thread_s = time.process_time(), time.thread_time()
            metrics = weights.publish(version, parameters, workers)
            thread_s = time.thread_time() - thread_s
            process_s = time.process_time() - process_s
            work.append((metrics["sync/pack_s"], 0.0) if maps else (thread_s, process_s - thread_s))
    finally:
        if workers is not None:
            workers.close()
        weights.close()
    if workers is None:
        return []
    return [Round(ended[0], *of_rank, *ended[1:]) for of_rank, ended in zip(work[1:], workers.ended[1:], strict=True)]


class _Writer(BoxWriter):
    """Writes into parameters that are there; each mapped piece is a work of its own, for as many threads as in a run."""

    def works(self, boxes: Sequence[LocalBox], bucket_bytes: int) -> Works:
        return Works([[number] for number in range(len(boxes))], MOST_THREADS)

    def place(self, box: LocalBox, spare: SpareMemory | None = None) -> torch.Tensor:
        return box.within(self.parameters[box.parameter])


def _read(connection: Connection, sync: Sync, engine: int, worker: int) -> None:
    torch.set_num_threads(1)
    reader = WeightReader(sync.shape, worker)
    sizes = vllm.parameter_sizes(sync.shape, sync.rollout, worker)
    writer = _Writer(parameters={name: torch.zeros(size, dtype=DTYPES[sync.itemsize]) for name, size in sizes.items()})
    threads = num_threads(writer.works([], 0), sync.rollout.workers)
    connection.send(None)
    while (values := connection.recv()) is not None:
        began, process_s, thread_s = time.perf_counter(), time.process_time(), time.thread_time()
        for _ in reader.read(WeightManifest.from_dict(values), engine, writer):
            pass
        busy_s = threads * (time.perf_counter() - began - reader.times.verify_wait_s)
        thread_s = time.thread_time() - thread_s
        process_s = time.process_time() - process_s
        connection.send((busy_s, 0.0) if sync.transport == "mapped" else (thread_s, process_s - thread_s))
    reader.close()
