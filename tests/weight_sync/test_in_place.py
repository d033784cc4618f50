"""Weights that are read in place: wrong, torn or late weights are refused, and nobody writes while a worker reads."""

from __future__ import annotations

import gc
import multiprocessing
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import wait as wait_for
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.megatron.offload import HostStorages
from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.weight_sync import in_place
from megarl.weight_sync.in_place import Home, Pieces, Place, has_room, private_bytes, share
from megarl.weight_sync.manifest import SyncError, WeightManifest
from megarl.weight_sync.ring import RingSender
from tests.rollout_cases import Publisher, save_model
from tests.sync_cases import ThreadEngines, assert_has_shard

pytestmark = pytest.mark.sync

Parameters = dict[str, torch.Tensor]
SMALL = 4096
PATIENT_S = 60.0  # where no test waits for a deadline, a busy machine must not reach it


class Case(NamedTuple):
    """A trainer of one rank, an engine of two workers without vLLM, and two models of one shape."""

    publisher: Publisher
    engines: ThreadEngines
    models: tuple[Path, Path]
    shards: Parameters

    def publish(self, model: int) -> dict[str, float]:
        """Change the weights in place, as an optimizer does, and publish."""
        for name, content in self.publisher.shards(self.models[model]).items():
            self.shards[name].copy_(content)
        return self.publisher.publish_shards(self.engines.versions[0] + 1, self.shards, self.engines)

    def assert_taken(self, model: int) -> None:
        shape = ModelShape.from_directory(self.models[model])
        for worker in (0, 1):
            taken = self.engines.taken[0, worker]
            assert_has_shard(taken, shape, self.models[model], RolloutLayout(2), worker, torch.float32)

    def assert_refused(self, model: int, message: str) -> None:
        """One worker refuses the version for that reason; the other worker gives up, and either may report first."""
        version = self.engines.versions[0]
        with pytest.raises(SyncError, match=f"{message}|given up: another worker of this engine failed"):
            self.publish(model)
        assert self.engines.versions == [version]
        said = [str(reading.exception()) for reading in self.engines._reading.values()]
        assert any(re.search(message, one) for one in said), said


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return save_model(folder / "first", "llama", False, 0), save_model(folder / "second", "llama", False, 1)


@pytest.fixture(scope="module")
def case(models: tuple[Path, Path]) -> Iterator[Case]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_place, "PIECE_BYTES", SMALL)  # most boxes are several pieces
        publisher = Publisher(models[0], RolloutLayout(2), timeout_s=PATIENT_S, in_place=True)
        engines = ThreadEngines(ModelShape.from_directory(models[0]), RolloutLayout(2))
        yield Case(publisher, engines, models, publisher.shards(models[0]))
    engines.close()
    publisher.close()


@pytest.fixture(autouse=True)
def first_version(request: pytest.FixtureRequest) -> None:
    if "case" in request.fixturenames:
        case = request.getfixturevalue("case")
        case.engines.before = lambda engine, worker, boxes: None
        case.publish(0)
        case.assert_taken(0)


def test_workers_read_the_trainers_own_memory_and_the_next_version_too(case: Case) -> None:
    manifest = case.engines._manifest
    assert manifest.homes and all(tensor.is_shared() for tensor in case.shards.values())
    metrics = case.publish(1)
    case.assert_taken(1)
    assert case.engines._manifest.homes == manifest.homes, "what was shared is shared once"
    assert metrics["sync/received_bytes"] == metrics["sync/bound_bytes"] > 0


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_a_bit_that_flips_on_the_way_is_seen(case: Case, data: Any) -> None:
    """The ranks hash the right weights, and the workers read a wrong bit."""
    sync = case.publisher.sync
    pieces: Pieces = sync._in_place[0]
    place = pieces.at_source(sync._plan, data.draw(st.integers(0, len(pieces) - 1)))
    row = place.row + data.draw(st.integers(0, place.rows - 1))
    col = place.col + data.draw(st.integers(0, place.cols - 1))
    bit = 1 << data.draw(st.integers(0, 30))
    begin, seal = type(sync)._begin, type(sync)._seal
    right: Parameters = {}

    def begin_wrong(*arguments: Any) -> WeightManifest:
        right.update({name: tensor.clone() for name, tensor in case.shards.items()})
        weight = case.shards[place.parameter]
        weight.view(torch.int32).view(weight.shape[0], -1)[row, col] ^= bit
        return begin(sync, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync, "_begin", begin_wrong)
        patch.setattr(sync, "_seal", lambda manifest, parameters: seal(sync, manifest, right))
        case.assert_refused(1, r"wrong bytes in piece \d+ of \d+, model\.|wrong bytes .* lm_head")


@pytest.mark.parametrize("read", [1, 20])
def test_whoever_writes_while_a_worker_reads_is_found(case: Case, read: int) -> None:
    """The worker then has a mixture of old and new weights."""
    new = case.publisher.shards(case.models[1])

    def write(engine: int, worker: int, boxes: int) -> None:
        if worker == 0 and boxes == read:
            for name, content in new.items():
                case.shards[name].copy_(content)

    case.engines.before = write
    case.assert_refused(0, "wrong bytes in piece")


def test_publish_waits_until_every_worker_has_read_all(case: Case) -> None:
    sender = case.publisher.sync._sender
    assert isinstance(sender, RingSender)
    waiting: list[bool] = []

    def late(engine: int, worker: int, boxes: int) -> None:
        if worker == 1 and boxes == 30:
            end = time.monotonic() + PATIENT_S
            while not waiting and time.monotonic() < end:
                time.sleep(0.001)
            time.sleep(0.05)  # time enough to go on, for one that does not wait

    all_read, stream = sender._all_read, type(case.publisher.sync)._stream
    ended: list[list[bool]] = []

    def look(*arguments: Any) -> bool:
        waiting.append(True)
        return all_read(*arguments)

    def stream_and_look(*arguments: Any) -> Any:
        streamed = stream(case.publisher.sync, *arguments)
        counts = [len(pieces) + 1 for pieces in case.publisher.sync._in_place]
        ended.append([int(ring.read[0]) & 0xFFFFFFFF == count for ring, count in zip(sender._rings, counts, strict=True)])
        return streamed

    case.engines.before = late
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sender, "_all_read", look)
        patch.setattr(case.publisher.sync, "_stream", stream_and_look)
        case.publish(1)
    assert ended == [[True, True]]
    case.assert_taken(1)


def test_an_engine_that_was_given_up_takes_nothing_of_what_it_read(models: tuple[Path, Path]) -> None:
    """The engine hangs before its last box, the weights change, and then the engine goes on."""
    publisher = Publisher(models[0], engines=2, timeout_s=3.0, in_place=True)
    engines = ThreadEngines(ModelShape.from_directory(models[0]), RolloutLayout(), engines=2, retries=1)
    sender = publisher.sync._sender
    assert isinstance(sender, RingSender)
    (ring,) = sender._rings

    def stall(engine: int, worker: int, boxes: int) -> None:
        if engine == 1 and boxes == len(publisher.sync._in_place[0]) - 1 and len(engines.served) == 1:
            end = time.monotonic() + PATIENT_S
            while not ring.gone[1] and time.monotonic() < end:
                time.sleep(0.01)
            publisher.set_deadline(PATIENT_S)

    engines.before = stall
    publisher.publish(1, models[0], engines)
    assert engines.served == [(0, 1), (1,)] and engines.versions == [1, 1]
    assert "given up" in str(engines.failures[0])
    engines.close()
    publisher.close()


def shared(parameters: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> str | None:
    names = list(parameters)
    return None if private_bytes(parameters, names, dtype) is None else share(parameters, names)


def test_what_lies_on_top_of_a_storage_stays_what_it_was_when_it_moves() -> None:
    buffer = torch.arange(64.0)
    parameters = {"a": buffer[:32].view(4, 8), "b": buffer[32:40]}
    place, said = buffer.data_ptr(), shared(parameters)
    assert said is not None and buffer.data_ptr() != place and buffer.is_shared()
    assert torch.equal(buffer, torch.arange(64.0)) and torch.equal(parameters["a"], torch.arange(32.0).view(4, 8))
    assert shared(parameters) == said, "it moves once"
    home = Home(said, 0, torch.float32)
    buffer[9] = -1.0
    assert torch.equal(home.box(Place("a", 1, 1, 2, 3)), parameters["a"][1:3, 1:4])
    assert torch.equal(home.box(Place("b", 2, 0, 6, 1)), buffer[34:40, None])


def test_what_cannot_be_read_in_place_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = {"a": torch.zeros(4, 8), "b": torch.zeros(4)}
    assert shared(parameters, torch.bfloat16) is None, "it has to be cast"
    assert shared(MappingProxyType(parameters)) is None, "it may be made anew at each look"
    assert shared(parameters | {"c": torch.zeros(4, device="meta")}) is None
    assert not has_room(1 << 60) and has_room(1)
    monkeypatch.setattr(in_place, "FILES_SHARE", 1 << 60)
    assert shared(parameters) is None, "too many files"
    assert not parameters["a"].is_shared()
    monkeypatch.undo()
    assert shared(parameters) is not None


def test_where_there_is_no_room_for_all_ranks_weights_travel_in_buckets(models: tuple[Path, Path]) -> None:
    publisher = Publisher(models[0], engines=1, in_place=True)
    engines = ThreadEngines(ModelShape.from_directory(models[0]), RolloutLayout())
    asked: list[int] = []

    def none(num_bytes: int) -> bool:
        asked.append(num_bytes)
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megarl.weight_sync.publish.has_room", none)
        metrics = publisher.publish(1, models[0], engines)
    assert metrics["sync/in_place"] == 0.0 and engines.versions == [1]
    assert asked == [private_bytes(shards := publisher.shards(models[0]), list(shards), torch.float32)]
    engines.close()
    publisher.close()


def test_what_leaves_the_device_between_phases_is_not_in_shared_memory() -> None:
    """torch crashes where it is to come back."""
    weight = torch.zeros(4, 8)
    assert shared({"a": weight}) is not None
    with pytest.raises(AssertionError, match="cannot be offloaded"):
        HostStorages(keep=True).offload([weight.untyped_storage()])


def test_a_parameter_of_another_size_ends_the_sync(models: tuple[Path, Path]) -> None:
    publisher = Publisher(models[0], timeout_s=PATIENT_S, in_place=True)
    engines = ThreadEngines(ModelShape.from_directory(models[0]), RolloutLayout())
    shards = publisher.shards(models[0])
    shards["decoder.layers.1.mlp.linear_fc2.weight"] = torch.zeros(3, 3)
    with pytest.raises(
        SyncError, match="failed on rank 0: ValueError: decoder.layers.1.mlp.linear_fc2.weight of .3, 3. does"
    ):
        publisher.publish_shards(1, shards, engines)
    wait_for(engines._reading.values())
    assert all(reading.exception() is not None for reading in engines._reading.values())
    engines.close()
    publisher.close()


def hold(connection: Any) -> None:
    parameters = {"a": torch.ones(4, 8)}
    connection.send(shared(parameters))
    connection.recv()
    del parameters["a"]
    gc.collect()
    connection.send("gone")
    connection.recv()


def test_the_weights_of_another_process_are_reached_until_they_are_gone() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=hold, args=(theirs,))
    process.start()
    said = ours.recv()
    home = Home(said, 3, torch.float32)
    assert bool((home.box(Place("a", 0, 0, 4, 8)) == 1).all())
    with pytest.raises(SyncError, match="is not the weights of trainer rank 3"):
        Home(re.sub(r"(\[\d+, )(\d+)", r"\g<1>1\2", said), 3, torch.float32)
    ours.send("let go")
    assert ours.recv() == "gone"
    with pytest.raises(SyncError, match="weights of trainer rank 3"):
        Home(said, 3, torch.float32)
    ours.send("end")
    process.join(60)
    with pytest.raises(SyncError, match="no way to the weights of trainer rank 3 .*weight_sync.transport = gloo"):
        Home(said, 3, torch.float32)
    assert bool((home.box(Place("a", 0, 0, 4, 8)) == 1).all()), "what is mapped stays"


def test_weights_that_moved_are_looked_up_anew(case: Case) -> None:
    """As after a checkpoint was loaded into new memory."""
    homes = case.engines._manifest.homes
    for name in case.shards:
        case.shards[name] = case.shards[name].clone()
    case.publish(1)
    case.assert_taken(1)
    assert case.engines._manifest.homes != homes and case.publisher.sync._is_kept(case.shards)
