"""A sync needs no second copy of the model: the memory of both ends, measured by the kernel.

At rest a process has the weights of its ends and no sync yet; a tiny model has gone before, so that code and threads are
there. From then on everything counts, what a sync keeps as well. The trainer's end is the product's own. Workers write what
vLLM would pack to the receiver's spare memory, module by module, and copy it to their own from there: what vLLM itself takes
to pack is not in here.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megarl.megatron import lora
from megarl.megatron.lora import MODULES, MergedShards
from megarl.models import ModelShape
from megarl.models import megatron_weights as megatron
from megarl.models import vllm_weights as vllm
from megarl.models.layout import Layout, RolloutLayout
from megarl.recipe.role_sections import LoraSection
from megarl.weight_sync.buckets import LocalBox
from megarl.weight_sync.copies import SpareMemory, Works, divide
from megarl.weight_sync.manifest import SyncSettings
from megarl.weight_sync.mapped import share
from megarl.weight_sync.publish import WeightSync
from tests.lora_cases import adapters_of
from tests.ranks import RankPool
from tests.sync_cases import Parameters, ThreadEngines

pytestmark = pytest.mark.sync

BUCKET_BYTES = 1 << 20
M_MMAP_THRESHOLD = -3  # of malloc.h
LORA = LoraSection(rank=4, alpha=8.0)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 8192, "hidden_size": 512, "head_dim": 64,
    "intermediate_size": 1536, "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
SHAPE = ModelShape.from_config(CONFIG)
TINY = ModelShape.from_config(CONFIG | {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64})


class Peaks(NamedTuple):
    """Peak bytes above rest in the first and the second version, and bytes of a layer of a rank, of a layer of a worker and
    of all of a worker."""

    first: int
    second: int
    layer: int
    worker_layer: int
    worker: int


def trainer_weights(shape: ModelShape, layout: Layout, rank: int, way: str) -> Mapping[str, torch.Tensor]:
    dtype = torch.float32 if way == "cast" else torch.bfloat16
    sizes = megatron.parameter_sizes(shape, layout, rank)
    weights = {name: torch.ones(size, dtype=dtype) for name, size in sizes.items()}
    if way != "adapters":
        return weights
    adapters = adapters_of(weights, LORA, std=1.0, seed=0)
    assert len(adapters) == len(MODULES) * shape.num_layers // layout.pipeline
    return MergedShards(weights, adapters)


class Writing(ThreadEngines):
    """Workers that write their weights as the receiver does where vLLM packs linear layers."""

    def __init__(self, shape: ModelShape, rollout: RolloutLayout) -> None:
        super().__init__(shape, rollout)
        self.workers = [Worker(vllm.parameter_sizes(shape, rollout, worker)) for worker in range(rollout.workers)]

    def _take(self, engine: int, worker: int) -> Parameters:
        for box in self.readers[engine, worker].read(self._manifest, engine, self.workers[worker]):
            self.workers[worker].arrived(box)
        return {}


class Worker:
    """A worker's weights. Linear weights go to spare memory first, in place of packing."""

    def __init__(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        self.sizes = sizes
        self.weights = {name: torch.ones(size, dtype=torch.bfloat16) for name, size in sizes.items()}
        self._open: dict[str, tuple[SpareMemory, int]] = {}  # of modules, with the elements that are missing
        self._spares: list[SpareMemory] = []
        self._targets: dict[str, Parameters] = {}  # by module

    def works(self, boxes: Sequence[LocalBox], bucket_bytes: int) -> Works:
        return divide(boxes, self.sizes, lambda owner: owner in ("model.embed_tokens", "lm_head"), bucket_bytes)

    def place(self, box: LocalBox, spare: SpareMemory | None = None) -> torch.Tensor:
        if spare is not None:
            return box.within(self._target(box, spare))
        if box.owner not in self._open:
            missing = sum(rows * cols for name, (rows, cols) in self.sizes.items() if name.rpartition(".")[0] == box.owner)
            self._open[box.owner] = self._spares.pop() if self._spares else SpareMemory(), missing
        return box.within(self._target(box, self._open[box.owner][0]))

    def arrived(self, box: LocalBox) -> None:
        spare, missing = self._open.pop(box.owner)
        missing -= box.rows * box.cols
        if missing:
            self._open[box.owner] = spare, missing
        else:
            self.written(box.owner)
            spare.take_back()
            self._spares.append(spare)

    def written(self, owner: str) -> None:
        targets = self._targets.pop(owner, {})
        while targets:
            self.weights[next(iter(targets))].copy_(targets.pop(next(iter(targets))))

    def finish(self) -> None:
        assert not self._open, "every module is complete"
        self._spares = []

    def _target(self, box: LocalBox, spare: SpareMemory) -> torch.Tensor:
        live = self.weights[box.parameter]
        if "_proj." not in box.parameter:
            return live
        targets = self._targets.setdefault(box.owner, {})
        if box.parameter not in targets:
            targets[box.parameter] = spare.take(tuple(live.shape), box.dtype, live.device, apart=True)
        return targets[box.parameter]


def peaks(way: str, layout: Layout, rollout: RolloutLayout, transport: str) -> Peaks:
    """The peaks of this rank; `way` is the reason for buckets, if there are any."""
    dist.init_process_group("gloo")
    # Return large freed memory at once, so that only memory in use counts.
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 1 << 16)
    lora.MERGED_BYTES = 1 << 18  # as small against a layer as for a real model
    for shape in (TINY, SHAPE):
        measured = publish_twice(shape, way, layout, rollout, transport)
    return measured


def publish_twice(shape: ModelShape, way: str, layout: Layout, rollout: RolloutLayout, transport: str) -> Peaks:
    rank = dist.get_rank()
    parameters = trainer_weights(shape, layout, rank, way)
    engines = Writing(shape, rollout) if rank == 0 else None
    settings = SyncSettings("bf16", rollout, 1, BUCKET_BYTES, timeout_s=60.0, transport=transport, merges=way == "adapters")
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # earlier freed memory would hide as much
    rest, peak_bytes = resident("VmRSS"), []
    sync = WeightSync(shape, layout, settings, rank, dist.group.WORLD)
    for version in (1, 2):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
        sync.publish(version, parameters, engines)
        peak_bytes.append(resident("VmHWM") - rest)
    if engines is not None:
        engines.close()
    sync.close()
    held = megatron.parameter_sizes(shape, layout, rank), vllm.parameter_sizes(shape, rollout, 0)
    layer, worker_layer = (num_bytes(sizes, ".layers.0.") for sizes in held)
    (first, second), worker = peak_bytes, num_bytes(held[1], "")
    return Peaks(first, second, layer, worker_layer, worker)


def num_bytes(sizes: Mapping[str, tuple[int, int]], of: str) -> int:
    return sum(2 * rows * cols for name, (rows, cols) in sizes.items() if of in name)


def resident(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(which))


def on_new_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """In processes that end afterwards: other tests must not run with their malloc."""
    with closing(RankPool()) as pool:
        return pool.run(function, ranks, *arguments)


@pytest.mark.parametrize(
    ("way", "layout", "rollout"),
    [
        pytest.param("adapters", Layout(), RolloutLayout(), marks=pytest.mark.nightly),
        ("adapters", Layout(), RolloutLayout(4)),
        ("adapters", Layout(2, 2), RolloutLayout(2)),
        ("cast", Layout(2, 2), RolloutLayout(2)),
    ],
)
def test_each_end_takes_no_more_than_one_layer_and_its_buckets(way: str, layout: Layout, rollout: RolloutLayout) -> None:
    """Also where adapters make new weights of all. Of several ranks none gathers what the others hold."""
    for rank, measured in enumerate(on_new_ranks(peaks, layout.ranks, way, layout, rollout, "group")):
        allowed = measured.layer + 2 * BUCKET_BYTES
        if rank == 0:  # the workers are threads of it
            allowed += rollout.workers * (measured.worker_layer + 2 * BUCKET_BYTES)
            assert rollout.workers * measured.worker > 3 * allowed, "the model is too small to tell"
        assert max(measured.first, measured.second) <= allowed, f"rank {rank}: {measured}; {allowed} are allowed"


@pytest.mark.parametrize("way", ["", "cast"])
def test_mapped_weights_are_mapped_once_more_and_not_copied(way: str) -> None:
    [measured] = on_new_ranks(peaks, 1, way, Layout(), RolloutLayout(), "mapped")
    weights = measured.worker * (2 if way == "cast" else 1)  # fp32 weights
    allowed = weights + measured.layer + measured.worker_layer + 4 * BUCKET_BYTES
    assert max(measured.first, measured.second) <= allowed, f"{measured}; {allowed} are allowed"


def peak_of_moving(num_storages: int, num_elements: int) -> int:
    parameters = {str(number): torch.ones(num_elements, 1) for number in range(num_storages)}
    rest = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    share(parameters, list(parameters))
    return resident("VmHWM") - rest


def test_what_moves_into_shared_memory_is_there_twice_one_storage_at_a_time() -> None:
    """For megatron-core's buffers, which hold many weights each, the peak is the largest buffer."""
    storage, overhead = 4 << 24, 8 << 20
    [whole], [parts] = (on_new_ranks(peak_of_moving, 1, count, (1 << 24) // count) for count in (1, 16))
    assert storage <= whole <= storage + overhead and parts <= storage // 16 + overhead, (whole, parts)
