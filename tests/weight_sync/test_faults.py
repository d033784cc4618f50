"""Whatever process breaks, in whatever state of a sync: an engine answers from a whole version or not at all.

Workers and trainers are processes without vLLM, which can be killed and stopped. They take weights as vLLM's workers do.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.vllm_weights import vllm_boxes
from megarl.platform.messages import peer_lost
from megarl.weight_sync.buckets import Round
from megarl.weight_sync.group import Written
from megarl.weight_sync.manifest import SyncError, SyncSettings, WeightManifest
from megarl.weight_sync.publish import WeightSync
from tests.engine_processes import ANSWER_S, STATES, ProcessEngines, assert_has_all, of_version
from tests.rollout_cases import Publisher, checkpoint, corrupt, corrupt_weights, cut, megatron_shards, save_model
from tests.sync_cases import ThreadEngines

pytestmark = [pytest.mark.sync, pytest.mark.hang]

TRANSPORTS = ["mapped", "group", "two_legs"]
TIMEOUT_S = 2.0  # the test waits for this deadline
PATIENT_S = 60.0  # no test waits for it: a busy machine must not reach it
JOIN_S = 6.0  # the test waits for it, and processes that a busy machine delays must join before it
BUCKET_BYTES = 16384
BREAKDOWNS = [(engine, fault, state) for engine, fault in ((0, "kill"), (0, "stall"), (1, "kill")) for state in STATES]
# CI runs these; the rest runs nightly.
IN_CI = [(0, "kill", "begin"), (0, "kill", "middle"), (0, "kill", "resume"), (0, "stall", "middle"), (1, "kill", "first")]


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


def be_patient_again(publisher: Publisher, engines: ProcessEngines | ThreadEngines) -> None:
    """Use the long deadline for all further attempts: these wait for processes that were just started."""
    pause = engines.pause

    def pause_patiently(version: int, attempt: int, wanted: Sequence[int]) -> list[int]:
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
    return Publisher(model, RolloutLayout(), 2, BUCKET_BYTES, timeout_s, **form_of(transport, 1))


def form_of(transport: str, ranks: int) -> dict[str, Any]:
    """The settings of a transport. In two legs each engine is served by another rank."""
    servers = {"servers": ((0,), (ranks - 1,))} if transport == "two_legs" else {}
    return {"transport": "mapped" if transport == "mapped" else "group"} | servers


def nightly_unless(in_ci: bool) -> Sequence[pytest.MarkDecorator]:
    return () if in_ci else (pytest.mark.nightly,)


@pytest.mark.parametrize(
    ("engine", "fault", "state"), [pytest.param(*case, marks=nightly_unless(case in IN_CI)) for case in BREAKDOWNS]
)
def test_an_engine_that_breaks_is_started_again_and_served(trainer: Trainer, engine: int, fault: str, state: str) -> None:
    engines = trainer.engines
    starts = list(engines.starts)
    starts[engine] += 1
    engines.faults = {engine: (fault, state)}
    # A death is seen at once, unless the engine had not joined its group. Whoever hangs is seen at the deadline, but in the
    # pause before the attempt begins.
    at_once = state == "pause" or (fault == "kill" and state != "begin")
    trainer.publish(PATIENT_S if at_once else TIMEOUT_S)
    trainer.assert_answered_from()
    assert engines.starts == starts, "a healthy engine was given up"
    assert engines.served[0] == (0, 1) and len(engines.served) == (1 if state == "pause" else 2)
    assert state == "pause" or engine in engines.served[1]
    if fault == "kill" and state in ("first", "middle", "last", "commit", "resume"):
        assert engines.served[1] == (engine,), "a healthy engine was served twice"


# Of other buckets and pieces in CI: test_mutations.py and test_mapped.py.
@pytest.mark.parametrize("part", [pytest.param(part, marks=nightly_unless(part == 9)) for part in (0, 9, -1)])
def test_a_corrupt_part_is_never_answered_from(trainer: Trainer, part: int) -> None:
    """The part is a bucket, or a piece of mapped weights."""
    publisher, sync = trainer.publisher, trainer.publisher.sync
    mapped = trainer.transport == "mapped"
    num_parts = len(sync._pieces[0]) if mapped else sync._streams[0].num_buckets
    number = part % num_parts

    def spoil() -> None:
        if mapped:
            corrupt_weights(publisher, trainer.shards, number)
        else:
            corrupt(publisher, times=1, bucket=number)  # of both engines

    with pytest.MonkeyPatch.context() as patch:
        if not mapped:
            sender: Any = sync._sender
            patch.setattr(sender, "send", sender.send)  # is put back
        trainer.publish(PATIENT_S, spoil)
    trainer.assert_answered_from()
    assert trainer.engines.served == [(0, 1), (0, 1)]
    what = "piece" if mapped else "bucket"
    assert any(f"wrong bytes in {what} {number} of {num_parts}" in report for report in trainer.engines.reports)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class AnsweringEngines:
    """The engines, seen from a trainer in its own processes, which dies at a state of the engines."""

    def __init__(self, connections: Sequence[Connection], state: str = "") -> None:
        self._connections, self._state = connections, state

    def ask(self, version: int, engines: Sequence[int]) -> None:
        """`pause` asks."""

    def pause(self, version: int, attempt: int, engines: Sequence[int]) -> list[int]:
        for connection in self._connections:
            connection.send(("pause", None))
            connection.recv()
        if self._state == "pause":
            die()
        return [1] * len(self._connections)

    def begin(self, manifest: WeightManifest) -> None:
        for engine, connection in enumerate(self._connections):
            connection.send(("receive", manifest.as_dict(), engine))

    def finish(self) -> tuple[tuple[int, ...], dict[str, float]]:
        assert self._state == "resume", "the trainer should be dead by now"
        die()
        return (), {}


def dies_at(sync: WeightSync, state: str) -> None:
    """Have this process die at a state of its next sync."""
    target: Any = sync
    if state == "begin":
        setattr(sync._groups, "begin", lambda *arguments: die())  # noqa: B010
    elif state == "commit":
        send = target._send

        def send_and_die(*arguments: Any) -> None:
            send(*arguments)
            die()

        target._send = send_and_die
    elif sync._sender is None:
        if state == "middle":  # all is copied, and no checksum is sent
            start = sync._groups.start

            def start_or_die(call: str, *arguments: Any) -> Any:
                return die() if call == "send" else start(call, *arguments)

            setattr(sync._groups, "start", start_or_die)  # noqa: B010
    else:
        sender: Any = sync._sender
        # The buckets in which this rank has a part.
        parts = sync._streams[0].parts
        buckets = [number for number, of_ranks in enumerate(parts) if sync._rank in {part.source_rank for part in of_ranks}]
        before = {"first": buckets[1], "middle": buckets[len(buckets) // 2], "last": buckets[-1]}
        send_bucket = sender.send

        def send_or_die(entries: Round, written: Sequence[Written]) -> None:
            if any(part.bucket == before.get(state) for part in written):
                die()
            send_bucket(entries, written)

        sender.send = send_or_die


def publish_until_death(
    rank: int,
    layout: Layout,
    store: Path,
    model: Path,
    transport: str,
    state: str,
    version: int,
    connections: Sequence[Connection],
    report: Connection,
) -> None:
    """On a trainer rank. The last rank dies at a state of the sync; another rank reports its error."""
    torch.set_num_threads(1)
    dies, patient = rank == layout.ranks - 1, timedelta(seconds=PATIENT_S)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=layout.ranks, timeout=patient)
    settings = SyncSettings("fp32", RolloutLayout(), 2, BUCKET_BYTES, PATIENT_S, **form_of(transport, layout.ranks))
    sync = WeightSync(ModelShape.from_directory(model), layout, settings, rank, dist.group.WORLD)
    if dies:
        dies_at(sync, state)
    engines = AnsweringEngines(connections, state if dies else "") if rank == 0 else None
    try:
        sync.publish(version, of_version(megatron_shards(model, layout)[rank], version), engines)
        report.send((False, "it went through"))
    except RuntimeError as error:
        report.send((peer_lost(error), str(error)))
    finally:
        sync.close()


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


LAYOUTS = {"alone": Layout(), "in turn": Layout(pipeline=2), "shared": Layout(tensor=2)}
# Mapped weights are copied between "begin" and "middle", where the rank computes its checksums. Of two ranks, which have
# buckets of their own or share every bucket, one dies when it has sent about half.
DEATHS = [
    *(
        (transport, "alone", state)
        for transport in TRANSPORTS
        for state in STATES
        if transport != "mapped" or state not in ("first", "last")
    ),
    *((transport, layout, "middle") for transport in TRANSPORTS for layout in ("in turn", "shared")),
]


@pytest.mark.parametrize(
    ("transport", "ranks", "state"),
    [pytest.param(*case, marks=nightly_unless(case[1] != "shared" and case[2] in ("begin", "middle"))) for case in DEATHS],
)
def test_without_a_trainer_rank_engines_answer_nothing_and_say_who_is_missing(
    model: Path, orphans: ProcessEngines, tmp_path: Path, transport: str, ranks: str, state: str
) -> None:
    """At once, not at a deadline. A rank whose neighbour dies ends at once, too."""
    layout, version = LAYOUTS[ranks], 1 + DEATHS.index((transport, ranks, state))
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    arguments = (layout, tmp_path / "store", model, transport, state, version, orphans.connections, theirs)
    processes = [context.Process(target=publish_until_death, args=(rank, *arguments)) for rank in range(layout.ranks)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(ANSWER_S)
        assert [process.exitcode for process in processes] == [0] * (layout.ranks - 1) + [-signal.SIGKILL]
    finally:
        for process in processes:
            process.kill()
    if layout.ranks > 1:
        lost, error = ours.recv()
        assert lost, error
    reports = ["paused" if state == "pause" else orphans._hear(engine) for engine in (0, 1)]
    for engine, report in enumerate(reports):
        answer = orphans.answer(engine)
        if report == "received":
            # The dead rank had sent all that this engine needs from it.
            assert layout.ranks > 1 or state in ("commit", "resume")
            assert_has_all(answer, version, model)
        elif state == "pause":
            assert answer == report
        else:
            assert state != "resume", report
            assert answer == report and report.startswith("dirty") and "trainer rank" in report
    assert reports != ["received"] * 2 or state in ("commit", "resume")


def test_an_engine_is_served_however_many_others_do_not_come(model: Path) -> None:
    """Later all engines are served: skipped streams move the others to other buckets."""
    shape = ModelShape.from_directory(model)
    publisher = Publisher(model, RolloutLayout(), 4, BUCKET_BYTES, JOIN_S, transport="group")
    engines = ThreadEngines(shape, RolloutLayout(), engines=4, retries=1)
    be_patient_again(publisher, engines)

    def stay_away_once(reader: Any) -> None:
        read = reader.read

        def stay_away(*arguments: Any) -> Any:
            reader.read = read
            raise SyncError("it does something else")

        reader.read = stay_away

    for engine in range(3):
        stay_away_once(engines.readers[engine, 0])
    expected = cut(vllm_boxes(shape, RolloutLayout()), checkpoint(model))[0]
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
