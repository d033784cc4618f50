"""A vLLM engine of every family that took a version equals one that loaded the same weights from disk, bit for bit.

From a trainer of one rank, with two engines in one process, and from one of TP2 x PP2, with an engine as a run has it: in
Ray, with an engine core and a worker for each tensor rank.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.cluster.ray_cluster import start_cluster, stop_cluster
from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.megatron_weights import megatron_boxes
from megarl.models.model_files import copy_model_files
from megarl.rollout.pool import EnginePool
from megarl.weight_sync.manifest import SyncSettings
from megarl.weight_sync.publish import WeightSync
from tests.engine_cases import save_boxes
from tests.in_process_engine import Receiving, answers, close_engines, open_engine, open_receiver
from tests.ranks import run_ranks
from tests.rollout_cases import (
    STOP,
    Publisher,
    distance,
    megatron_shards,
    recipe,
    same,
    samples,
    save_model,
    without_vllm_table,
)
from tests.weight_sync.test_checkpoint_mode import loads_in_turn

pytestmark = [pytest.mark.sync, pytest.mark.slow]
# With their heads tied or not.
FAMILIES = [
    ("llama", False), ("qwen2", False), ("qwen3", True), ("qwen3_moe", False), ("mixtral", False), ("gemma3", True),
    ("deepseek_v3", False),
]  # fmt: skip
IN_CI = [("qwen3_moe", 2)]
CHECKPOINTS = ("qwen3", "qwen3_moe", "deepseek_v3")  # a tied head, experts, latent attention


def takes_versions(old: Path, new: Path, family: str) -> None:
    """All on one engine, which loaded `old` at its start: `new` is read in place, and `old` again from buckets. Families of
    `CHECKPOINTS` then load whole tensors, by themselves and from a trainer that has no table of vLLM's parameters."""
    engine, other = open_receiver(old), open_engine(new)
    first, second = answers(engine), answers(other)
    assert first != second
    receiving = Receiving(engine)
    for version, transport, model, expected in ((1, "mapped", new, second), (2, "group", old, first)):
        publisher = Publisher(model, transport=transport)
        metrics = publisher.publish(version, model, receiving)
        assert metrics["sync/received_bytes"] == metrics["sync/bound_bytes"] > 0
        assert answers(engine) == expected, f"version {version}: not the engine that loaded from disk"
        publisher.close()
    if family in CHECKPOINTS:
        loads_in_turn(engine, old, new)
        assert answers(engine) == second, "not the engine that loaded from disk"
        with without_vllm_table(family):
            publisher = Publisher(old, mode="checkpoint")
            metrics = publisher.publish(3, old, receiving)
            assert answers(engine) == first, "not the engine that loaded from disk"
            assert metrics["sync/received_bytes"] > 0 and "sync/bound_bytes" not in metrics, "nobody knows the bound"
            publisher.close()
    close_engines()


# The engines of tests/rollout are a Llama; qwen2 has biases as well, of which the conformance tests have the places.
@pytest.mark.parametrize(
    ("family", "tied"),
    [pytest.param(*case, marks=pytest.mark.nightly) if case[0] in ("llama", "qwen2") else case for case in FAMILIES],
)
def test_synced_engine_equals_one_that_loaded_from_disk(
    engine_process: ProcessPoolExecutor, tmp_path: Path, family: str, tied: bool
) -> None:
    old, new = (save_model(tmp_path / name, family, tied, seed) for seed, name in enumerate(("old", "new")))
    engine_process.submit(takes_versions, old, new, family).result(timeout=300)


def export(model: Path, exported: Path, layout: Layout, shards: dict[str, torch.Tensor]) -> None:
    """The ranks of a trainer write what they hold of a model; collective."""
    shape, rank = ModelShape.from_directory(model), dist.get_rank()
    if rank == 0:
        exported.mkdir()
        copy_model_files(model, exported)
    save_boxes(exported, shape, [box for box in megatron_boxes(shape, layout) if box.rank == rank], shards)


def brings_versions(old: Path, new: Path, exported: Path, layout: Layout, rollout: RolloutLayout) -> None:
    """On the ranks of a trainer. Rank 0's engine loads what they export of `new`, and takes both models by turns, by every
    transport. It takes all of `old`, or it would be further than rounding from transformers' numbers."""
    dist.init_process_group("gloo")
    rank, shape = dist.get_rank(), ModelShape.from_directory(new)
    held = {model: megatron_shards(model, layout)[rank] for model in (old, new)}
    export(new, exported, layout, held[new])
    servers = (tuple(range(rollout.workers)),)
    forms: list[dict[str, Any]] = [{}, {"transport": "group"}, {"transport": "group", "servers": servers}]
    syncs = []
    for form in forms:
        settings = SyncSettings("fp32", rollout, num_engines=1, bucket_bytes=1 << 16, timeout_s=60.0, **form)
        syncs.append(WeightSync(shape, layout, settings, rank, dist.group.WORLD))

    def publish(version: int, engines: EnginePool | None) -> Path:
        model, sync = (old, new)[(version - 1) % 2], syncs[(version - 1) % 3]
        for other in syncs:  # an engine has one trainer at a time
            other.close()
        metrics = sync.publish(version, held[model], engines)
        assert metrics["sync/received_bytes"] == metrics["sync/bound_bytes"] > 0
        return model

    if rank:
        for version in range(1, 5):
            publish(version, None)
        for sync in syncs:
            sync.close()
        return
    start_cluster()
    pool = EnginePool(recipe(exported, tensor=rollout.tensor, temperature=0.8), str(exported), STOP, seed=3)
    try:
        pool.start()
        drawn = {new: samples(pool, 1)}
        for version in range(1, 5):
            model = publish(version, pool)
            now = samples(pool, 1)
            assert same(now, drawn.setdefault(model, now)), f"{model.name} as version {version}: other numbers than before"
        assert all(distance(model, drawn[model], 0.8) < 1e-4 for model in (old, new)) and not same(drawn[old], drawn[new])
    finally:
        pool.shutdown()
        stop_cluster()
        for sync in syncs:
            sync.close()


# With a vocabulary that no size of tensor parallelism divides, and one key-value head for two tensor ranks on either side,
# but for latent attention, which has none. CI runs a family whose experts are sharded over the trainer ranks and cut in the
# engine; `test_synced_engine_equals_one_that_loaded_from_disk` covers the dense families there.
@pytest.mark.parametrize(
    ("family", "tied", "tensor"),
    [
        pytest.param(family, tied, tensor, marks=() if (family, tensor) in IN_CI else pytest.mark.nightly)
        for family, tied in FAMILIES
        for tensor in (2, 1)
    ],
)
def test_an_engine_synced_from_four_ranks_equals_one_that_loaded_their_export(
    tmp_path: Path, family: str, tied: bool, tensor: int
) -> None:
    old, new = (save_model(tmp_path / name, family, tied, seed, groups=1) for seed, name in enumerate(("old", "new")))
    layout = Layout(2, 2, expert=2, expert_tensor=1) if family == "qwen3_moe" else Layout(2, 2)
    run_ranks(brings_versions, layout.ranks, old, new, tmp_path / "exported", layout, RolloutLayout(tensor))
