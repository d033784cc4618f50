"""Laws of the shared-memory weight sync, over real gloo ranks and without vLLM."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
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
from tests.rollout_cases import Publisher, corrupt, megatron_shards, save_model
from tests.sync_cases import ThreadEngines, assert_has_shard
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.sync

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
BUCKET_BYTES = 8192  # a tiny model is many buckets, and most boxes are cut


def publish_and_read(
    first: str,
    second: str,
    layout: Layout,
    rollout: RolloutLayout,
    nodes: list[str],
    precision: str,
    transport: str = "shared_memory",
    merges: bool = False,
) -> list[dict[str, float]]:
    """Publish two versions; rank 0 has the engines."""
    dist.init_process_group("gloo")
    rank, dtype = dist.get_rank(), PRECISIONS[precision]
    shape = ModelShape.from_directory(first)
    engines = len(nodes)
    verify = "sampled" if transport == "nccl" else "all"
    settings = SyncSettings(
        dtype, rollout, engines, BUCKET_BYTES, timeout_s=60.0, transport=transport, verify=verify, merges=merges
    )
    run_id = Path(first).parent.name
    sync = WeightSync(shape, layout, settings, run_id, rank, dist.group.WORLD)
    readers = ThreadEngines(shape, rollout, engines) if rank == 0 else None
    if readers is not None:
        readers.nodes = nodes
    figures = []
    for version, model in enumerate((first, second), start=1):
        shards = megatron_shards(Path(model), layout)[rank]
        # Merged weights are in a mapping of another kind: they cannot be read in place.
        figures.append(sync.publish(version, MappingProxyType(shards) if merges else shards, readers))
        if readers is not None:
            assert readers.versions == [version] * engines
            for engine, worker in readers.places:
                assert_has_shard(readers.taken[engine, worker], shape, Path(model), rollout, worker, dtype)
    if readers is not None:
        readers.close()
    sync.close()
    return figures


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
    first, second = (str(save_tiny_model(tmp_path / str(seed), family, tied, seed)) for seed in (1, 2))
    answers = run_ranks(
        publish_and_read, layout.ranks, first, second, layout, rollout, ["here"] * engines, precision, transport
    )
    for figures in answers[0]:
        assert figures["sync/received_bytes"] == figures["sync/bound_bytes"] > 0
        assert figures["sync/attempts"] == 1
        # Weights are fp32: for bf16 they are cast.
        assert figures["sync/in_place"] == (transport == "shared_memory" and precision == "fp32")
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
    layout, rollout = Layout(1, 2, 1), RolloutLayout(2)
    first, second = (str(save_tiny_model(tmp_path / str(seed), "qwen3", True, seed)) for seed in (1, 2))
    answers = run_ranks(publish_and_read, layout.ranks, first, second, layout, rollout, nodes, "fp32", transport)
    for figures in answers[0]:
        assert figures["sync/received_bytes"] == figures["sync/bound_bytes"] > 0
        one_copy = figures["sync/bound_bytes"] / len(nodes)
        assert copies * one_copy <= figures["sync/sent_bytes"] < 1.1 * copies * one_copy
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
    first, second = (str(save_tiny_model(tmp_path / str(seed), "qwen3", True, seed)) for seed in (1, 2))
    answers = run_ranks(publish_and_read, layout.ranks, first, second, layout, rollout, nodes, "bf16", transport, True)
    for figures in answers[0]:
        assert figures["sync/received_bytes"] == figures["sync/bound_bytes"] > 0
        assert figures["sync/attempts"] == 1 and not figures["sync/in_place"]


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


def test_a_bucket_with_one_wrong_byte_is_sent_again(published: Published) -> None:
    publisher, engines, model = published
    corrupt(publisher, bucket=3, times=1)
    figures = publisher.publish(2, model, engines)
    assert figures["sync/attempts"] == 2 and engines.served == [(0, 1), (0, 1), (0, 1)]
    assert len(engines.failures) == 2
    assert all(str(error).startswith("weight version 2: wrong bytes in bucket 3 of") for error in engines.failures)
    assert engines.versions == [2, 2]
    for engine in (0, 1):
        taken = engines.taken[engine, 0]
        assert_has_shard(taken, ModelShape.from_directory(model), model, RolloutLayout(), 0, torch.float32)


def test_a_bucket_that_stays_wrong_ends_the_sync_with_its_first_wrong_box(published: Published) -> None:
    publisher, engines, model = published
    corrupt(publisher, bucket=0, times=2)
    with pytest.raises(SyncError, match=r"wrong bytes in bucket 0 of \d+, model\.embed_tokens\.weight"):
        publisher.publish(2, model, engines)
    assert engines.versions == [1, 1]


def test_an_engine_that_failed_is_served_alone_and_the_others_keep_what_they_took(published: Published) -> None:
    publisher, engines, model = published

    def break_down(engine: int, worker: int, boxes: int) -> None:
        if engine == 1 and boxes == 7 and len(engines.served) == 2:
            raise RuntimeError("broken")

    engines.before = break_down
    publisher.publish(2, model, engines)
    assert engines.served == [(0, 1), (0, 1), (1,)]
    assert engines.versions == [2, 2]
    publisher.sync.publish(3, publisher.shards(model), engines, chosen=[0])
    assert engines.served[-1] == (0,) and engines.versions == [3, 2]


def test_a_silent_trainer_rank_is_named_at_the_deadline(published: Published) -> None:
    publisher, engines, _ = published
    manifest = announced(publisher, 2)
    reader = engines.readers[0, 0]
    with pytest.raises(SyncLate, match=r"bucket 0 of \d+ has nothing from trainer rank 0 within .*timeout_s = 0\.2"):
        next(reader.boxes(replace(manifest, timeout_s=0.2), 0))


def test_what_an_earlier_sync_left_is_never_taken_for_news(published: Published) -> None:
    """Counters and bytes of version 1 are still in the ring; a reader of the next version must not see them."""
    publisher, engines, _ = published
    manifest = announced(publisher, 1)
    with pytest.raises(SyncError, match="has nothing from trainer rank 0"):
        next(engines.readers[0, 0].boxes(replace(manifest, timeout_s=0.2), 0))


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
        Ring.create("large", 1, 1, 4096, on_device)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reserved[0])
