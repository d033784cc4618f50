"""Whatever process breaks, in whatever state of a sync: an engine answers from a whole version or not at all.

Workers and trainers are processes without vLLM, which can be killed and stopped. They take weights as vLLM's workers do.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.vllm_weights import vllm_segments
from megarl.platform.messages import peer_lost
from megarl.weight_sync.manifest import SyncError, WeightManifest
from megarl.weight_sync.publish import EngineFacts, SyncSettings, WeightSync
from megarl.weight_sync.read import StreamReader
from megarl.weight_sync.ring import RingSender
from tests.engine_processes import ANSWER_S, SIGNALS, STATES, Answer, ProcessEngines
from tests.rollout_cases import Publisher, checkpoint, corrupt, corrupt_weights, cut, megatron_shards, save_model
from tests.sync_cases import ThreadEngines

pytestmark = [pytest.mark.sync, pytest.mark.hang]

IN_PLACE = "in_place"  # shared memory without buckets
TRANSPORTS = ["shared_memory", IN_PLACE, "gloo", "cuda_ipc"]
TIMEOUT_S = 1.5  # the test waits for this deadline
STALL_S = 3.0  # the test waits for it, and the healthy engine must not reach its own deadline, which is twice as late
PATIENT_S = 60.0  # no test waits for it: a busy machine must not reach it
MEETING_S = 6.0  # the test waits for it, and processes that a busy machine delays must meet before it
DEATH_S = {"gloo": PATIENT_S}  # a trainer dies: its meeting takes long on a busy machine, and its end is seen at once
NEIGHBOUR_S = 4.0  # a rank's neighbour dies: the rank waits so long for an engine, and twice as long for the neighbour
BUCKET_BYTES = 16384
# Engine 0 leads where messages travel and where the buckets are in its memory; engine 1 follows.
BREAKDOWNS = [(0, fault, state) for fault in SIGNALS for state in STATES]
BREAKDOWNS += [(1, "kill", state) for state in ("first", "last", "resume")]
BREAKDOWNS += [(1, "stall", "middle")]
# CI runs a kill in most states and two stalls; the rest runs nightly.
IN_CI = [(0, "kill", state) for state in ("pause", "begin", "middle", "commit", "resume")]
IN_CI += [(0, "stall", "begin"), (0, "stall", "middle"), (1, "kill", "first"), (1, "stall", "middle")]
# States in which the leading engine takes the other engine along.
TOGETHER = {"gloo": ("begin", "first", "middle"), "cuda_ipc": ("begin",)}
# Deaths of an engine of the same node that are only seen at a deadline, where messages travel.
UNSEEN_KILLS = [(0, "begin"), (0, "first"), (0, "middle"), (1, "first")]


class Trainer:
    """A trainer of one rank with two engines that live through all cases. Each version has new weights in the same memory,
    so that stale weights in an engine are seen."""

    def __init__(self, model: Path, transport: str) -> None:
        self.transport, self.model = transport, model
        self.publisher = trainer_of(model, PATIENT_S, transport)
        self.engines = ProcessEngines(ModelShape.from_directory(model), 2)
        be_patient_again(self.publisher, self.engines)
        self.shards = self.publisher.shards(model)
        self.version = 0
        self._first = self.publisher.shards(model)
        self.publish(PATIENT_S)

    def publish(self, timeout_s: float, corrupt: Callable[[], None] = lambda: None) -> None:
        """Publish the next version; `timeout_s` holds for its first attempt. `corrupt` follows once its weights are set."""
        self.version += 1
        for name, content in of_version(self._first, self.version).items():
            self.shards[name].copy_(content)
        corrupt()
        self.engines.served.clear()
        self.engines.reports.clear()
        self.publisher.set_deadline(timeout_s)
        self.publisher.publish_shards(self.version, self.shards, self.engines)

    def assert_answered_from(self) -> None:
        """Both engines hold the last version, and nothing else."""
        for engine in (0, 1):
            assert_has_all(self.engines.answer(engine), self.version, self.model)

    def close(self) -> None:
        self.engines.close()
        self.publisher.close()


def of_version(weights: Mapping[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """Weights that differ from those of every other version, except for zeros."""
    return {name: version * content for name, content in weights.items()}


def be_patient_again(publisher: Publisher, engines: ProcessEngines | ThreadEngines) -> None:
    """Use the long deadline for all further attempts: these wait for processes that were just started."""
    pause = engines.pause

    def pause_patiently(version: int, attempt: int, wanted: Sequence[int]) -> list[EngineFacts]:
        if attempt > 1:
            publisher.set_deadline(PATIENT_S)
        return pause(version, attempt, wanted)

    engines.pause = pause_patiently  # type: ignore[assignment,method-assign]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "llama", False, 1)


@pytest.fixture(scope="module", params=TRANSPORTS)
def trainer(request: pytest.FixtureRequest, model: Path) -> Iterator[Trainer]:
    trainer = Trainer(model, request.param)
    yield trainer
    trainer.close()


def trainer_of(model: Path, timeout_s: float, transport: str) -> Publisher:
    in_place = transport == IN_PLACE
    means = "shared_memory" if in_place else transport
    return Publisher(model, RolloutLayout(), 2, BUCKET_BYTES, timeout_s, transport=means, in_place=in_place)


def assert_has_all(answer: Answer | str, version: int, model: Path) -> None:
    assert not isinstance(answer, str), answer
    assert answer[0] == version
    expected = cut(vllm_segments(ModelShape.from_directory(model), RolloutLayout()), checkpoint(model))[0]
    for name, content in of_version(expected, version).items():
        rows, cols = content.shape
        assert torch.equal(answer[1][name][:rows, :cols], content), name


def deadline_s(transport: str, engine: int, fault: str, state: str) -> float:
    """The deadline of a sync with a fault."""
    missed_s = TIMEOUT_S if are_together(transport, engine, state) else STALL_S
    if fault == "kill":
        return missed_s if transport == "gloo" and (engine, state) in UNSEEN_KILLS else PATIENT_S
    # Nobody misses the last bucket of an engine: rank 0 waits for the engine's report.
    if state not in ("begin", "first", "middle") and (transport, state) != (IN_PLACE, "last"):
        return PATIENT_S
    # The other engine waits twice as long for the trainer as the trainer waits for the stalled engine: enough for both.
    return missed_s


def are_together(transport: str, engine: int, state: str) -> bool:
    """Whether the engine that breaks takes the other engine along: both are served again, at either deadline."""
    return engine == 0 and state in TOGETHER.get(transport, ())


def nightly_unless(in_ci: bool) -> Sequence[pytest.MarkDecorator]:
    return () if in_ci else (pytest.mark.nightly,)


@pytest.mark.parametrize(
    ("engine", "fault", "state"), [pytest.param(*case, marks=nightly_unless(case in IN_CI)) for case in BREAKDOWNS]
)
def test_an_engine_that_breaks_is_started_again_and_served_alone(
    trainer: Trainer, engine: int, fault: str, state: str
) -> None:
    engines = trainer.engines
    starts = list(engines.starts)
    starts[engine] += 1
    engines.faults = {engine: (fault, state)}
    trainer.publish(deadline_s(trainer.transport, engine, fault, state))
    trainer.assert_answered_from()
    assert engines.starts == starts, "a healthy engine was given up"
    again = (0, 1) if are_together(trainer.transport, engine, state) else (engine,)
    assert engines.served == ([(0, 1)] if state == "pause" else [(0, 1), again])


@pytest.mark.parametrize("part", [0, 9, -1])
def test_a_corrupt_part_is_never_answered_from(trainer: Trainer, part: int) -> None:
    """The part is a bucket, or a piece where weights are read in place."""
    publisher = trainer.publisher
    sync, sender = publisher.sync, publisher.sync._sender
    room, send = sender.room, sender.send
    num_parts = len(sync._in_place[0]) if publisher.in_place else sync._streams[0].num_buckets
    number = part % num_parts

    def spoil() -> None:
        if publisher.in_place:
            corrupt_weights(publisher, trainer.shards, number)
        else:
            corrupt(publisher, number, times=1)

    try:
        trainer.publish(PATIENT_S, spoil)
    finally:
        sender.room, sender.send = room, send  # type: ignore[method-assign]
    trainer.assert_answered_from()
    assert trainer.engines.served == [(0, 1), (0, 1)]
    what = "piece" if publisher.in_place else "bucket"
    assert any(f"wrong bytes in {what} {number} of {num_parts}" in report for report in trainer.engines.reports)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Told:
    """The engines, seen from a trainer in its own processes, which dies at a state of the engines."""

    def __init__(self, connections: Sequence[Connection], state: str = "") -> None:
        self._connections, self._state = connections, state

    def ask(self, version: int, engines: Sequence[int]) -> None:
        """`pause` asks."""

    def pause(self, version: int, attempt: int, engines: Sequence[int]) -> list[EngineFacts]:
        for connection in self._connections:
            connection.send(("pause", None))
            connection.recv()
        if self._state == "pause":
            die()
        return [EngineFacts("here", 1)] * len(self._connections)

    def begin(self, manifest: WeightManifest) -> None:
        for engine, connection in enumerate(self._connections):
            connection.send(("receive", manifest.as_dict(), engine))

    def failed(self) -> Sequence[int]:
        return ()

    def finish(self) -> tuple[tuple[int, ...], dict[str, float]]:
        assert self._state == "resume", "the trainer should be dead by now"
        die()
        return (), {}


def dies_at(sync: WeightSync, state: str, in_place: bool) -> None:
    """Have this process die at a state of its next sync."""
    sender: Any = sync._sender
    # The buckets in which this rank has a part.
    buckets = [number for number, parts in enumerate(sync._streams[0].parts) if sync._rank in {p.source_rank for p in parts}]
    before = {"begin": buckets[0], "first": buckets[1], "middle": buckets[len(buckets) // 2], "last": buckets[-1]}
    send = sender.send

    def send_or_die(worker: int, bucket: int) -> None:
        if bucket == before.get(state):
            die()
        send(worker, bucket)

    sender.send = send_or_die
    if state == "commit":
        setattr(sender, "wait_read" if in_place else "finish", lambda *arguments: die())
    elif in_place and state in ("begin", "middle"):
        setattr(sender, {"begin": "begin", "middle": "seal"}[state], lambda *arguments: die())


def wait_for_engines(sync: WeightSync, timeout_s: float) -> None:
    """Set how long this rank waits for an engine in shared memory; engines keep the sync's deadline."""
    if isinstance(sync._sender, RingSender):
        sync._sender._timeout_s = timeout_s


def publish_and_die(model: Path, transport: str, connections: Sequence[Connection], state: str, version: int) -> None:
    torch.set_num_threads(1)
    # Everything was sent by then, so nobody waits for a deadline.
    timeout_s = PATIENT_S if state in ("commit", "resume") else DEATH_S.get(transport, TIMEOUT_S)
    publisher = trainer_of(model, timeout_s, transport)
    wait_for_engines(publisher.sync, PATIENT_S)
    dies_at(publisher.sync, state, publisher.in_place)
    publisher.publish_shards(version, of_version(publisher.shards(model), version), Told(connections, state))


@pytest.fixture(scope="module")
def survivors(model: Path) -> Iterator[ProcessEngines]:
    engines = ProcessEngines(ModelShape.from_directory(model), 2)
    yield engines
    engines.close()


@pytest.fixture
def orphans(request: pytest.FixtureRequest, survivors: ProcessEngines) -> Iterator[ProcessEngines]:
    """Engines that outlive their trainers. A failed test may leave reports unread: the next test gets new engines."""
    failed = request.session.testsfailed
    yield survivors
    if request.session.testsfailed > failed:
        survivors.restart()


# In place, workers read everything between "begin" and "middle", where the rank makes its checksums.
DEATHS = [
    (transport, state)
    for transport in TRANSPORTS
    for state in STATES
    if transport != IN_PLACE or state not in ("first", "last")
]


@pytest.mark.parametrize(
    ("transport", "state"),
    [pytest.param(*case, marks=nightly_unless(case[1] in ("begin", "middle", "commit"))) for case in DEATHS],
)
def test_without_a_trainer_rank_engines_answer_nothing_and_say_who_is_missing(
    model: Path, orphans: ProcessEngines, transport: str, state: str
) -> None:
    version = 1 + DEATHS.index((transport, state))
    context = multiprocessing.get_context("forkserver")
    arguments = (model, transport, orphans.connections, state, version)
    process = context.Process(target=publish_and_die, args=arguments)
    process.start()
    process.join(ANSWER_S)
    assert process.exitcode == -signal.SIGKILL
    for engine in (0, 1):
        report = "paused" if state == "pause" else orphans._hear(engine)
        answer = orphans.answer(engine)
        if state in ("commit", "resume") and (transport != "gloo" or report == "received"):
            # Everything was sent. Messages under way at the death may be lost, and then the engine answers nothing.
            assert report == "received"
            assert_has_all(answer, version, model)
        elif state == "pause":
            assert answer == report
        else:
            assert answer == report and report.startswith("dirty")
            led = transport == "gloo" and engine == 1
            # Rank 0 may die while engine 0 still joins the group: then the report names the group that failed.
            missing = "engine 0, which leads" if led else "trainer rank 0"
            joining = "no group of the trainer ranks and engine 0"
            assert missing in report or (transport == "gloo" and not led and joining in report), report


# Ranks with buckets of their own, and ranks that share every bucket: then the living rank gives up the engines first.
IN_TURN, BESIDE = Layout(pipeline=2), Layout(tensor=2)


def publish_beside_one_that_dies(
    rank: int,
    layout: Layout,
    store: Path,
    model: Path,
    transport: str,
    connections: Sequence[Connection],
    said: Connection,
    version: int,
) -> None:
    """One of two ranks. Rank 1 dies when it has sent about half, and rank 0 reports what it saw."""
    torch.set_num_threads(1)
    address, patient = f"file://{store}", timedelta(seconds=PATIENT_S)
    dist.init_process_group("gloo", address, rank=rank, world_size=layout.ranks, timeout=patient)
    in_place = transport == IN_PLACE
    means = "shared_memory" if in_place else transport
    timeout_s = DEATH_S.get(transport, TIMEOUT_S)
    settings = SyncSettings(torch.float32, RolloutLayout(), 2, BUCKET_BYTES, timeout_s, transport=means)
    sync = WeightSync(ModelShape.from_directory(model), layout, settings, "test", rank, dist.group.WORLD)
    own = of_version(megatron_shards(model, layout)[rank], version)
    if rank == 1:
        wait_for_engines(sync, PATIENT_S)
        dies_at(sync, "middle", in_place)
    elif layout == IN_TURN:
        wait_for_engines(sync, NEIGHBOUR_S)
    try:
        sync.publish(version, own if in_place else MappingProxyType(own), Told(connections) if rank == 0 else None)
        said.send((False, "it went through"))
    except RuntimeError as error:
        said.send((peer_lost(error), str(error)))
    finally:
        sync.close()


@pytest.mark.parametrize(
    ("transport", "layout"),
    [
        pytest.param(
            transport, layout, id=f"{transport}-{name}", marks=nightly_unless(layout == IN_TURN or transport == "gloo")
        )
        for transport in TRANSPORTS
        for name, layout in (("in_turn", IN_TURN), ("beside", BESIDE))
    ],
)
def test_a_rank_whose_neighbour_dies_loses_its_peer_and_no_engine_answers(
    model: Path, orphans: ProcessEngines, tmp_path: Path, transport: str, layout: Layout
) -> None:
    """At the deadline of the sync; the deadline of the ranks' own group is much later."""
    version = 1 + len(DEATHS) + 2 * TRANSPORTS.index(transport) + layout.tensor
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    arguments = (layout, tmp_path / "store", model, transport, orphans.connections, theirs, version)
    ranks = [context.Process(target=publish_beside_one_that_dies, args=(rank, *arguments)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    try:
        assert ours.poll(ANSWER_S), "rank 0 goes on waiting"
        lost, error = ours.recv()
        assert lost, error
        for process in ranks:
            process.join(ANSWER_S)
        assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL]
    finally:
        for process in ranks:
            process.kill()
    reports = [orphans._hear(engine) for engine in (0, 1)]
    # Rank 0 ends too: one of its messages may be the first that does not come.
    missing = "trainer rank" if transport == "gloo" else "trainer rank 1"
    for engine, report in enumerate(reports):
        assert report is not None and report.startswith("dirty")
        assert orphans.answer(engine) == report
        led = transport == "gloo" and engine == 1
        who = "engine 0, which leads" if led else missing
        assert who in report or (layout is BESIDE and "given up" in report), report


def test_engines_meet_trainers_that_come_after_others(model: Path) -> None:
    """New trainers count their meetings from the first again."""
    engines = ThreadEngines(ModelShape.from_directory(model), RolloutLayout(), engines=2)
    try:
        for version in (1, 2):
            publisher = Publisher(model, RolloutLayout(), 2, BUCKET_BYTES, MEETING_S, transport="gloo")
            publisher.publish(version, model, engines)
            publisher.close()
            assert engines.versions == [version] * 2
    finally:
        engines.close()


def test_an_engine_is_served_however_many_others_do_not_come(model: Path) -> None:
    """Later all engines are served: skipped streams move the others to other buckets."""
    shape = ModelShape.from_directory(model)
    publisher = Publisher(model, RolloutLayout(), 4, BUCKET_BYTES, MEETING_S, transport="gloo")
    engines = ThreadEngines(shape, RolloutLayout(), engines=4, retries=1)
    engines.nodes = ["one", "two", "three", "four"]
    be_patient_again(publisher, engines)

    def stay_away_once(reader: StreamReader) -> None:
        boxes = reader.boxes

        def stay_away(*arguments: Any, **named: Any) -> Any:
            reader.boxes = boxes  # type: ignore[method-assign]
            raise SyncError("it does something else")

        reader.boxes = stay_away  # type: ignore[assignment]

    for engine in range(3):
        stay_away_once(engines.readers[engine, 0])
    expected = cut(vllm_segments(shape, RolloutLayout()), checkpoint(model))[0]
    try:
        for version in (1, 2):
            publisher.publish_shards(version, of_version(publisher.shards(model), version), engines)
            assert engines.versions == [version] * 4
            for name, content in of_version(expected, version).items():
                rows, cols = content.shape
                assert all(torch.equal(taken[name][:rows, :cols], content) for taken in engines.taken.values()), name
        assert engines.served == [(0, 1, 2, 3), (0, 1, 2), (0, 1, 2, 3)]
    finally:
        engines.close()
        publisher.close()
