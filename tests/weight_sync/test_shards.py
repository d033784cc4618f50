"""Laws of the shared-memory weight sync, over real gloo ranks and without vLLM."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.rollout import EngineSilent, RolloutError
from megarl.telemetry.clock import PhaseClock, recording
from megarl.weight_sync import segment
from megarl.weight_sync.manifest import SyncError, SyncLate, WeightManifest
from megarl.weight_sync.publish import SyncSettings, WeightSync
from megarl.weight_sync.ring import Ring
from tests.ranks import run_ranks
from tests.rollout_cases import Publisher, checkpoint, corrupt, megatron_shards, save_model
from tests.sync_cases import ThreadEngines, assert_has_shard
from tests.tiny_models import save_tiny_model
from tests.weight_sync.test_stream import BLOCKS

pytestmark = pytest.mark.sync

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
BUCKET_BYTES = 8192  # a tiny model is many buckets, and most boxes are cut


def publish_and_read(
    models: list[str], layout: Layout, settings: SyncSettings, nodes: Sequence[str]
) -> list[dict[str, float]]:
    """Publish each model as a version; rank 0 has the engines, one on each of `nodes`. Returns the metrics."""
    dist.init_process_group("gloo")
    rank, shape = dist.get_rank(), ModelShape.from_directory(models[0])
    sync = WeightSync(shape, layout, settings, Path(models[0]).parent.name, rank, dist.group.WORLD)
    readers = ThreadEngines(shape, settings.rollout, len(nodes)) if rank == 0 else None
    if readers is not None:
        readers.nodes = list(nodes)
    metrics = []
    for version, model in enumerate(map(Path, models), start=1):
        shards = megatron_shards(model, layout)[rank]
        # Merged weights are in a mapping of another kind: they cannot be read in place.
        metrics.append(sync.publish(version, MappingProxyType(shards) if settings.merges else shards, readers))
        if readers is not None:
            assert readers.versions == [version] * len(nodes)
            for engine, worker in readers.places:
                taken, quantised = readers.taken[engine, worker], settings.quantization is not None
                assert_has_shard(taken, shape, model, settings.rollout, worker, settings.dtype, quantised)
    if readers is not None:
        readers.close()
    sync.close()
    return metrics


def settings_of(
    rollout: RolloutLayout, engines: int = 1, precision: str = "fp32", transport: str = "shared_memory", **more: Any
) -> SyncSettings:
    verify = "sampled" if transport == "nccl" else "all"
    form: dict[str, Any] = {"transport": transport, "verify": verify} | more
    return SyncSettings(PRECISIONS[precision], rollout, engines, form.pop("bucket_bytes", BUCKET_BYTES), 60.0, **form)


def two_models(folder: Path, family: str = "qwen3", tied: bool = True) -> list[str]:
    return [str(save_tiny_model(folder / str(seed), family, tied, seed)) for seed in (1, 2)]


@pytest.mark.parametrize(
    ("family", "tied", "layout", "rollout", "engines", "precision", "transport"),
    [
        ("qwen3", True, Layout(2, 2, 1), RolloutLayout(2), 1, "fp32", "shared_memory"),
        ("qwen2", False, Layout(4, 1, 1), RolloutLayout(1), 3, "bf16", "shared_memory"),
        ("llama", True, Layout(1, 2, 2), RolloutLayout(4), 1, "fp32", "shared_memory"),
        ("qwen3", True, Layout(1, 2, 1, virtual_pipeline=2), RolloutLayout(2), 2, "fp32", "shared_memory"),
        ("qwen3", False, Layout(2, 1, 1, context=2), RolloutLayout(1, 2), 1, "fp32", "shared_memory"),
        (
            "qwen3_moe",
            False,
            Layout(2, 1, 2, expert=4, expert_tensor=1),
            RolloutLayout(2, 1, 2, True),
            1,
            "fp32",
            "shared_memory",
        ),
        ("mixtral", True, Layout(1, 2, 2, expert=2, stages=(1, 3)), RolloutLayout(1), 1, "bf16", "shared_memory"),
        # A file without a name stands in for the memory of the leading engine's device.
        ("qwen3", True, Layout(2, 2, 1), RolloutLayout(2), 3, "bf16", "cuda_ipc"),
    ],
)
def test_workers_receive_exactly_their_shards(
    tmp_path: Path,
    family: str,
    tied: bool,
    layout: Layout,
    rollout: RolloutLayout,
    engines: int,
    precision: str,
    transport: str,
) -> None:
    settings = settings_of(rollout, engines, precision, transport)
    models = two_models(tmp_path, family, tied)
    answers = run_ranks(publish_and_read, layout.ranks, models, layout, settings, ["here"] * engines)
    for metrics in answers[0]:
        assert metrics["sync/received_bytes"] == metrics["sync/bound_bytes"] > 0
        assert metrics["sync/attempts"] == 1
        # Weights are fp32: for bf16 they are cast.
        assert metrics["sync/in_place"] == (transport == "shared_memory" and precision == "fp32")
    assert all(answer == answers[0] for answer in answers)
    assert not [name for name in os.listdir(segment.ROOT) if name.startswith(f"megarl-{tmp_path.name}")]


@pytest.mark.parametrize(
    ("nodes", "copies", "transport"),
    [
        (["here"], 1, "gloo"),
        (["here", "here", "here"], 1, "gloo"),
        (["here", "there", "here", "there"], 2, "gloo"),
        # Gloo without numbers and a file without a name stand in for NCCL and the memory of a device.
        (["here", "there", "here", "there"], 2, "nccl"),
    ],
)
def test_messages_bring_one_copy_to_each_node(tmp_path: Path, nodes: list[str], copies: int, transport: str) -> None:
    layout, settings = Layout(1, 2, 1), settings_of(RolloutLayout(2), len(nodes), transport=transport)
    answers = run_ranks(publish_and_read, layout.ranks, two_models(tmp_path), layout, settings, nodes)
    for metrics in answers[0]:
        assert metrics["sync/received_bytes"] == metrics["sync/bound_bytes"] > 0
        one_copy = metrics["sync/bound_bytes"] / len(nodes)
        assert copies * one_copy <= metrics["sync/sent_bytes"] < 1.1 * copies * one_copy
    assert not [name for name in os.listdir(segment.ROOT) if name.startswith(f"megarl-{tmp_path.name}")]


@pytest.mark.parametrize(
    ("layout", "rollout", "nodes", "transport"),
    [
        (Layout(1, 2), RolloutLayout(2), ["here"], "shared_memory"),
        (Layout(2), RolloutLayout(1, 2), ["here", "there", "there"], "gloo"),
        (Layout(1, 2), RolloutLayout(2), ["here", "there"], "nccl"),
    ],
)
def test_shards_arrive_by_layer_where_adapters_are_merged(
    tmp_path: Path, layout: Layout, rollout: RolloutLayout, nodes: list[str], transport: str
) -> None:
    settings = settings_of(rollout, len(nodes), "bf16", transport, merges=True)
    answers = run_ranks(publish_and_read, layout.ranks, two_models(tmp_path), layout, settings, nodes)
    for metrics in answers[0]:
        assert metrics["sync/received_bytes"] == metrics["sync/bound_bytes"] > 0
        assert metrics["sync/attempts"] == 1 and not metrics["sync/in_place"]


@pytest.mark.parametrize(("transport", "wire"), [("shared_memory", "full"), ("gloo", "delta")])
def test_fp8_blocks_of_all_ranks_make_the_blocks_of_the_worker(tmp_path: Path, transport: str, wire: str) -> None:
    import transformers as hf

    sizes = {key: value for key, value in BLOCKS.items() if key not in ("architectures", "model_type", "rope_theta")}
    models = [str(tmp_path / str(seed)) for seed in (1, 2)]
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes)).save_pretrained(model)
    form: dict[str, Any] = {"transport": transport, "wire": wire, "quantization": "fp8", "bucket_bytes": 1 << 16}
    settings, layout = settings_of(RolloutLayout(2), precision="bf16", **form), Layout(tensor=2, pipeline=2)
    answers = run_ranks(publish_and_read, layout.ranks, [*models, models[1]], layout, settings, ["here"])
    whole_bytes = sum(2 * tensor.numel() for tensor in checkpoint(Path(models[0])).values())
    for metrics in answers[0]:
        assert metrics["sync/received_bytes"] == metrics["sync/bound_bytes"] < 0.6 * whole_bytes
        assert metrics["sync/attempts"] == 1
    if wire == "delta":
        assert answers[0][2]["sync/changed_share"] == 0.0 and answers[0][1]["sync/changed_share"] > 0.5


def publish_with_a_missing_parameter(model: str, layout: Layout) -> str:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    settings = SyncSettings(torch.float32, RolloutLayout(), 1, BUCKET_BYTES, timeout_s=60.0)
    sync = WeightSync(ModelShape.from_directory(model), layout, settings, "test", rank, dist.group.WORLD)
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


Published = tuple[Publisher, ThreadEngines, Path]


@pytest.fixture
def published(tmp_path: Path) -> Iterator[Published]:
    """A trainer of one rank, two engines without vLLM that took version 1, and its model."""
    model = save_model(tmp_path / "m", "llama", False, 1)
    publisher = Publisher(model, engines=2, bucket_bytes=BUCKET_BYTES)
    engines = ThreadEngines(ModelShape.from_directory(model), RolloutLayout(), engines=2, retries=1)
    publisher.publish(1, model, engines)
    yield publisher, engines, model
    engines.close()
    publisher.close()


def announced(publisher: Publisher, version: int) -> WeightManifest:
    """A version that was announced, and of which nothing was sent yet."""
    publisher.sync._engines = None
    return publisher.sync._begin(version, 1, (0,))


def test_a_bucket_that_stays_wrong_ends_the_sync_with_its_first_wrong_box(published: Published) -> None:
    publisher, engines, model = published
    corrupt(publisher, bucket=0, times=2)
    with pytest.raises(SyncError, match=r"wrong bytes in bucket 0 of \d+, model\.embed_tokens\.weight"):
        publisher.publish(2, model, engines)
    assert engines.versions == [1, 1]


@pytest.mark.parametrize("version", [1, 2])
def test_a_silent_trainer_rank_is_named_at_the_deadline(published: Published, version: int) -> None:
    """Also where the counters and bytes of the same version from an earlier sync are still in the ring."""
    publisher, engines, _ = published
    manifest = replace(announced(publisher, version), timeout_s=0.2)
    with pytest.raises(SyncLate, match=r"bucket 0 of \d+ has nothing from trainer rank 0 within .*timeout_s = 0\.2"):
        next(engines.readers[0, 0].boxes(manifest, 0))


def test_a_deadline_that_passes_on_one_rank_is_a_deadline_for_all(published: Published) -> None:
    """Else some ranks end as after a failure, before the stacks of a hang are there."""
    publisher, _, _ = published

    def pass_deadline() -> None:
        raise EngineSilent("no answer of rollout engine 0")

    def fail() -> None:
        raise RolloutError("rollout engine 0 died")

    for step, kind in ((pass_deadline, SyncLate), (fail, SyncError)):
        with pytest.raises(SyncError, match="weight_sync: stream failed on rank 0: .*rollout engine 0") as failure:
            publisher.sync._together("weight_sync: stream", step)
        assert type(failure.value) is kind
    clock = PhaseClock()
    with pytest.raises(EngineSilent) as silent, recording(clock), clock.phase("weight_sync"):
        publisher.sync._from_first(pass_deadline)
    assert clock.place_of(silent.value) == ("weight_sync", "wait_engines"), "no rank is at fault"


def test_a_failing_rank_tells_the_engines_at_once(published: Published) -> None:
    publisher, engines, model = published
    shards = publisher.shards(model)
    shards["decoder.layers.1.mlp.linear_fc2.weight"] = torch.zeros(3, 3)
    with pytest.raises(SyncError, match="weight_sync: stream failed on rank 0"):
        publisher.publish_shards(2, shards, engines)
    engines.finish()
    assert [str(error) for error in engines.failures] == ["trainer rank 0 failed and sends no more"] * 2
    publisher.publish(3, model, engines)
    assert engines.versions == [3, 3]


def test_a_manifest_of_another_plan_or_machine_is_refused(published: Published) -> None:
    publisher, engines, _ = published
    manifest = announced(publisher, 2)
    reader = engines.readers[0, 0]
    with pytest.raises(SyncError, match="reshard plan"):
        next(reader.boxes(replace(manifest, plan_hash="0" * 64), 0))
    with pytest.raises(SyncError, match="no shared memory 'elsewhere'"):
        next(reader.boxes(replace(manifest, rings=("elsewhere",)), 0))
    with pytest.raises(SyncError, match="shared memory .* bytes, not "):
        next(reader.boxes(replace(manifest, bucket_bytes=2 * BUCKET_BYTES), 0))


# What a process that makes a segment does before it dies: it has no name yet, or one.
DEATHS = {".megarl-dead": "os.rename = die\n", "megarl-dead": ""}


@pytest.mark.parametrize("left", DEATHS)
def test_segments_of_dead_processes_are_swept_and_living_ones_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """In a folder of its own: every trainer of this machine sweeps /dev/shm when it starts."""
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom megarl.weight_sync import segment\n"
        "def die(*names): os.kill(os.getpid(), signal.SIGKILL)\n"
        f"{DEATHS[left]}segment.ROOT = Path(sys.argv[1])\n"
        "segment.SharedSegment.create('dead', 4096)\ndie()"
    )
    monkeypatch.setattr(segment, "ROOT", tmp_path)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    mine = segment.SharedSegment.create("alive", 4096)
    assert {file.name for file in tmp_path.iterdir()} == {left, "megarl-alive"}
    assert segment.sweep() == ["dead"]
    assert [file.name for file in tmp_path.iterdir()] == ["megarl-alive"]
    mine.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("on_device", [False, True])
def test_too_little_shared_memory_is_an_error_and_not_a_dead_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    """It says what helps, and leaves nothing behind."""
    reserved: list[int] = []

    def full(descriptor: int, offset: int, num_bytes: int) -> None:
        reserved.append(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segment, "ROOT", tmp_path)
    monkeypatch.setattr(segment.os, "posix_fallocate", full)
    smaller = "" if on_device else ", or lower weight_sync.bucket_bytes: 2 buckets have 4096 bytes each"
    said = rf"buckets need \d+ bytes more in {re.escape(str(tmp_path))}; enlarge it \(docker run --shm-size\){smaller}$"
    with pytest.raises(ValueError, match=said):
        Ring("large", 1, 1, 4096, on_device, create=True)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reserved[0])
