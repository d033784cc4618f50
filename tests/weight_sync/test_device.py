"""Transports whose buckets lie on a device. A file without a name stands in for its memory, and gloo for NCCL."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.platform import NcclMessages, cuda_stub, messages
from megarl.platform import current as platform
from megarl.recipe.device_section import DEVICE_TRANSPORTS
from megarl.recipe.weight_sync_section import WeightSyncSection
from megarl.weight_sync.transport import TRANSPORTS, choose_transport
from tests.rollout_cases import Publisher, save_model
from tests.sync_cases import ThreadEngines, assert_has_shard

pytestmark = pytest.mark.sync

BUCKET_BYTES = 16384
TIMEOUT_S = 60.0  # a busy machine must not look like an engine that stalls


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [save_model(tmp_path_factory.mktemp("model") / str(seed), "llama", False, seed) for seed in (1, 2)]


@pytest.fixture
def publisher(models: list[Path], request: pytest.FixtureRequest) -> Iterator[Publisher]:
    """With the deadline that a test asks for."""
    timeout_s = getattr(request, "param", TIMEOUT_S)
    publisher = Publisher(models[0], RolloutLayout(2), 2, BUCKET_BYTES, timeout_s, transport="cuda_ipc")
    yield publisher
    publisher.close()


def test_each_engine_can_lead_and_its_buckets_serve_the_others(publisher: Publisher, models: list[Path]) -> None:
    shape = ModelShape.from_directory(models[0])
    engines = ThreadEngines(shape, RolloutLayout(2), engines=2)
    for version, chosen in enumerate(([0, 1], [1], [0, 1], [0]), start=1):
        model = models[version % 2]
        publisher.sync.publish(version, publisher.shards(model), engines, chosen)
        for engine in chosen:
            assert engines.versions[engine] == version
            for worker in (0, 1):
                assert_has_shard(engines.taken[engine, worker], shape, model, RolloutLayout(2), worker, torch.float32)
    engines.close()


def test_a_rank_reads_nothing_of_its_device_however_many_buckets_it_fills(publisher: Publisher, models: list[Path]) -> None:
    shape = ModelShape.from_directory(models[0])
    engines = ThreadEngines(shape, RolloutLayout(2), engines=2)
    shards = publisher.shards(models[0])
    for version in (1, 2):
        with cuda_stub.HostWaits() as waits:
            publisher.sync.publish(version, shards, engines)
        assert len(publisher.sync._sequence) > 10
        # At the first sync where the pieces of each stream lie goes there.
        assert waits.calls == (["to", "to"] if version == 1 else [])
    engines.close()


def fill(handle: bytes) -> None:
    platform.reach_device_bytes(handle).fill_(7)
    platform.settle()


def test_another_process_writes_into_device_memory() -> None:
    """On a machine with a GPU into that one's."""
    memory, handle = platform.shared_device_bytes(1 << 20)
    process = multiprocessing.get_context("spawn").Process(target=fill, args=(handle,))
    process.start()
    process.join(120)
    assert process.exitcode == 0 and bool((memory == 7).all())


@pytest.mark.parametrize(
    ("wanted", "device", "one_host", "separate", "chosen"),
    [
        ("auto", "cpu", True, True, "shared_memory"),
        ("auto", "cpu", False, True, "gloo"),
        ("auto", "cuda", True, False, "cuda_ipc"),
        ("auto", "cuda", True, True, "cuda_ipc"),
        ("auto", "cuda", False, True, "nccl"),
        ("auto", "cuda", False, False, "gloo"),
        ("gloo", "cuda", True, False, "gloo"),
        ("shared_memory", "cuda", True, False, "shared_memory"),
        ("nccl", "cuda", True, True, "nccl"),
        ("cuda_ipc", "cpu", True, False, "needs GPUs"),
        ("nccl", "cpu", False, True, "needs GPUs"),
        ("cuda_ipc", "cuda", False, True, "needs all trainer ranks and engines on one host"),
        ("shared_memory", "cpu", False, False, "needs all trainer ranks and engines on one host"),
    ],
)
def test_a_run_takes_the_transport_that_fits_or_says_why_it_cannot(
    wanted: str, device: str, one_host: bool, separate: bool, chosen: str
) -> None:
    if chosen in TRANSPORTS:
        assert choose_transport(wanted, device, one_host, separate) == chosen
    else:
        with pytest.raises(ValueError, match=f"weight_sync.transport = {wanted} {chosen}.*; use auto"):
            choose_transport(wanted, device, one_host, separate)


def test_the_recipe_offers_every_transport() -> None:
    offered = get_args(WeightSyncSection.model_fields["transport"].annotation)
    assert set(offered) == {"auto", *TRANSPORTS} and set(DEVICE_TRANSPORTS) < set(TRANSPORTS)
    assert all(TRANSPORTS[name].on_device == (name in DEVICE_TRANSPORTS) for name in TRANSPORTS)


class Work:
    """A message that is through when it was looked at so many times."""

    def __init__(self, looks: float) -> None:
        self.looks, self.waited = looks, False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        assert self.looks < 0, "the host went on before the message was through"
        self.waited = True


def test_a_message_over_nccl_is_through_when_the_device_says_so_and_late_at_the_deadline() -> None:
    group = object.__new__(NcclMessages)  # a real one needs a GPU
    work = Work(looks=50)
    group.finish(work, timeout_s=60.0)
    assert work.waited
    with pytest.raises(RuntimeError, match="its partner did not come"):
        group.finish(Work(looks=float("inf")), timeout_s=0.05)


def test_a_machine_that_knows_itself_as_loopback_is_found_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of the store, whose own name may mean 127.0.1.1 there and something else everywhere else."""
    own = {"store": "127.0.1.1", "127.0.1.1": "127.0.1.1", "192.0.2.9": "192.0.2.1"}
    monkeypatch.setattr(messages, "address_towards", own.__getitem__)
    store = dist.HashStore()
    store.set("address-1", "127.0.1.1")
    assert messages._address(store, 0, 2, "store") == "127.0.1.1"
    store.set("address-2", "192.0.2.9")
    assert messages._address(store, 0, 3, "store") == "192.0.2.1"
