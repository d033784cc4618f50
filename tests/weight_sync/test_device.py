"""Which transport a run takes, and that neither end waits for a device more than once a version."""

from __future__ import annotations

import mmap
import re
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from megarl.cluster.engine_nodes import servers_of
from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.planner.placement import EnginePlace, PlacementError, choose_transport
from megarl.platform import Platform
from megarl.recipe.weight_sync_section import WeightSyncSection
from megarl.weight_sync.buckets import LocalBox
from megarl.weight_sync.checks import device_checksum
from tests.rollout_cases import Publisher, save_model
from tests.sync_cases import BoxWriter, ThreadEngines

pytestmark = pytest.mark.sync


class HostWaits(torch.overrides.TorchFunctionMode):
    """Collects in `calls` the operations of this thread that would make the host wait for a GPU: operations that read values
    (`item`, `tolist`, `cpu`, `nonzero`, a tensor as a condition, ...) or copy pageable memory to a device."""

    READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "unique",
             "masked_select")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        is_made = name in ("tensor", "as_tensor") and kwargs.get("device") is not None
        is_moved = name == "to" and len(args) > 1 and isinstance(args[1], torch.device) and not kwargs.get("non_blocking")
        if name in self.READS or is_made or is_moved:
            self.calls.append(name)
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    ("wanted", "one_host", "obstacle", "no_peer_access", "name", "reason"),
    [
        ("auto", True, None, None, "mapped", "trainer ranks and engines share one host"),
        ("auto", False, None, None, "group", "trainer ranks and engines are on several hosts"),
        ("auto", True, "adapters are merged", None, "group", "adapters are merged"),
        ("auto", True, None, (1, 3), "group", r"GPUs 1 and 3 cannot reach each other's memory \(no peer access\)"),
        ("mapped", True, None, None, "mapped", "weight_sync.transport says so"),
        ("group", True, None, None, "group", "weight_sync.transport says so"),
        ("group", False, "adapters are merged", (1, 3), "group", "weight_sync.transport says so"),
        ("mapped", False, None, None, None, "trainer ranks and engines are on several hosts"),
        ("mapped", True, "adapters are merged", None, None, "adapters are merged"),
        ("mapped", True, None, (1, 3), None, "GPUs 1 and 3 cannot reach each other's memory"),
    ],
)
def test_a_run_takes_the_transport_that_fits_or_says_why_it_cannot(
    wanted: str, one_host: bool, obstacle: str | None, no_peer_access: tuple[int, int] | None, name: str | None, reason: str
) -> None:
    """Only where the recipe leaves the choice may a lack of shared memory change it."""
    assert wanted in get_args(WeightSyncSection.model_fields["transport"].annotation)
    if name is None:
        with pytest.raises(PlacementError, match=f"^weight_sync.transport = {wanted}: {reason}.*; use auto$"):
            choose_transport(wanted, one_host, obstacle, no_peer_access)
    else:
        transport = choose_transport(wanted, one_host, obstacle, no_peer_access)
        assert transport.name == name and re.search(reason, transport.reason)
        assert transport.is_final == (wanted != "auto" or name == "group")


@pytest.mark.parametrize(
    ("engines", "ranks", "servers"),
    [
        ([(0, (0, 1)), (0, (2, 3)), (1, (0, 1)), (1, (2, 3))], 8, ((0, 1), (2, 3), (4, 5), (6, 7))),
        ([(1, (3,)), (0, (2,))], 8, ((7,), (2,))),
        ([(0, (0,)), (2, (0,))], 8, ()),  # no trainer rank is on node 2
    ],
)
def test_a_worker_is_served_by_the_trainer_rank_on_its_device(
    engines: list[tuple[int, tuple[int, ...]]], ranks: int, servers: tuple[tuple[int, ...], ...]
) -> None:
    assert servers_of([EnginePlace(*engine) for engine in engines], ranks, ranks_per_node=4) == servers


class UnthreadedWriter(BoxWriter):
    """Writes box after box, as a worker on a GPU does."""

    def __init__(self, before: Any) -> None:
        super().__init__(before, parameters={})

    def works(self, boxes: Sequence[LocalBox], bucket_bytes: int) -> None:  # type: ignore[override]
        return None


def test_workers_on_gpus_map_no_weights_between_two_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer rank that offloads its weights frees them after each sync, and CUDA frees nothing that others map."""
    monkeypatch.setattr(Platform, "settle", lambda platform: None)
    monkeypatch.setattr("megarl.weight_sync.read.platform", Platform("cuda", "nccl", "local"))
    mapped: list[weakref.ref[mmap.mmap]] = []

    class Noted(mmap.mmap):
        def __init__(self, *_: Any) -> None:
            mapped.append(weakref.ref(self))

    monkeypatch.setattr("megarl.platform.device_memory.mmap.mmap", Noted)
    model = save_model(tmp_path, "llama", False, 1)
    publisher = Publisher(model)
    engines = ThreadEngines(ModelShape.from_directory(model), RolloutLayout())
    for version in (1, 2):
        publisher.publish(version, model, engines)
        assert mapped and all(storage() is None for storage in mapped)
    engines.close()
    publisher.close()


@pytest.mark.parametrize(("transport", "of_rank", "of_worker"), [("mapped", 2, 1), ("group", 0, None)])
def test_neither_end_waits_for_its_device_more_often_where_there_are_more_buckets_or_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, of_rank: int, of_worker: int | None
) -> None:
    """A rank reads the checksums of mapped weights for each of two workers; no worker of the transport `group` has a device
    here."""
    monkeypatch.setattr("megarl.weight_sync.checks._host_checksum", device_checksum)
    monkeypatch.setattr("tests.sync_cases.BoxWriter", UnthreadedWriter)
    model = save_model(tmp_path, "llama", False, 1)
    publisher = Publisher(model, RolloutLayout(2), 2, 1 << 14, transport=transport)
    engines = ThreadEngines(ModelShape.from_directory(model), RolloutLayout(2), engines=2)
    take, waits_of_workers = engines._take, dict[tuple[int, int], list[str]]()

    def take_and_count(engine: int, worker: int) -> dict[str, torch.Tensor]:
        with HostWaits() as waits:
            waits_of_workers[engine, worker] = waits.calls
            return take(engine, worker)

    monkeypatch.setattr(engines, "_take", take_and_count)
    shards = publisher.shards(model)
    for version in (1, 2):
        with HostWaits() as waits:
            publisher.publish_shards(version, shards, engines)
        assert waits.calls == ["cpu"] * of_rank
        for calls in waits_of_workers.values():
            # Checksums of ranks arrive in host memory.
            assert of_worker is None or [call for call in calls if call != "numpy"] == ["cpu"] * of_worker
    engines.close()
    publisher.close()
