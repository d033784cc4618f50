"""`weight_sync`: how new weights reach the engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megarl.models import ModelShape
from megarl.models import vllm_weights as vllm
from megarl.models.megatron_weights import checkpoint_sizes, megatron_boxes
from megarl.models.quantised_blocks import BLOCK, block_bytes, check_blocks, quantised_tensors
from megarl.models.vllm_weights import vllm_boxes
from megarl.planner.roles import BYTES
from megarl.recipe.device_section import is_for_cpus
from megarl.recipe.section import Count, Positive, Seconds, Section
from megarl.recipe.violation import Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


# Default bytes of a bucket. Two fit a CPU's cache, but in two legs larger ones are faster (`weight_sync_scale.py
# --machine`). On a GPU the host waits for the device once a bucket.
BUCKET_BYTES = {"cpu": 4 << 20, "cpu_two_legs": 16 << 20, "gpu": 128 << 20}


class CanarySection(Section):
    every: Positive = 1
    """After which syncs: the first of a start, and each whose version is a multiple of this."""
    sequences: Positive = 2
    """How many sequences are scored. With four times the tokens half the excess over the usual difference counts."""
    tokens: Annotated[int, Field(ge=8)] | None = None
    """Tokens of each sequence, fewer than the longest sequence of a rollout has. `null`: 32, or as many as fit."""
    action: Literal["stop", "warn"] = "stop"
    """If an engine drifts: stop the run before it samples, or log a warning and go on."""

    def length(self, longest: int) -> int:
        """The tokens of a sequence, where a rollout has at most `longest`; vLLM generates a token after them."""
        return self.tokens or min(32, longest - 1)


class WeightSyncSection(Section):
    transport: Literal["auto", "mapped", "group"] = "auto"
    """How new weights reach the engines. `mapped`, on one host: workers map the parameters of the trainer ranks (shared
    memory on CPUs, CUDA IPC on GPUs) and copy their shards straight from there. `group`: trainer ranks send buckets in a
    process group with each engine (gloo on CPUs, NCCL on GPUs). With `rollout.placement: colocated` a rank receives what the
    workers on its device need, and they map its buckets. `auto` takes `mapped` where it can, and the run says why if not."""
    mode: Literal["reshard", "checkpoint"] = "reshard"
    """`reshard` sends each worker its shards, by megarl's weight map of the model. `checkpoint` sends every worker the whole
    model, tensor by tensor, for vLLM's loader: slower, and needs no weight map."""
    wire: Literal["full", "delta"] = "full"
    """`full` sends all weights. `delta` sends the exact changes since the last version: for links slower than 0.2 to 0.5
    GB/s, at which a core computes the changes, so only with `transport: group`. Trainer ranks keep a copy of what they send,
    and receivers of what they receive, in the host's memory."""
    bucket_bytes: Positive | None = None
    """Size of a bucket of `transport: group`. Each trainer rank has two, and each worker of an engine two more. A row of the
    largest matrix must fit. `null`: 4 MiB in the host's memory, where both fit a CPU's cache, and 16 MiB there where trainer
    ranks receive for workers; 128 MiB on a GPU, where the host waits for the device once a bucket. On CPUs the spare memory
    of `mapped` is at most a layer and two buckets."""
    timeout_s: Seconds = 120.0
    """Deadline of one attempt to send a version: an engine that has not taken it by then gets it again, or is started again
    if it gives no report. Processes that wait for others wait two to four times as long."""
    retries: Count = 1
    """How often weights that arrive with wrong bytes are sent to an engine again before the run ends."""
    in_flight: Literal["wait", "keep", "abort"] = "wait"
    """Completions that an engine still generates when new weights come. `wait`: finish them first, within
    `rollout.timeout_s`. `keep`: continue them under the new weights, with both versions. `abort`: cut their requests and
    continue them from their tokens in new ones. With `rollout.max_staleness: 0` none is in flight, above 0 `wait` is
    refused."""
    canary: CanarySection | None = CanarySection()
    """Fixed tokens that the actor and every engine score after a sync. An engine whose log-probabilities differ from the
    actor's by more than rounding has drifted. `null`: none."""


# Most bytes of a bucket that are not of a row (`weight_sync/buckets.py`).
ROW_OVERHEAD_BYTES = 256


def obstacle_to_mapping(recipe: Recipe, on_cpu: bool) -> str | None:
    """What of a recipe stands against `mapped`: the bytes are made during the sync, so there are no parameters to map; or
    the parameters leave the memory that was mapped."""
    if recipe.actor.lora is not None and recipe.sent_adapter is None:
        return "adapters are merged into the weights while these are sent"
    if recipe.rollout.quantization is not None:
        return "weights are quantised while they are sent"
    if on_cpu and recipe.actor.memory.offload == "all":
        return "actor.memory.offload is all, and weights in shared memory cannot be offloaded"
    return None


def weight_sync_rules(recipe: Recipe) -> Violations:
    """Transports that do not carry the chosen wire format and mode."""
    section, rollout = recipe.weight_sync, recipe.rollout
    if section.transport == "mapped" and (obstacle := obstacle_to_mapping(recipe, is_for_cpus(recipe))) is not None:
        yield Violation("weight_sync.transport", "mapped", obstacle, "auto or group")
    if section.mode == "checkpoint" and rollout.expert_parallel:
        # vLLM's loaders (0.32; not DeepSeek's) finish an expert layer once the worker's experts have arrived, and then
        # cannot take those of other ranks.
        rule = "vLLM cannot reload experts that rollout.expert_parallel shards over ranks"
        yield Violation("weight_sync.mode", "checkpoint", rule, "reshard, or rollout.expert_parallel: false")
    if recipe.actor.router_replay and section.in_flight == "keep":
        rule = "actor.router_replay repeats one choice of experts, and a kept completion's tokens chose under two versions"
        nearest = "abort, or rollout.max_staleness: 0" if rollout.max_staleness else "wait or abort"
        yield Violation("weight_sync.in_flight", "keep", rule, nearest)
    if not recipe.has_engines:
        return  # nothing is synced
    if rollout.max_staleness and section.in_flight == "wait":
        rule = "stops the engines at each sync until the longest completion ends, and rollout.max_staleness has them go on"
        nearest = "abort" if recipe.actor.router_replay else "keep or abort"
        yield Violation("weight_sync.in_flight", "wait", rule, f"{nearest}, or rollout.max_staleness: 0")
    longest = recipe.max_sequence_tokens
    if section.canary is not None and not 2 <= section.canary.length(longest) < longest:
        rule = f"must be at least 2 and below the longest sequence of a rollout, {longest} tokens"
        way_out = str(longest - 1) if longest > 8 else "weight_sync.canary: null"
        yield Violation("weight_sync.canary.tokens", section.canary.tokens, rule, way_out)
    if recipe.sent_adapter is not None:
        yield from _adapter_rules(recipe)
        return
    if section.wire == "delta" and section.transport != "group":
        rule = "differences travel as messages, and weight_sync.transport may map the weights, which is faster"
        yield Violation("weight_sync.wire", section.wire, rule, "full, or weight_sync.transport: group")


def _adapter_rules(recipe: Recipe) -> Violations:
    """Settings that nothing reads, or that change the base model, where a sync sends adapters alone."""
    section, rollout = recipe.weight_sync, recipe.rollout
    for name in ("transport", "mode", "wire", "bucket_bytes"):
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
    if not recipe.has_engines or recipe.sent_adapter is not None:
        return
    if section.mode == "reshard" and not vllm.has_weight_map(shape):
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
    needed = sizes[name][1] * BYTES[recipe.rollout_precision] + ROW_OVERHEAD_BYTES
    if section.bucket_bytes is not None and section.bucket_bytes < needed:
        rule = f"must hold a row of {name}, {needed} bytes with its checksum"
        yield Violation(key, section.bucket_bytes, rule, str(needed))
    if rollout.quantization is None or is_for_cpus(recipe):
        return
    if section.mode == "checkpoint" or recipe.rollout_precision == "fp32":
        return  # `rollout_rules` refuses both
    # One trainer rank quantises each block and one worker takes it, so that no layout may divide a block.
    quantised = quantised_tensors(shape)
    sources, destinations = megatron_boxes(shape, recipe.layout("actor")), vllm_boxes(shape, rollout.layout)
    try:
        check_blocks(sources, destinations, quantised)
    except ValueError as error:
        way_out = "null, or smaller actor.layout.tensor and rollout.tensor"
        yield Violation("rollout.quantization", rollout.quantization, str(error), way_out)
    widest = max(box.col1 - box.col0 for box in destinations if box.name in quantised)
    needed = block_bytes(BLOCK, widest) + ROW_OVERHEAD_BYTES
    if section.bucket_bytes is not None and section.bucket_bytes < needed:
        rule = f"must hold a row of FP8 blocks of {widest} columns, {needed} bytes with its checksum"
        yield Violation(key, section.bucket_bytes, rule, str(needed))
