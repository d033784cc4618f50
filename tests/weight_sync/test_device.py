"""Transports whose buckets lie on a device. A file without a name stands in for its memory, and gloo for NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.platform import cuda_stub
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
    """A trainer of one rank with the deadline of the test."""
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
        # The places of the pieces of each stream go to the device at the first sync.
        assert waits.calls == (["to", "to"] if version == 1 else [])
    engines.close()


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
