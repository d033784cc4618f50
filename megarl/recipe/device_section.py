"""`device`: the devices of the trainer ranks, and what a run on CPUs cannot do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from megarl.models import ModelShape
from megarl.recipe.section import Section
from megarl.recipe.violation import Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


class DeviceSection(Section):
    memory_gib: Annotated[float, Field(gt=0)]
    """Memory of one trainer rank's device in GiB (2**30 bytes); on CPU, the rank's share of the machine's."""
    kind: Literal["gpu", "cpu"] = "gpu"
    """Kind of the device. Engines on GPUs sleep while a colocated trainer works, or have separate devices; on CPUs all
    processes of a machine hold their memory at the same time."""
    host_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of one node's host in GiB. `megarl check` estimates what offloaded roles, checkpoints, the weight sync and all
    processes take of it, and refuses what does not fit; null only prints the estimate."""
    transformer_engine: bool = True
    """Whether Transformer Engine runs the layers on GPUs, as on Hopper and newer ones in 16 bits. With false the estimate of
    memory is that of Megatron-core's own layers, which keep about 1.7 times as much."""
    tflops: Annotated[float, Field(gt=0)] | None = None
    """Sustained rate of one device in 10**12 floating-point operations a second, for the times that `megarl check --plan`
    estimates."""

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)


# The smallest block of the KV cache that vLLM's attention for CPUs takes without a warning.
CPU_BLOCK = 32


def is_for_cpus(recipe: Recipe) -> bool:
    """Whether `device.kind` is cpu; without `device` only a started run knows."""
    return recipe.device is not None and recipe.device.kind == "cpu"


def without_gpus(recipe: Recipe) -> Violations:
    """Features that need GPUs."""
    rollout, profile = recipe.rollout, recipe.telemetry.profile
    if profile is not None and profile.kind == "nsight":
        rule = "Nsight Systems captures what GPUs do, and the run is on CPUs"
        yield Violation("telemetry.profile.kind", profile.kind, rule, "torch")
    if not recipe.has_engines:
        return  # no engine runs
    if rollout.quantization is not None:
        rule = "vLLM multiplies FP8 blocks on GPUs, and the run is on CPUs"
        yield Violation("rollout.quantization", rollout.quantization, rule, "null")
    if rollout.layout.cuts_tokens:
        # Log-probabilities of vLLM's build for CPUs (0.32) were off by 2, before any sync. Sharded experts and pipeline
        # stages are right.
        rule = "over tensor and data-parallel ranks it gives wrong numbers in vLLM's build for CPUs, and the run is on CPUs"
        yield Violation("rollout.expert_parallel", True, rule, "false, or rollout.data: 1, or rollout.tensor: 1")


def with_gpus(recipe: Recipe) -> Violations:
    """Settings that GPUs do not allow, where CPUs do."""
    rollout = recipe.rollout
    if rollout.max_staleness and rollout.placement == "colocated" and recipe.has_engines:
        rule = "engines on the trainer's GPUs sleep while it works, and rollout.max_staleness has them sample meanwhile"
        yield Violation("rollout.placement", "colocated", rule, "separate, or rollout.max_staleness: 0")


def cpu_engine_args(recipe: Recipe, shape: ModelShape) -> Violations:
    """Engine arguments that break the actor's model on CPUs, and adapters that vLLM cannot apply there."""
    if recipe.sent_adapter is not None and shape.experts is not None:
        # vLLM 0.32 takes its Triton kernel for experts as soon as an engine has adapters, whatever their targets.
        rule = "vLLM runs adapters of models with experts on GPUs, and the run is on CPUs"
        yield Violation("actor.lora.send", "adapter", rule, "merged")
    if recipe.has_engines:
        needed = engine_choices(shape, recipe.actor.router_replay)[1]
        yield from refused_engine_args(recipe.rollout.engine_args, needed)


def refused_engine_args(given: Mapping[str, Any], needed: Mapping[str, Any]) -> Violations:
    """The recipe's engine arguments that differ from those that engines on CPUs need."""
    for name, value in needed.items():
        if name in given and given[name] != value:
            key = f"rollout.engine_args.{name}"
            yield Violation(key, given[name], f"engines on CPUs need {json.dumps(value)}", f"remove {key}")


def engine_choices(shape: ModelShape, record_routing: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """vLLM's arguments (0.32) for engines on CPUs: defaults that the recipe may change, and values that engines need.

    Only whole cache blocks are shared. vLLM's default block for CPUs has 128 tokens, so a shorter prompt would be computed
    once for each completion of its group. Latent attention without AMX shares none and sets its block size. vLLM's rotary
    kernel for CPUs takes the stride between heads for the stride between tokens; latent attention passes a part of each
    head, and every position but the first is wrong. There torch computes the rotary embedding.
    """
    chosen: dict[str, Any] = {"enforce_eager": True}
    # A prompt prefilled in chunks rewinds its random generator. CPU generators cannot ("CPU Generator does not use offset",
    # vLLM 0.32), which ends the engine.
    needed: dict[str, Any] = {"enable_chunked_prefill": False}
    if shape.latent is None:
        chosen["block_size"] = CPU_BLOCK
    else:
        needed["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    if record_routing:
        # vLLM's recorder remembers cached prompts; megarl's must see every token.
        needed["enable_prefix_caching"] = False
    return chosen, needed
