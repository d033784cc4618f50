"""Laws of the shared-memory weight sync, over real gloo ranks and without vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.family import ModelShape
from megarl.reshard.boxes import Layout, RolloutLayout
from megarl.reshard.vllm import vllm_segments
from megarl.sync import segment
from megarl.sync.manifest import SyncError, WeightManifest
from megarl.sync.publish import WeightSync
from megarl.sync.read import ShardReader
from tests.ranks import run_ranks
from tests.rollout_cases import Publisher, checkpoint, cut, megatron_shards, save_model
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.sync


def received(shape: ModelShape, manifest: WeightManifest, rank: int) -> dict[str, torch.Tensor]:
    """One tensor rank's parameters as its reader hands them out; every element exactly once."""
    reader = ShardReader(shape, rank)
    assert reader.verify(manifest) == manifest.num_bytes[rank]
    parameters: dict[str, torch.Tensor] = {}
    for box in reader.boxes(manifest):
        rows, cols = box.content.shape
        parameter = parameters.setdefault(box.parameter, torch.full((1024, 512), torch.nan))
        target = parameter[box.row : box.row + rows, box.col : box.col + cols]
        assert torch.isnan(target).all(), f"{box.parameter} written twice"
        target.copy_(box.content)
    reader.close()
    return parameters


def assert_is_shard(shape: ModelShape, model: Path, manifest: WeightManifest, rank: int, dtype: torch.dtype) -> None:
    expected = cut(vllm_segments(shape, RolloutLayout(manifest.rollout_tensor)), checkpoint(model))[rank]
    got = received(shape, manifest, rank)
    assert got.keys() == expected.keys()
    for name, content in expected.items():
        rows, cols = content.shape
        assert torch.equal(got[name][:rows, :cols], content.to(dtype).float()), name
        assert torch.isnan(got[name][rows:]).all() and torch.isnan(got[name][:, cols:]).all(), name


def publish_and_read(first: str, second: str, layout: Layout, rollout_tensor: int, precision: str) -> int:
    """Publish two versions from this rank; the last rank reads both as every engine worker would."""
    dist.init_process_group("gloo")
    rank, dtype = dist.get_rank(), {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    shape = ModelShape.from_directory(first)
    sync = WeightSync(shape, layout, rollout_tensor, dtype, "test", rank, dist.group.WORLD)
    read = 0
    for version, model in enumerate((first, second), start=1):
        manifest = sync.publish(version, megatron_shards(Path(model), layout)[rank])
        assert (manifest is not None) == (rank == 0)
        message = [manifest]
        dist.broadcast_object_list(message, src=0)
        if rank == layout.ranks - 1:
            assert message[0] is not None and message[0].version == version
            for destination in range(rollout_tensor):
                assert_is_shard(shape, Path(model), message[0], destination, dtype)
                read += 1
        dist.barrier()
    sync.close()
    return read


@pytest.mark.parametrize(
    ("family", "tied", "layout", "rollout_tensor", "precision"),
    [
        ("qwen3", True, Layout(2, 2, 1), 2, "fp32"),
        ("qwen2", False, Layout(4, 1, 1), 1, "bf16"),
        ("llama", True, Layout(1, 2, 2), 4, "fp32"),
        ("qwen3", True, Layout(1, 2, 1, virtual_pipeline=2), 2, "fp32"),
        ("qwen3", False, Layout(2, 1, 1, context=2), 1, "fp32"),
        ("qwen3_moe", False, Layout(2, 1, 2, expert=4, expert_tensor=1), 2, "fp32"),
        ("mixtral", True, Layout(1, 2, 2, expert=2, stages=(1, 3)), 1, "bf16"),
    ],
)
def test_workers_receive_exactly_their_shards(
    tmp_path: Path, family: str, tied: bool, layout: Layout, rollout_tensor: int, precision: str
) -> None:
    first, second = (str(save_tiny_model(tmp_path / str(seed), family, tied, seed)) for seed in (1, 2))
    answers = run_ranks(publish_and_read, layout.ranks, first, second, layout, rollout_tensor, precision)
    assert answers == [0] * (layout.ranks - 1) + [2 * rollout_tensor]
    assert not [name for name in os.listdir(segment.ROOT) if name.startswith("megarl-test-")]


def publish_with_a_missing_parameter(model: str, layout: Layout) -> str:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sync = WeightSync(ModelShape.from_directory(model), layout, 1, torch.float32, "test", rank, dist.group.WORLD)
    parameters: dict[str, Any] = dict(megatron_shards(Path(model), layout)[rank])
    if rank == 1:
        del parameters["decoder.final_layernorm.weight"]
    try:
        sync.publish(1, parameters)
    except SyncError as error:
        return str(error)
    finally:
        sync.close()
    return ""


def test_a_rank_that_cannot_publish_is_named_on_every_rank(tmp_path: Path) -> None:
    model = str(save_model(tmp_path / "m", "llama", False, 1))
    for message in run_ranks(publish_with_a_missing_parameter, 2, model, Layout(2, 1, 1)):
        assert "rank 1" in message and "decoder.final_layernorm.weight" in message


@pytest.fixture
def published(tmp_path: Path) -> Any:
    """(shape, manifest, the segment's bytes) of a published model."""
    model = save_model(tmp_path / "m", "llama", False, 1)
    publisher = Publisher(model)
    manifest = publisher.publish(1, model)
    yield ModelShape.from_directory(model), manifest, segment.SharedSegment.open(manifest.segments[0]).data
    publisher.close()


def test_one_wrong_byte_is_seen_and_its_box_named(published: Any) -> None:
    shape, manifest, data = published
    data[0] ^= 1
    with pytest.raises(SyncError, match=r"model\.embed_tokens\.weight"):
        ShardReader(shape, 0).verify(manifest)
    data[0] ^= 1
    assert ShardReader(shape, 0).verify(manifest) == manifest.num_bytes[0]


def test_two_exchanged_elements_are_seen(published: Any) -> None:
    shape, manifest, data = published
    values = data[:64].view(np.float32)
    assert values[3] != values[5]
    values[[3, 5]] = values[[5, 3]]
    with pytest.raises(SyncError, match="wrong bytes"):
        ShardReader(shape, 0).verify(manifest)


def test_a_manifest_of_another_version_plan_or_machine_is_refused(published: Any) -> None:
    shape, manifest, _ = published
    reader = ShardReader(shape, 0)
    with pytest.raises(SyncError, match="holds another one"):
        reader.verify(replace(manifest, version=2))
    with pytest.raises(SyncError, match="reshard plan"):
        reader.verify(replace(manifest, plan_hash="0" * 64))
    with pytest.raises(SyncError, match="no shared memory segment"):
        reader.verify(replace(manifest, segments=("elsewhere",)))
    assert reader.verify(manifest)


def test_a_manifest_survives_json(published: Any) -> None:
    import json

    manifest = published[1]
    assert WeightManifest.from_dict(json.loads(json.dumps(manifest.as_dict()))) == manifest


def test_segments_of_dead_processes_are_swept_and_living_ones_kept() -> None:
    code = (
        "import os, signal\nfrom megarl.sync.segment import SharedSegment\n"
        "SharedSegment.create('test-dead', 4096)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    mine = segment.SharedSegment.create(f"test-alive-{os.getpid()}", 4096)
    assert (segment.ROOT / "megarl-test-dead").exists()
    removed = segment.sweep()
    assert "test-dead" in removed and mine.name not in removed
    assert (segment.ROOT / f"megarl-{mine.name}").exists() and not (segment.ROOT / "megarl-test-dead").exists()
    mine.close()
    assert not (segment.ROOT / f"megarl-{mine.name}").exists()


def test_too_little_shared_memory_is_an_error_and_not_a_dead_process() -> None:
    space = os.statvfs(segment.ROOT)
    with pytest.raises(ValueError, match=r"weight_sync\.transport = shared_memory needs"):
        segment.SharedSegment.create(f"test-large-{os.getpid()}", space.f_blocks * space.f_frsize + 4096)
    assert not list(segment.ROOT.glob(f"*test-large-{os.getpid()}*"))
