"""`weight_sync`: how new weights reach the engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from megarl.models import ModelShape
from megarl.models import vllm_weights as vllm
from megarl.models.megatron_weights import checkpoint_sizes, megatron_segments
from megarl.models.quantised_blocks import BLOCK, block_bytes, check_blocks, quantised_tensors
from megarl.models.vllm_weights import vllm_segments
from megarl.planner.roles import BYTES
from megarl.recipe.device_section import DEVICE_TRANSPORTS, is_for_cpus
from megarl.recipe.rollout_section import cut, quantization
from megarl.recipe.section import Count, Positive, Seconds, Section
from megarl.recipe.violation import Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


# Bytes of a bucket where the recipe gives none: on a CPU two fit its cache, on a GPU the host waits for the device at each.
BUCKET_BYTES = {"cpu": 4 << 20, "gpu": 128 << 20}


class WeightSyncSection(Section):
    transport: Literal["auto", "shared_memory", "gloo", "cuda_ipc", "nccl"] = "auto"
    """How new weights reach the engines. On one machine: `shared_memory`, of the host; or `cuda_ipc`, where trainer ranks
    write into the memory of an engine's GPU. As messages, one copy for all engines of a machine: `gloo` from host to host,
    `nccl` from GPU to GPU, where `rollout.placement: separate` gives each trainer rank and each worker a GPU of its own.
    `auto` takes `shared_memory` or `cuda_ipc` where trainer ranks and engines are on one machine, else `nccl` between GPUs
    that are apart, else `gloo`. Where two GPUs of the machine cannot reach each other's memory it takes `nccl` or
    `shared_memory` in the place of `cuda_ipc`."""
    mode: Literal["reshard", "checkpoint"] = "reshard"
    """`reshard` sends each worker the parts that it holds, by megarl's table of the model. `checkpoint` sends every worker
    the whole model, tensor by tensor, to vLLM's own loader: slower, and needs no table of vLLM's parameters."""
    wire: Literal["full", "delta"] = "full"
    """`full` sends weights as they are. `delta` sends what changed since the version before, bit for bit: for links slower
    than a core finds the differences, 0.3 to 0.8 GB/s, so with `transport: gloo` alone. A trainer rank keeps a copy of what
    it sends, and a worker of what it receives, in the host's memory."""
    verify: Literal["all", "sampled"] = "all"
    """Which of the boxes that arrive on a GPU are checked against their checksums: `all`; or one in sixteen, in every
    version others, and always the first of what one rank wrote into a bucket. Elsewhere all are."""
    bucket_bytes: Positive | None = None
    """Size of a bucket. Weights travel in buckets that are used again and again: two for each worker of an engine, which
    shared memory, or the engine's GPU, must have room for. A row of the largest matrix must fit. `null`: 4 MiB in the
    host's memory, of which both fit a CPU's cache; 128 MiB in a GPU's (`cuda_ipc`, `nccl`), where the host waits for the
    device once a bucket."""
    timeout_s: Seconds = 120.0
    """How long a trainer rank waits for an engine to read the next bucket before it gives that one up; an engine waits
    longer for a rank. Other waits of a sync are multiples of it, too, which errors name; what vLLM does with the weights
    once they are there counts in the wait for an engine's report."""
    retries: Count = 1
    """How often weights that arrived with wrong bytes are sent again to the same engine before the run ends."""
    in_flight: Literal["wait", "keep", "abort"] = "wait"
    """What becomes of completions that an engine still generates when new weights come. `wait`: they are finished first, for
    which `rollout.timeout_s` is the deadline. `keep`: they go on under the new weights, and have both versions. `abort`:
    groups that are not complete are generated again under the new weights. A step waits for all of its rollouts before it
    updates, so that a run has nothing in flight yet."""


# At most that much of a bucket is taken by what lies beside a row (`sync/stream.py`).
BESIDE_ROW_BYTES = 256


def own_devices(recipe: Recipe) -> Violations:
    """NCCL takes no two members of a group on one GPU, and a sync's group has trainer ranks and workers."""
    if recipe.weight_sync.transport == "nccl" and recipe.rollout.placement == "colocated":
        rule = "needs a GPU for each trainer rank and each worker, and rollout.placement is colocated"
        yield Violation("weight_sync.transport", "nccl", rule, "auto, or rollout.placement: separate")


def reload(recipe: Recipe) -> Violations:
    """Checkpoint mode hands every expert to vLLM's loader, which has put an expert layer together when its own experts are
    there, and then has no place for those of other ranks (0.32; some models' loaders, DeepSeek's not)."""
    if recipe.weight_sync.mode == "checkpoint" and recipe.rollout.expert_parallel:
        rule = "vLLM cannot reload experts that rollout.expert_parallel deals over ranks"
        yield Violation("weight_sync.mode", "checkpoint", rule, "reshard, or rollout.expert_parallel: false")


def mapped(recipe: Recipe, shape: ModelShape) -> Violations:
    """Parts go where a family's table says."""
    if recipe.weight_sync.mode == "reshard" and recipe.rollout.replay is None and not vllm.is_mapped(shape):
        rule = f"megarl has no table of where vLLM holds the weights of {shape.family}; every worker can take whole tensors"
        yield Violation("weight_sync.mode", "reshard", rule, "checkpoint")


def bucket(recipe: Recipe, shape: ModelShape) -> Violations:
    """A matrix is cut by rows, so that a bucket must take the longest row."""
    if recipe.rollout.replay is not None or list(cut(recipe, shape)) or list(mapped(recipe, shape)):
        return
    layout = recipe.rollout.layout
    if recipe.weight_sync.mode == "checkpoint":
        sizes = checkpoint_sizes(shape)
    else:
        stages = [vllm.parameter_sizes(shape, layout, layout.worker(0, stage)) for stage in range(layout.pipeline)]
        sizes = {name: size for one in stages for name, size in one.items()}
    name = max(sizes, key=lambda parameter: sizes[parameter][1])
    needed = sizes[name][1] * BYTES[recipe.rollout_precision] + BESIDE_ROW_BYTES
    if (given := recipe.weight_sync.bucket_bytes) is not None and given < needed:
        rule = f"must hold a row of {name}, {needed} bytes with its checksum"
        yield Violation("weight_sync.bucket_bytes", given, rule, str(needed))


def delta(recipe: Recipe) -> Violations:
    """Differences have a length of their own, and cost more than a fast transport takes for the whole."""
    section = recipe.weight_sync
    if section.wire != "delta" or recipe.rollout.replay is not None:
        return
    if section.transport == "auto":
        rule = "differences travel as messages alone, and auto may choose shared memory"
        yield Violation("weight_sync.wire", section.wire, rule, "full, or weight_sync.transport: gloo")
    elif section.transport != "gloo":
        rule = f"differences travel as messages, and weight_sync.transport is {section.transport}, which is faster than them"
        yield Violation("weight_sync.wire", section.wire, rule, "full, or weight_sync.transport: gloo")


def blocks(recipe: Recipe, shape: ModelShape) -> Violations:
    """Neither the actor's layout nor the engines' cuts a block, so that one rank quantises it and one worker takes it."""
    name = recipe.rollout.quantization
    if name is None or recipe.rollout.replay is not None or is_for_cpus(recipe) or list(quantization(recipe)):
        return
    rollout = recipe.rollout.layout
    quantised = quantised_tensors(shape)
    try:
        sources, destinations = megatron_segments(shape, recipe.layout("actor")), vllm_segments(shape, rollout)
    except ValueError:
        return  # a layout that does not cut the model, which has rules of its own
    try:
        check_blocks(sources, destinations, quantised)
    except ValueError as error:
        way_out = "null, or smaller actor.layout.tensor and rollout.tensor"
        yield Violation("rollout.quantization", name, str(error), way_out)
    widest = max(box.col1 - box.col0 for box in destinations if box.name in quantised)
    needed = block_bytes(BLOCK, widest) + BESIDE_ROW_BYTES
    if (given := recipe.weight_sync.bucket_bytes) is not None and given < needed:
        rule = f"must hold a row of FP8 blocks of {widest} columns, {needed} bytes with its checksum"
        yield Violation("weight_sync.bucket_bytes", given, rule, str(needed))


def sampled_weights(recipe: Recipe) -> Violations:
    """Samples are taken on GPUs alone."""
    transport = recipe.weight_sync.transport
    if recipe.rollout.replay is not None:
        return  # nothing is synced
    if recipe.weight_sync.verify == "sampled" and transport not in ("auto", *DEVICE_TRANSPORTS):
        rule = f"samples are taken of what arrives on GPUs, and with weight_sync.transport = {transport} nothing does"
        yield Violation("weight_sync.verify", "sampled", rule, "all")
