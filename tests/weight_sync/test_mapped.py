"""Mapped weights: wrong, torn or late weights are refused, and nobody writes while a worker copies."""

from __future__ import annotations

import gc
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.megatron.offload import HostStorages
from megarl.models.layout import RolloutLayout
from megarl.platform import Platform
from megarl.weight_sync import mapped
from megarl.weight_sync.manifest import SyncError
from megarl.weight_sync.mapped import map_parameters, needs_of, obstacle_of, share
from tests.rollout_cases import Publisher, corrupt_weights
from tests.sync_cases import SyncCase, ThreadEngines

pytestmark = pytest.mark.sync

Parameters = dict[str, torch.Tensor]
SMALL = 4096
PATIENT_S = 60.0  # where no test waits for a deadline, a busy machine must not reach it


class Case(SyncCase):
    """The weights of the trainer stay where they are."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, timeout_s=PATIENT_S)
        self.shards = self.publisher.shards(self.models[0])

    def publish(self, model: int, corrupt: Callable[[], None] = lambda: None) -> None:
        """Change the weights in place, as an optimizer does, and publish; `corrupt` comes between."""
        for name, content in self.publisher.shards(self.models[model]).items():
            self.shards[name].copy_(content)
        corrupt()
        self.publisher.publish_shards(self.engines.versions[0] + 1, self.shards, self.engines)

    def assert_refused(self, model: int, message: str, corrupt: Callable[[], None] = lambda: None) -> None:
        """A worker refuses the version for that reason."""
        version = self.engines.versions[0]
        with pytest.raises(SyncError):
            self.publish(model, corrupt)
        assert self.engines.versions == [version]
        messages = [str(reading.exception()) for reading in self.engines._reading.values()]
        assert any(re.search(message, text) for text in messages), messages


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Platform, "piece_bytes", SMALL)  # most boxes are several pieces
        case = Case(tmp_path_factory.mktemp("models"))
        yield case
    case.close()


@pytest.fixture(autouse=True)
def first_version(request: pytest.FixtureRequest) -> None:
    if "case" in request.fixturenames:
        case = request.getfixturevalue("case")
        case.engines.before = lambda engine, worker, boxes: None
        case.publish(0)
        case.assert_taken(0)


def test_workers_map_the_trainers_memory_until_it_moves(case: Case) -> None:
    """It moves when a checkpoint is loaded into new memory."""
    addresses = case.engines._manifest.addresses
    assert addresses and all(tensor.is_shared() for tensor in case.shards.values())
    case.publish(1)
    assert case.engines._manifest.addresses == addresses, "what was shared is shared once"
    for name in case.shards:
        case.shards[name] = case.shards[name].clone()
    case.publish(0)
    case.assert_taken(0)
    assert case.engines._manifest.addresses != addresses


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_a_bit_that_flips_on_the_way_is_seen(case: Case, data: Any) -> None:
    """The ranks hash the right weights, and the workers copy a wrong bit; `test_codec.py` flips every bit."""
    piece = data.draw(st.integers(0, len(case.publisher.sync._pieces[0]) - 1))
    case.assert_refused(1, f"wrong bytes in piece {piece} of", lambda: corrupt_weights(case.publisher, case.shards, piece))


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


def test_an_engine_that_was_given_up_takes_nothing_of_what_it_copied(case: Case) -> None:
    """The engine hangs before its last box, the weights change, and then the engine goes on."""
    publisher = Publisher(case.models[0], engines=2, timeout_s=3.0)
    engines = ThreadEngines(case.shape, RolloutLayout(), engines=2, retries=1)
    last = len(publisher.sync._pieces[0]) - 1

    def stall(engine: int, worker: int, boxes: int) -> None:
        if engine == 1 and boxes == last and len(engines.served) == 1:
            end = time.monotonic() + PATIENT_S
            while 1 not in publisher.sync._groups.lost and time.monotonic() < end:
                time.sleep(0.01)
            publisher.set_deadline(PATIENT_S)

    engines.before = stall
    publisher.publish(1, case.models[0], engines)
    assert engines.served == [(0, 1), (1,)] and engines.versions == [1, 1]
    assert "trainer rank 0" in str(engines.failures[0])
    engines.close()
    publisher.close()


def shared(parameters: Mapping[str, torch.Tensor]) -> str:
    return share(parameters, list(parameters))


def test_what_lies_on_top_of_a_storage_stays_what_it_was_when_it_moves() -> None:
    buffer = torch.arange(64.0)
    parameters = {"a": buffer[:32].view(4, 8), "b": buffer[32:40]}
    place, address = buffer.data_ptr(), shared(parameters)
    assert buffer.data_ptr() != place and buffer.is_shared()
    assert torch.equal(buffer, torch.arange(64.0)) and torch.equal(parameters["a"], torch.arange(32.0).view(4, 8))
    assert shared(parameters) == address, "it moves once"
    home = map_parameters(address, 0)
    buffer[9] = -1.0
    assert torch.equal(home["a"], parameters["a"]) and torch.equal(home["b"], buffer[32:40, None])


def test_too_many_files_and_too_little_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = {"a": torch.zeros(4, 8), "b": torch.zeros(4)}
    needs = needs_of(parameters, ["a", "b"])
    assert needs == (4 * 36, 2) and obstacle_of([needs]) is None
    assert "bytes of shared memory, which has" in str(obstacle_of([(1 << 60, 2)]))
    shared(parameters)
    assert needs_of(parameters, ["a", "b"]) == (0, 2)
    monkeypatch.setattr(mapped, "FILES_SHARE", 1 << 60)
    assert "2 parameters have memory of their own" in str(obstacle_of([needs]))


def test_a_parameter_anywhere_in_an_allocation_is_reached_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's allocator for GPUs has many in one allocation, of which a handle is all that other processes get."""
    allocation, weight = torch.zeros(4096, dtype=torch.uint8), torch.arange(32.0).view(4, 8)
    allocation[512:640] = weight.view(-1).view(torch.uint8)
    address = shared({"a": weight})
    monkeypatch.setattr(Platform, "reach_bytes", lambda platform, handle: allocation[512:640])
    assert torch.equal(map_parameters(address, 0)["a"], weight)


def test_what_leaves_the_device_between_phases_is_not_in_shared_memory() -> None:
    """torch crashes where it is to come back."""
    weight = torch.zeros(4, 8)
    shared({"a": weight})
    with pytest.raises(AssertionError, match="cannot be offloaded"):
        HostStorages(keep=True).offload([weight.untyped_storage()])


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
    address = ours.recv()
    home = map_parameters(address, 3)
    assert home["a"].shape == (4, 8) and bool((home["a"] == 1).all())
    with pytest.raises(SyncError, match="trainer rank 3.* is another file"):
        map_parameters(re.sub(r"(/fd/\d+', )(\d+)", r"\g<1>1\2", address), 3)
    ours.send("let go")
    assert ours.recv() == "gone"
    with pytest.raises(SyncError, match="weights of trainer rank 3"):
        map_parameters(address, 3)
    ours.send("end")
    process.join(60)
    with pytest.raises(SyncError, match="no way to the weights of trainer rank 3.*weight_sync.transport = group"):
        map_parameters(address, 3)
    assert bool((home["a"] == 1).all()), "what is mapped stays"
