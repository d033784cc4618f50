"""How long does a sync take on this machine, by the real code of both ends, each in a process of its own?

Ranks pack and send, workers verify and copy into memory of the sizes of their parameters; no engine runs. Of the simplest
case, one rank to one worker, come the rates of the threads of both ends. They are of processor seconds, but for those who
look again and again while they wait, as in place ranks and workers do: of these the seconds count that they did not wait,
for each of their threads.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tests' rank processes

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.sync_model import Rates
from megarl.models import ModelShape
from megarl.models import megatron_weights as megatron
from megarl.models import vllm_weights as vllm
from megarl.models.layout import Layout, RolloutLayout
from megarl.weight_sync.copies import Box, Works, num_copy_threads
from megarl.weight_sync.in_place import words_of
from megarl.weight_sync.manifest import WeightManifest
from megarl.weight_sync.publish import EngineFacts, SyncSettings, WeightSync
from megarl.weight_sync.read import StreamReader
from megarl.weight_sync.transport import TRANSPORTS
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


class Round(NamedTuple):
    """Of one sync, the seconds from the order to receive until the last worker has all in place, and with one rank and one
    worker the seconds of work behind each rate."""

    seconds: float
    work: Rates


class _Workers:
    """Engines of the trainer's rank 0: a process for each of their workers."""

    def __init__(self, sync: Sync) -> None:
        spawn = multiprocessing.get_context("spawn")
        # (seconds, those of work behind `Rates.receive`, and behind `Rates.place`) of each version, of all workers
        self.ended: list[tuple[float, float, float]] = []
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
        receive_s, place_s = map(sum, zip(*work, strict=True))
        self.ended.append((time.perf_counter() - self._begun, receive_s, place_s))
        return (), {}

    def close(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.send(None)
            process.join(TIMEOUT_S)


def measured(sync: Sync, rounds: int) -> list[Round]:
    """One sync, `rounds` times after one that warms up."""
    return run_ranks(_publish, sync.trainer.ranks, sync, rounds, deadline_s=TIMEOUT_S * rounds)[0]


class InTurns(NamedTuple):
    """What the simplest sync by a transport gave, one rank to one worker, and the sync that was asked for.

    `rates` are medians. `simplest_s` is the lower quartile of its seconds, what the machine can do, and not what it did when
    somebody else was busy: a prediction is a bound. `sync_s` is the median.
    """

    rates: Rates
    simplest_s: float
    sync_s: float


def measured_in_turns(sync: Sync, turns: int = 8, rounds: int = 8) -> InTurns:
    """Both in turns, as a machine that others use too is faster at one time than at another."""
    simple, found = [], []
    for _ in range(turns):
        simple += measured(simplest(sync), rounds)
        found += measured(sync, rounds)
    sizes = vllm.parameter_sizes(sync.shape, RolloutLayout(), 0).values()
    num_bytes = sync.itemsize * sum(rows * columns for rows, columns in sizes)
    works = [statistics.median(works) for works in zip(*(one.work for one in simple), strict=True)]
    rates = Rates(*(num_bytes / work if work else math.inf for work in works))
    return InTurns(rates, quartile([one.seconds for one in simple]), statistics.median(one.seconds for one in found))


def quartile(seconds: Sequence[float]) -> float:
    """The lower quartile of at least two, never outside of what was measured."""
    return statistics.quantiles(seconds, n=4, method="inclusive")[0]


def simplest(sync: Sync) -> Sync:
    """The same from one rank to one worker."""
    return sync._replace(trainer=Layout(), rollout=RolloutLayout(), engines=1)


def _publish(sync: Sync, rounds: int) -> list[Round]:
    """On a rank; on rank 0 what was measured."""
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
    work: list[tuple[float, float]] = []
    try:
        for version in range(1, rounds + 2):
            began, own = time.process_time(), time.thread_time()
            figures = weights.publish(version, parameters, workers)
            own = time.thread_time() - own
            others = time.process_time() - began - own
            in_place = bool(figures["sync/in_place"])
            assert in_place != TRANSPORTS[sync.transport].messages, "no room in /dev/shm: it went through buckets"
            work.append((figures["sync/pack_s"], 0.0) if in_place else (own, others))
    finally:
        if workers is not None:
            workers.close()
        weights.close()
    if workers is None:
        return []
    rounds_of_both = zip(work[1:], workers.ended[1:], strict=True)
    return [Round(seconds, Rates(*of_rank, *of_worker)) for of_rank, (seconds, *of_worker) in rounds_of_both]


@dataclass(frozen=True)
class _Work:
    """A piece that goes to the same place in every version, and is packed by nobody."""

    numbers: tuple[int, ...]
    place: np.ndarray

    def places(self, thread: int) -> list[np.ndarray]:
        return [self.place]

    def copied(self, thread: int) -> None:
        """It is where it is used."""


def _read(connection: Connection, sync: Sync, engine: int, worker: int) -> None:
    torch.set_num_threads(1)
    reader = StreamReader(sync.shape, worker)
    sizes = vllm.parameter_sizes(sync.shape, sync.rollout, worker)
    targets = {name: torch.zeros(size, dtype=DTYPES[sync.itemsize]) for name, size in sizes.items()}
    words = {name: words_of(target) for name, target in targets.items()}

    def works(boxes: Sequence[Box]) -> Works:
        return Works([_Work((number,), box.within(words[box.parameter])) for number, box in enumerate(boxes)])

    connection.send(None)
    while (values := connection.recv()) is not None:
        began, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
        for box in reader.boxes(WeightManifest.from_dict(values), engine, works=works):
            box.within(targets[box.parameter]).copy_(box.content)
        busy = num_copy_threads(sync.rollout.workers) * (time.perf_counter() - began - reader.times.wait_s)
        own = time.thread_time() - own
        others = time.process_time() - cpu - own
        connection.send((others, own) if TRANSPORTS[sync.transport].messages else (0.0, busy))
    reader.close()
