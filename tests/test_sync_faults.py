"""Whatever breaks at whatever state of a sync, an engine answers from a whole version or not at all.

Workers and trainers are processes without vLLM: they take their parts as vLLM's workers do, and can be killed and stopped.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.family import ModelShape
from megarl.reshard.boxes import RolloutLayout
from megarl.reshard.vllm import vllm_segments
from megarl.sync import point_to_point
from megarl.sync.manifest import SyncError, WeightManifest
from megarl.sync.point_to_point import PointToPointSender
from megarl.sync.publish import EngineFacts
from megarl.sync.read import StreamReader
from megarl.sync.transport import SENDER_WAITS
from tests.engine_processes import STATES, ProcessEngines
from tests.rollout_cases import Publisher, checkpoint, corrupt, corrupt_in_place, cut, save_model
from tests.sync_cases import ThreadEngines

pytestmark = [pytest.mark.sync, pytest.mark.hang]

IN_PLACE = "in_place"  # shared memory, where weights that lie still are read without buckets
TRANSPORTS = ["shared_memory", IN_PLACE, "gloo", "cuda_ipc"]
TIMEOUT_S = 1.5  # where a deadline is waited for
PATIENT_S = 60.0  # where none is, a busy machine must not reach it
BUCKET_BYTES = 16384
# Of two engines the first leads where messages travel, and the other one follows. A stall costs its deadline.
BREAKDOWNS = [(0, "kill", state) for state in STATES]
BREAKDOWNS += [(1, "kill", state) for state in ("first", "last", "resume")]
BREAKDOWNS += [(0, "stall", "middle"), (1, "stall", "middle")]
# Where messages travel nobody sees the death of an engine of the same node but at a deadline.
UNSEEN_KILLS = [(0, "begin"), (0, "first"), (0, "middle"), (1, "first")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "llama", False, 1)


@pytest.fixture(scope="module", params=TRANSPORTS)
def trainer(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[Publisher, ProcessEngines]]:
    """A trainer of one rank with two engines that live through all cases; a case begins with version 1 in both."""
    publisher = trainer_of(model, PATIENT_S, request.param)
    engines = ProcessEngines(ModelShape.from_directory(model), 2)
    yield publisher, engines
    engines.close()
    publisher.close()


def trainer_of(model: Path, timeout_s: float, transport: str) -> Publisher:
    in_place = transport == IN_PLACE
    means = "shared_memory" if in_place else transport
    return Publisher(model, RolloutLayout(), 2, BUCKET_BYTES, timeout_s, transport=means, in_place=in_place)


def deadline_s(transport: str, engine: int, fault: str, state: str) -> float:
    """Of a sync with a breakdown."""
    if fault == "stall":
        # The other engine waits twice as long for the trainer as that waits for the one that stalls: time enough for both.
        return 2 * TIMEOUT_S if engine == 1 else TIMEOUT_S
    return TIMEOUT_S if transport == "gloo" and (engine, state) in UNSEEN_KILLS else PATIENT_S


def assert_answers_from(engines: ProcessEngines, version: int, model: Path) -> None:
    expected = cut(vllm_segments(ModelShape.from_directory(model), RolloutLayout()), checkpoint(model))[0]
    for engine in (0, 1):
        answer = engines.answer(engine)
        assert not isinstance(answer, str), answer
        assert answer[0] == version
        for name, content in expected.items():
            rows, cols = content.shape
            assert torch.equal(answer[1][name][:rows, :cols], content), name


@pytest.mark.parametrize(("engine", "fault", "state"), BREAKDOWNS)
def test_an_engine_that_breaks_is_started_again_and_served_alone(
    trainer: tuple[Publisher, ProcessEngines], model: Path, engine: int, fault: str, state: str
) -> None:
    publisher, engines = trainer
    engines.served.clear()
    starts = engines.starts[engine]
    engines.faults = {engine: (fault, state)}
    publisher.set_deadline(deadline_s(publisher.sync._settings.transport, engine, fault, state))
    publisher.publish(2, model, engines)
    assert engines.starts[engine] == starts + 1
    assert engines.served[0] == (0, 1)
    if state != "pause":
        assert engine in engines.served[1]
    if (engine, fault) == (1, "stall"):
        assert engines.served[1] == (1,), "the engine that waited was given up, not the one that stalled"
    assert_answers_from(engines, 2, model)


@pytest.mark.parametrize("bucket", [0, 9, -1])
def test_a_corrupt_bucket_is_never_answered_from(
    trainer: tuple[Publisher, ProcessEngines], model: Path, bucket: int
) -> None:
    publisher, engines = trainer
    engines.served.clear()
    sender = publisher.sync._sender
    send, seal = sender.send, getattr(sender, "seal", None)
    if publisher.in_place:
        corrupt_in_place(publisher, times=1)
    else:
        corrupt(publisher, bucket % publisher.sync._streams[0].num_buckets, times=1)
    publisher.set_deadline(PATIENT_S)
    try:
        publisher.publish(3, model, engines)
    finally:
        sender.send, sender.seal = send, seal  # type: ignore[method-assign,attr-defined]
    assert engines.served == [(0, 1), (0, 1)]
    assert_answers_from(engines, 3, model)


class Told:
    """What a trainer in a process of its own knows the engines by."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections

    def ask(self, version: int, engines: Sequence[int]) -> None:
        """`pause` asks."""

    def pause(self, version: int, attempt: int, engines: Sequence[int]) -> list[EngineFacts]:
        for connection in self._connections:
            connection.send(("pause", None))
            connection.recv()
        return [EngineFacts("here", 1)] * len(self._connections)

    def begin(self, manifest: WeightManifest) -> None:
        for engine, connection in enumerate(self._connections):
            connection.send(("receive", manifest.as_dict(), engine))

    def failed(self) -> Sequence[int]:
        return ()

    def finish(self) -> tuple[tuple[int, ...], dict[str, float]]:
        raise AssertionError("it should be dead by now")


def publish_and_die(model: Path, transport: str, connections: Sequence[Connection], state: str) -> None:
    torch.set_num_threads(1)
    publisher = trainer_of(model, TIMEOUT_S, transport)
    sender, buckets = publisher.sync._sender, publisher.sync._streams[0].num_buckets
    dies_before = {"begin": 0, "first": 1, "middle": buckets // 2, "last": buckets - 1}[state]
    send = sender.send

    def send_or_die(worker: int, bucket: int) -> None:
        if bucket == dies_before:
            os.kill(os.getpid(), signal.SIGKILL)
        send(worker, bucket)

    sender.send = send_or_die  # type: ignore[method-assign]
    if publisher.in_place:
        sender.seal = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[attr-defined]
    publisher.publish(9, model, Told(connections))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_without_a_trainer_rank_engines_answer_nothing_and_say_who_is_missing(model: Path, transport: str) -> None:
    engines = ProcessEngines(ModelShape.from_directory(model), 2)
    context = multiprocessing.get_context("forkserver")
    try:
        for state in ("begin",) if transport == IN_PLACE else ("begin", "first", "middle", "last"):
            process = context.Process(target=publish_and_die, args=(model, transport, engines.connections, state))
            process.start()
            process.join(240)
            assert process.exitcode == -signal.SIGKILL
            for engine in (0, 1):
                report = engines._hear(engine)
                assert report is not None and report.startswith("dirty"), (state, report)
                assert "trainer rank" in report or engine == 1
                assert engines.answer(engine) == report
    finally:
        engines.close()


class LateGroup:
    """Its messages never arrive; it takes all the time that it is given."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock

    def finish(self, work: None, timeout_s: float) -> None:
        assert timeout_s > 0, "no time at all is for ever"
        self._clock[0] += timeout_s
        raise RuntimeError("late")

    def leave(self) -> None: ...


def test_a_rank_waits_once_for_all_engines_that_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an engine that waits for the rank meanwhile gives it up."""
    clock, sender = [0.0], PointToPointSender.__new__(PointToPointSender)
    monkeypatch.setattr(point_to_point.time, "monotonic", lambda: clock[0])
    sender._manifest = SimpleNamespace(timeout_s=TIMEOUT_S)  # type: ignore[assignment]
    sender._groups = {engine: (1, LateGroup(clock)) for engine in range(4)}  # type: ignore[misc]
    sender._sending, sender.lost = [[(engine, "send", None, torch.empty(0)) for engine in range(4)]], {}
    sender._wait(0)
    assert set(sender.lost) == set(range(4))
    assert clock[0] < 1.1 * SENDER_WAITS * TIMEOUT_S


def test_an_engine_is_served_however_many_others_do_not_come(model: Path) -> None:
    shape = ModelShape.from_directory(model)
    publisher = Publisher(model, RolloutLayout(), 4, BUCKET_BYTES, TIMEOUT_S, transport="gloo")
    engines = ThreadEngines(shape, RolloutLayout(), engines=4, retries=1)
    engines.nodes = ["one", "two", "three", "four"]

    def stay_away_once(reader: StreamReader) -> None:
        boxes = reader.boxes

        def stay_away(*arguments: Any, **named: Any) -> Any:
            reader.boxes = boxes  # type: ignore[method-assign]
            raise SyncError("it does something else")

        reader.boxes = stay_away  # type: ignore[assignment]

    for engine in range(3):
        stay_away_once(engines.readers[engine, 0])
    try:
        publisher.publish(1, model, engines)
        assert engines.served == [(0, 1, 2, 3), (0, 1, 2)]
        assert engines.versions == [1] * 4
    finally:
        engines.close()
        publisher.close()
