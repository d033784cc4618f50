"""Weights to engines on other machines: trainer ranks and engines in two network namespaces."""

from __future__ import annotations

import os
import re
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.weight_sync.manifest import SyncError, SyncSettings
from megarl.weight_sync.publish import WeightSync
from tests.engine_processes import CUT, Answer, ProcessEngines, assert_has_all, of_version
from tests.networks import CABLE, Network, two_networks
from tests.ranks import RankPool
from tests.rollout_cases import checkpoint, megatron_shards, save_model

pytestmark = [pytest.mark.sync, pytest.mark.hang]

LAYOUT = Layout(1, 2, 1)
BUCKET_BYTES = 65536
TIMEOUT_S = 3.0  # of the sync with the cut cable
PATIENT_S = 60.0  # of the other syncs: a busy machine must not reach it
END_S = 60.0  # for orphaned processes to end
# Socket buffers: the sender takes their content for sent, and with megabytes they would hold the whole model.
SOCKET_BYTES = "4096 16384 16384"


@dataclass
class RankReport:
    """What one trainer rank saw: the engine's answers after successful syncs, and error and lost engines after the cut."""

    answers: list[Answer | str]
    error: str = ""
    lost: dict[int, str] | None = None
    report: str = ""


class OneTry(ProcessEngines):
    """An engine that fails ends the sync."""

    def finish(self) -> tuple[tuple[int, ...], dict[str, float]]:
        report = self._hear(0)
        if report != "received":
            raise SyncError(f"engine 0: {report}")
        return (), {}


def publish_over_a_cable(model: Path, near: Network, far: Network) -> RankReport:
    """Publish a version, a version with the cable cut in the middle, and a version after the repair."""
    near.enter()
    for name in ("tcp_wmem", "tcp_rmem"):
        Path("/proc/sys/net/ipv4", name).write_text(SOCKET_BYTES)
    rank, shape, shards = int(os.environ["RANK"]), ModelShape.from_directory(model), megatron_shards(model, LAYOUT)
    engines = OneTry(shape, 1, [far]) if rank == 0 else None
    dist.init_process_group("gloo")
    settings = SyncSettings("fp32", RolloutLayout(), 1, BUCKET_BYTES, PATIENT_S, transport="group", host=near.address)
    sync = WeightSync(shape, LAYOUT, settings, rank, dist.group.WORLD)
    outcome = RankReport([])
    try:
        for version in (1, 2, 3):
            if version == 2 and engines is not None:
                engines.faults = {0: (CUT, "middle")}
            sync._settings = replace(settings, timeout_s=TIMEOUT_S if version == 2 else PATIENT_S)
            try:
                sync.publish(version, of_version(shards[rank], version), engines)
                outcome.answers += [] if engines is None else [engines.answer(0)]
            except SyncError as error:
                assert version == 2, error
                outcome.error, outcome.lost = (
                    "\n".join([str(error), *getattr(error, "__notes__", [])]),
                    dict(sync._groups.lost),
                )
                if engines is not None:
                    outcome.report = str(engines.answer(0))
                    near.switch("up")
                    far.switch("up")
    finally:
        sync.close()
        if engines is not None:
            engines.end()
            engines.close()
    return outcome


def test_a_cut_cable_ends_the_sync_on_both_sides_and_the_next_one_goes_through(tmp_path: Path) -> None:
    """Each side names bucket and peer, and no process is left."""
    model = save_model(tmp_path / "model", "llama", False, 1)
    with two_networks() as (near, far):
        with closing(RankPool()) as pool:
            reports = pool.run(publish_over_a_cable, LAYOUT.ranks, model, near, far)
        assert near.emptied(END_S) and far.emptied(END_S), "a process is left"
    first, last = reports[0].answers
    assert_has_all(first, 1, model)
    assert_has_all(last, 3, model)
    assert re.search(r"dirty: bucket \d+ of \d+ from trainer rank \d did not come by the deadline", reports[0].report)
    assert all("engine 0: dirty: bucket" in report.error for report in reports)
    lost = [report.lost[0] for report in reports if report.lost]
    assert lost, "no rank has noticed"
    for why in lost:
        assert re.search(rf"bucket \d+ for worker 0 of engine 0 within weight_sync\.timeout_s = {TIMEOUT_S:g}", why), why


def publish_in_two_legs(model: Path, near: Network, far: Network) -> tuple[list[Answer | str], int]:
    """One rank and one engine in each network; the answers of the engines, and the bytes that this rank's side sent."""
    rank, network = int(os.environ["RANK"]), (near, far)[int(os.environ["RANK"])]
    network.enter()
    shape, servers = ModelShape.from_directory(model), ((0,), (1,))
    engines = ProcessEngines(shape, 2, [near, far]) if rank == 0 else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", near.address)
        patch.setenv("GLOO_SOCKET_IFNAME", CABLE)
        dist.init_process_group("gloo")
    settings = SyncSettings(
        "fp32", RolloutLayout(), 2, BUCKET_BYTES, PATIENT_S, transport="group", host=near.address, servers=servers
    )
    sync = WeightSync(shape, LAYOUT, settings, rank, dist.group.WORLD)
    shards = megatron_shards(model, LAYOUT)[rank]
    sync.publish(1, shards, engines)
    before = network.sent_bytes()
    sync.publish(2, of_version(shards, 2), engines)
    dist.barrier()
    answers = [] if engines is None else [engines.answer(0), engines.answer(1)]
    sync.close()
    if engines is not None:
        engines.end()
        engines.close()
    return answers, network.sent_bytes() - before


def test_in_two_legs_each_rank_receives_what_its_worker_needs_and_hands_it_over(tmp_path: Path) -> None:
    """Each rank has one pipeline stage, so each side sends its stage to the other side once; what a rank has itself does
    not take the cable."""
    model = save_model(tmp_path / "model", "llama", False, 1)
    with two_networks() as (near, far), closing(RankPool()) as pool:
        sides = pool.run(publish_in_two_legs, LAYOUT.ranks, model, near, far)
    for answer in sides[0][0]:
        assert_has_all(answer, 2, model)
    whole = sum(4 * tensor.numel() for tensor in checkpoint(model).values())
    assert 1.0 * whole <= sides[0][1] + sides[1][1] <= 1.15 * whole
