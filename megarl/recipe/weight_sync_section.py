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
from megarl.recipe.section import Count, Positive, Seconds, Section
from megarl.recipe.violation import Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


# Default bytes of a bucket: two fit a CPU's cache; on a GPU the host waits for the device once a bucket.
BUCKET_BYTES = {"cpu": 4 << 20, "gpu": 128 << 20}


class WeightSyncSection(Section):
    transport: Literal["auto", "shared_memory", "gloo", "cuda_ipc", "nccl"] = "auto"
    """How new weights reach the engines. On one machine: the host's `shared_memory`, or `cuda_ipc`, where trainer ranks
    write into the memory of an engine's GPU. Between machines, one copy for all engines of a machine: `gloo` from host to
    host, or `nccl` from GPU to GPU, if `rollout.placement: separate` gives each trainer rank and worker its GPU. `auto`
    takes `shared_memory` or `cuda_ipc` on one machine, else `nccl` between separate GPUs, else `gloo`; `nccl` or
    `shared_memory` replace `cuda_ipc` where GPUs cannot reach each other's memory."""
    mode: Literal["reshard", "checkpoint"] = "reshard"
    """`reshard` sends each worker its shards, by megarl's weight map of the model. `checkpoint` sends every worker the whole
    model, tensor by tensor, for vLLM's loader: slower, and needs no weight map."""
    wire: Literal["full", "delta"] = "full"
    """`full` sends all weights. `delta` sends the exact changes since the last version: for links slower than 0.3 to 0.8
    GB/s, at which a core finds the changes, so only with `transport: gloo`. Trainer ranks keep a copy of what they send, and
    workers of what they receive, in the host's memory."""
    verify: Literal["all", "sampled"] = "all"
    """Boxes on a GPU whose checksum is verified: `all`; or `sampled`, the first box of each rank in a bucket and one in
    sixteen, different ones in each version. On hosts all boxes are verified."""
    bucket_bytes: Positive | None = None
    """Size of a bucket. Each worker of an engine has two, in shared memory or on its GPU. A row of the largest matrix must
    fit. `null`: 4 MiB in the host's memory, where both fit a CPU's cache; 128 MiB on a GPU (`cuda_ipc`, `nccl`), where the
    host waits for the device once a bucket."""
    timeout_s: Seconds = 120.0
    """How long a trainer rank waits for an engine to read a bucket before it gives the engine up. Other waits of a sync are
    multiples of it; loading in vLLM counts in the wait for an engine's report."""
    retries: Count = 1
    """How often weights that arrive with wrong bytes are sent to an engine again before the run ends."""
    in_flight: Literal["wait", "keep", "abort"] = "wait"
    """Completions that an engine still generates when new weights come. `wait`: finish them first, within
    `rollout.timeout_s`. `keep`: continue them under the new weights, with both versions. `abort`: generate incomplete groups
    again under the new weights. A step waits for all of its rollouts before it updates, so nothing is in flight yet."""


# Most bytes of a bucket that are not of a row (`weight_sync/stream.py`).
BESIDE_ROW_BYTES = 256


def weight_sync_rules(recipe: Recipe) -> Violations:
    """Transports that do not reach the engines, or do not carry the chosen wire format and mode."""
    section, rollout = recipe.weight_sync, recipe.rollout
    if section.transport == "nccl" and rollout.placement == "colocated":
        # A process group of NCCL has one member a GPU, and a sync's group has trainer ranks and workers.
        rule = "needs a GPU for each trainer rank and each worker, and rollout.placement is colocated"
        yield Violation("weight_sync.transport", "nccl", rule, "auto, or rollout.placement: separate")
    if section.mode == "checkpoint" and rollout.expert_parallel:
        # vLLM's loaders (0.32; not DeepSeek's) finish an expert layer once the worker's experts have arrived, and then
        # cannot take those of other ranks.
        rule = "vLLM cannot reload experts that rollout.expert_parallel shards over ranks"
        yield Violation("weight_sync.mode", "checkpoint", rule, "reshard, or rollout.expert_parallel: false")
    if recipe.actor.router_replay and section.in_flight == "keep":
        rule = "actor.router_replay repeats one choice of experts, and a kept completion's tokens chose under two versions"
        yield Violation("weight_sync.in_flight", "keep", rule, "wait or abort")
    if rollout.replay is not None:
        return  # nothing is synced
    if recipe.sent_adapter is not None:
        yield from _adapter_rules(recipe)
        return
    if section.verify == "sampled" and section.transport not in ("auto", *DEVICE_TRANSPORTS):
        rule = (
            f"samples are taken of what arrives on GPUs, and with weight_sync.transport = {section.transport} nothing does"
        )
        yield Violation("weight_sync.verify", "sampled", rule, "all")
    if section.wire == "delta" and section.transport != "gloo":
        auto = "auto may choose shared memory"
        other = f"weight_sync.transport is {section.transport}, which is faster than they are"
        rule = f"differences travel as messages, and {auto if section.transport == 'auto' else other}"
        yield Violation("weight_sync.wire", section.wire, rule, "full, or weight_sync.transport: gloo")


def _adapter_rules(recipe: Recipe) -> Violations:
    """Settings that nothing reads, or that change the base model, where a sync sends adapters alone."""
    section, rollout = recipe.weight_sync, recipe.rollout
    for name in ("transport", "mode", "wire", "verify", "bucket_bytes"):
        value, default = getattr(section, name), WeightSyncSection.model_fields[name].default
        if value != default:
            rule = "says how weights travel, and with actor.lora.send: adapter none do"
            nearest = f"{'null' if default is None else default}, or actor.lora.send: merged"
            yield Violation(f"weight_sync.{name}", value, rule, nearest)
    if rollout.quantization is not None:
        rule = "vLLM would quantise the weights without the adapters, and the trainer's model is the sum of both"
        yield Violation("rollout.quantization", rollout.quantization, rule, "null, or actor.lora.send: merged")


def weight_sync_fits_model(recipe: Recipe, shape: ModelShape) -> Violations:
    """Models that cannot be resharded, and buckets that are too small, for layouts that divide the model."""
    section, rollout, key = recipe.weight_sync, recipe.rollout, "weight_sync.bucket_bytes"
    if rollout.replay is not None or recipe.sent_adapter is not None:
        return
    if section.mode == "reshard" and not vllm.is_mapped(shape):
        rule = f"megarl has no table of where vLLM holds the weights of {shape.family}; every worker can take whole tensors"
        yield Violation("weight_sync.mode", "reshard", rule, "checkpoint")
        return
    if section.mode == "checkpoint":
        sizes = checkpoint_sizes(shape)
    else:
        workers = [rollout.layout.worker(0, stage) for stage in range(rollout.pipeline)]
        stages = [vllm.parameter_sizes(shape, rollout.layout, worker) for worker in workers]
        sizes = {name: size for stage in stages for name, size in stage.items()}
    name = max(sizes, key=lambda parameter: sizes[parameter][1])
    needed = sizes[name][1] * BYTES[recipe.rollout_precision] + BESIDE_ROW_BYTES
    if section.bucket_bytes is not None and section.bucket_bytes < needed:
        rule = f"must hold a row of {name}, {needed} bytes with its checksum"
        yield Violation(key, section.bucket_bytes, rule, str(needed))
    if rollout.quantization is None or is_for_cpus(recipe):
        return
    if section.mode == "checkpoint" or recipe.rollout_precision == "fp32":
        return  # `rollout_rules` refuses both
    # One trainer rank quantises each block and one worker takes it, so that no layout may divide a block.
    quantised = quantised_tensors(shape)
    sources, destinations = megatron_segments(shape, recipe.layout("actor")), vllm_segments(shape, rollout.layout)
    try:
        check_blocks(sources, destinations, quantised)
    except ValueError as error:
        way_out = "null, or smaller actor.layout.tensor and rollout.tensor"
        yield Violation("rollout.quantization", rollout.quantization, str(error), way_out)
    widest = max(box.col1 - box.col0 for box in destinations if box.name in quantised)
    needed = block_bytes(BLOCK, widest) + BESIDE_ROW_BYTES
    if section.bucket_bytes is not None and section.bucket_bytes < needed:
        rule = f"must hold a row of FP8 blocks of {widest} columns, {needed} bytes with its checksum"
        yield Violation(key, section.bucket_bytes, rule, str(needed))
