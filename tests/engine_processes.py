"""Engines without vLLM whose workers are processes, so that they can die and hang at any state of a sync."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.models.vllm_weights import parameter_sizes, vllm_boxes
from megarl.weight_sync.manifest import SyncError, WeightManifest
from megarl.weight_sync.read import WeightReader
from tests.networks import Network
from tests.rollout_cases import checkpoint, cut
from tests.sync_cases import BoxWriter

# Where in a sync a worker can meet its fault.
STATES = ("pause", "begin", "first", "middle", "last", "commit", "resume")
SIGNALS = {"kill": signal.SIGKILL, "stall": signal.SIGSTOP}
CUT = "cut"  # the worker's network is taken down
ANSWER_S = 240.0  # until a worker that lives says something: longer than any deadline of a sync
LOOK_S = 0.05

Fault = tuple[str, str]  # a key of SIGNALS or CUT, and one of STATES
Answer = tuple[int, dict[str, torch.Tensor]]  # version and parameters


class ProcessEngines:
    """What rank 0 knows the engines by; each has one worker. A dead or stopped one is started again."""

    def __init__(self, shape: ModelShape, num_engines: int, networks: Sequence[Network] = ()) -> None:
        """The worker of each engine runs in a network of its own where these are given. It is then a fork of this process,
        which has no threads yet: a rank has no fork server, and to start one takes longer than the test."""
        self._shape, self._networks = shape, networks
        self._context: Any = multiprocessing.get_context("fork" if networks else "forkserver")
        if not networks:
            self._context.set_forkserver_preload(["tests.preload"])
        self._workers: list[Any] = [None] * num_engines
        self.connections: list[Connection] = [None] * num_engines  # type: ignore[list-item]
        self.starts = [0] * num_engines
        self.served: list[tuple[int, ...]] = []
        self.reports: list[str] = []  # of workers that refused a version
        self.faults: dict[int, Fault] = {}  # by engine: what it meets in the next sync
        self._manifest: WeightManifest
        for engine in range(num_engines):
            self._start(engine)

    def ask(self, version: int, engines: Sequence[int]) -> None:
        """`pause` asks."""

    def pause(self, version: int, attempt: int, engines: Sequence[int]) -> list[int]:
        for engine in engines:
            if self._ask(engine, ("pause", self.faults.pop(engine, None))) is None:
                self._start(engine)
                assert self._ask(engine, ("pause", None)) is not None
        return list(self.starts)

    def begin(self, manifest: WeightManifest) -> None:
        self._manifest = manifest
        self.served.append(manifest.engines)
        for engine in manifest.engines:
            self.connections[engine].send(("receive", manifest.as_dict(), engine))

    def finish(self) -> tuple[tuple[int, ...], dict[str, float]]:
        again = []
        for engine in self._manifest.engines:
            report = self._hear(engine)
            if report is None:
                self._start(engine)
            elif report != "received":
                self.reports.append(report)
            if report != "received":
                again.append(engine)
        if len(self.served) > 4:
            raise SyncError("no end to it")
        return tuple(again), {}

    def answer(self, engine: int) -> Answer | str:
        """What an engine would answer from: its version and its parameters, or why it does not."""
        answer = self._ask(engine, ("answer",))
        assert answer is not None, f"engine {engine} says nothing"
        return answer

    def end(self) -> None:
        """Have the workers give back what they hold, and end; `close` kills them."""
        for worker, connection in zip(self._workers, self.connections, strict=True):
            connection.send(("end",))
            worker.join(ANSWER_S)

    def restart(self) -> None:
        for engine in range(len(self._workers)):
            self._start(engine)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join()

    def _start(self, engine: int) -> None:
        if self._workers[engine] is not None:
            self._workers[engine].kill()
            self._workers[engine].join()
        ours, theirs = self._context.Pipe()
        network = self._networks[engine] if self._networks else None
        self._workers[engine] = self._context.Process(target=_serve, args=(theirs, self._shape, network), daemon=True)
        self._workers[engine].start()
        theirs.close()
        self.connections[engine] = ours
        self.starts[engine] += 1
        assert ours.poll(ANSWER_S) and ours.recv() == "started"

    def _ask(self, engine: int, question: tuple[Any, ...]) -> Any:
        self.connections[engine].send(question)
        return self._hear(engine)

    def _hear(self, engine: int) -> Any:
        """What a worker says; None where it is dead or stopped. One that a busy machine holds up is waited for."""
        connection, end = self.connections[engine], time.monotonic() + ANSWER_S
        try:
            while not connection.poll(LOOK_S):
                if self._stopped(engine) or time.monotonic() > end:
                    return None
            return connection.recv()
        except (EOFError, OSError):
            return None

    def _stopped(self, engine: int) -> bool:
        try:
            return psutil.Process(self._workers[engine].pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:  # its end of the connection says so
            return False


def of_version(weights: Mapping[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """Weights that differ from those of every other version, except for zeros."""
    return {name: version * content for name, content in weights.items()}


def assert_has_all(answer: Answer | str, version: int, model: Path) -> None:
    """An engine answers from the weights of this version of a model, and from no others."""
    assert not isinstance(answer, str), answer
    assert answer[0] == version
    expected = cut(vllm_boxes(ModelShape.from_directory(model), RolloutLayout()), checkpoint(model))[0]
    for name, content in of_version(expected, version).items():
        rows, cols = content.shape
        assert torch.equal(answer[1][name][:rows, :cols], content), name


def _serve(connection: Connection, shape: ModelShape, network: Network | None) -> None:
    """A worker: it answers only from a version that it has taken whole, as an engine does."""
    torch.set_num_threads(1)
    if network is not None:
        network.enter()
    reader, refusal, fault = WeightReader(shape, 0), "takes no version yet", None
    # Written to in place, as in vLLM: what a sync leaves out is of an earlier version.
    parameters = {name: torch.zeros(size) for name, size in parameter_sizes(shape, RolloutLayout(), 0).items()}
    version: int | None = None
    connection.send("started")
    while True:
        call, *arguments = connection.recv()
        if call == "answer":
            snapshot = {name: parameter.clone() for name, parameter in parameters.items()}
            connection.send(refusal if version is None else (version, snapshot))
        elif call == "end":
            reader.close()
            return
        elif call == "pause":
            (fault,), version, refusal = arguments, None, "paused"
            _meet(fault, "pause", network)
            connection.send("paused")
        else:
            manifest = WeightManifest.from_dict(arguments[0])
            try:
                _meet(fault, "begin", network)
                _take(reader, manifest, arguments[1], parameters, fault, network)
                _meet(fault, "commit", network)
            except SyncError as error:
                refusal = f"dirty: {error}"
                connection.send(refusal)
                continue
            version = manifest.version
            _meet(fault, "resume", network)
            connection.send("received")


def _take(
    reader: WeightReader,
    manifest: WeightManifest,
    engine: int,
    parameters: dict[str, torch.Tensor],
    fault: Fault | None,
    network: Network | None,
) -> None:
    reader._prepare(manifest)
    boxes = len(reader._stream.copy)
    states = {0: "first", boxes // 2: "middle", boxes - 1: "last"}
    writer = BoxWriter(lambda number: _meet(fault, states.get(number, ""), network), parameters)
    for _ in reader.read(manifest, engine, writer):
        pass


def _meet(fault: Fault | None, state: str, network: Network | None) -> None:
    if fault is None or fault[1] != state:
        return
    if fault[0] == CUT:
        assert network is not None, "no network of its own to take down"
        network.switch("down")
    else:
        os.kill(os.getpid(), SIGNALS[fault[0]])
