"""`rollout`: the vLLM engines, their layout and their arguments."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from megarl.models import ModelShape
from megarl.models import vllm_weights as vllm
from megarl.models.layout import RolloutLayout
from megarl.planner.engine_memory import cache_width, cached_layers
from megarl.planner.roles import BYTES
from megarl.recipe.device_section import is_for_cpus
from megarl.recipe.foreign_fields import dataclass_fields, option_rules
from megarl.recipe.section import Count, FilePath, Positive, Seconds, Section
from megarl.recipe.violation import Violation, Violations, closest_number

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


class RolloutSection(Section):
    max_new_tokens: Positive
    """Longest completion, in tokens."""
    engines: Positive = 1
    """vLLM engines."""
    placement: Literal["colocated", "separate"] = "colocated"
    """`colocated`: engines share the trainer's devices; on GPUs they sleep, without memory, from the end of a rollout to the
    sync. `separate`: on nodes without trainer ranks, or, if there are none, on devices without one. An engine lies on one
    node and on GPUs shares its devices with no other engine; on CPUs `megarl/cluster/cores.py` assigns the cores."""
    tensor: Positive = 1
    """Tensor-parallel ranks of one engine."""
    pipeline: Positive = 1
    """Pipeline stages of one engine; vLLM splits the layers, independent of the trainer's stages."""
    data: Positive = 1
    """Data-parallel ranks of one engine, which share its sequences and experts. Models without experts use more `engines`
    instead."""
    expert_parallel: bool = False
    """Each tensor and data-parallel rank of an engine holds whole experts; false shards each expert."""
    max_staleness: Count = 0
    """How many weight versions behind the trainer a trained token may be. 0 samples each batch with the newest weights,
    while the trainer waits; above 0 engines sample while the trainer works: on GPUs of their own, `placement: separate`."""
    window: Positive | None = None
    """Groups, in the order of their prompts, among which a step takes those that finish first: short answers cannot overtake
    more. null: the prompts of a step, or of two steps with `max_staleness` above 0."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Sampling temperature; the trainer divides its logits by it too. vLLM's least is 0.01."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Number format in the engines; null takes `trainer.precision`."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: engines hold the layers' linear weights as e4m3 with a scale for each 128 x 128 block, which trainer ranks
    quantise before they send them; null for none. vLLM has no kernels for most CPUs."""
    timeout_s: Seconds = 600.0
    """Deadline of every call to an engine; in a rollout, of an engine from one finished group to the next."""
    max_restarts: Count = 2
    """How often a dead engine is started again, and a group or turn whose tokens were lost sampled again, at most. After
    that the run goes on without the engine, or ends if it was the last one."""
    kv_cache_bytes: Positive | None = None
    """KV cache of one engine worker. null: on a GPU what weights, working memory and the trainer's idle roles leave of the
    device, up to all concurrent sequences at their longest; 256 MiB on CPUs."""
    memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """On a GPU, the share of the device's memory that must be free for an engine to start; null takes megarl's estimate of a
    worker: weights, `kv_cache_bytes`, working memory and CUDA graphs. `megarl check --plan` prints the largest share."""
    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM's engines, under vLLM's names (`AsyncEngineArgs`), as `{enforce_eager: true}`. They override
    megarl's defaults for a device; arguments that have a recipe key are refused."""
    replay: FilePath | None = None
    """Directory of dumped rollouts to read instead of running engines."""

    @property
    def layout(self) -> RolloutLayout:
        """How one engine is sharded over its workers."""
        return RolloutLayout(self.tensor, self.pipeline, self.data, self.expert_parallel)


# Families whose vLLM model (0.32) ends with an error on a pipeline stage that has no layer with experts.
EXPERTS_ON_EVERY_STAGE = ("mixtral", "qwen3_moe")


# Arguments of vLLM that `rollout.engine_args` must not set, and their recipe keys; "" where megarl needs one value.
OWNED_ENGINE_ARGS = {
    "model": "model.path",
    "dtype": "rollout.precision",
    "quantization": "rollout.quantization",
    "tensor_parallel_size": "rollout.tensor",
    "pipeline_parallel_size": "rollout.pipeline",
    "data_parallel_size": "rollout.data",
    "data_parallel_size_local": "rollout.data",
    "data_parallel_rank": "rollout.data",
    "prefill_context_parallel_size": "rollout.tensor",
    "nnodes": "rollout.engines",
    "enable_expert_parallel": "rollout.expert_parallel",
    "max_model_len": "rollout.max_new_tokens, with data.max_prompt_tokens",
    "max_num_seqs": "phases.rollout.max_concurrent",
    "kv_cache_memory_bytes": "rollout.kv_cache_bytes",
    "gpu_memory_utilization": "rollout.memory_utilization",
    "enable_sleep_mode": "rollout.placement",
    "sleep_mode_offload_cudagraph": "rollout.placement",
    "sleep_preserve_parameter_names": "rollout.placement",
    "enable_return_routed_experts": "actor.router_replay",
    "disable_log_stats": "run.trace",
    "enable_lora": "actor.lora.send",
    "max_loras": "actor.lora.send",
    "max_lora_rank": "actor.lora.rank",
    "lora_target_modules": "actor.lora.targets",
    "seed": "run.seed",
    "weight_transfer_config": "weight_sync",
    "worker_extension_cls": "",
    "distributed_executor_backend": "",
    "skip_tokenizer_init": "",
    "generation_config": "",
    "logprobs_mode": "",
}


def known_engine_args() -> dict[str, str] | None:
    """Names of vLLM's engine arguments and their annotations, from the source that is installed here; None without vLLM."""
    return dataclass_fields("vllm.engine.arg_utils", "AsyncEngineArgs")


def rollout_rules(recipe: Recipe) -> Violations:
    """Engine arguments exist and belong to no other key, and features of engines and stream go together, whatever the
    model."""
    rollout, given = recipe.rollout, recipe.rollout.engine_args
    refused = {
        name: (f"the recipe says it under {owner}" if owner else "megarl sets it, and works with no other value", owner)
        for name, owner in OWNED_ENGINE_ARGS.items()
    }
    known = known_engine_args() if given else None
    yield from option_rules("rollout.engine_args", given, known, refused, "vLLM's AsyncEngineArgs")
    tokens = given.get("max_num_batched_tokens")
    if tokens is not None and (type(tokens) is not int or tokens < 1):  # sizes are computed with it
        yield Violation("rollout.engine_args.max_num_batched_tokens", tokens, "must be a whole number from 1 on", "8192")
    yield from _stream_rules(recipe)
    if rollout.replay is not None and not Path(rollout.replay).is_dir():
        way_out = "the rollouts directory of a run with run.dump_rollouts: true"
        yield Violation("rollout.replay", rollout.replay, "the directory does not exist", way_out)
    if rollout.expert_parallel and rollout.tensor * rollout.data == 1:
        rule = "shards experts over rollout.tensor x rollout.data ranks, of which there is one"
        yield Violation("rollout.expert_parallel", True, rule, "false")
    if recipe.actor.router_replay:
        rule = "with actor.router_replay one worker records which experts were chosen, and"
        if rollout.pipeline > 1:
            stage = "a pipeline stage knows only those of its layers"
            yield Violation("rollout.pipeline", rollout.pipeline, f"{rule} {stage}", "1, with more rollout.tensor")
        if rollout.data > 1:
            rank = "a data-parallel rank knows only those of its tokens"
            yield Violation("rollout.data", rollout.data, f"{rule} {rank}", f"1, and {_more_engines(recipe)}")
    if rollout.replay is not None or rollout.quantization is None or is_for_cpus(recipe):
        return  # on CPUs `without_gpus` refuses FP8 blocks
    if recipe.rollout_precision == "fp32":
        rule = "FP8 weights work with activations of 16 bits, and engines run in fp32"
        yield Violation("rollout.quantization", rollout.quantization, rule, "rollout.precision: bf16")
    if recipe.weight_sync.mode == "checkpoint":
        rule = "weight_sync.mode checkpoint sends weights that nobody quantised"
        yield Violation("rollout.quantization", rollout.quantization, rule, "weight_sync.mode: reshard")


def _stream_rules(recipe: Recipe) -> Violations:
    """A window that no step could use, and features that need a step's rollouts to be whole before it trains."""
    rollout, prompts = recipe.rollout, recipe.phases.rollout.prompts
    if recipe.run.is_supervised:
        return  # `supervised_rules` refuses every key of a stream
    staleness, most = rollout.max_staleness, (1 + rollout.max_staleness) * prompts
    if rollout.window is not None and rollout.window < prompts:
        rule = f"a step takes phases.rollout.prompts = {prompts} groups of the window"
        yield Violation("rollout.window", rollout.window, rule, str(prompts))
    elif rollout.window is not None and rollout.window > most:
        rule = f"no more than (1 + rollout.max_staleness) x phases.rollout.prompts = {most} groups are under way"
        yield Violation("rollout.window", rollout.window, rule, str(most))
    if staleness == 0:
        return
    if rollout.replay is not None:
        rule = "rollout.replay has a fixed batch for each step, and no engine that could sample ahead"
        yield Violation("rollout.max_staleness", staleness, rule, "0, or remove rollout.replay")
    if recipe.run.dump_rollouts:
        rule = "writes rollouts for rollout.replay, which knows no staleness, and rollout.max_staleness is above 0"
        yield Violation("run.dump_rollouts", True, rule, "false; telemetry.samples_per_step keeps completions to look at")
    if recipe.run.preemption == "abandon":
        rule = "copies the run's state before each step, which with rollout.max_staleness above 0 has all groups under way"
        yield Violation("run.preemption", "abandon", rule, "finish, or rollout.max_staleness: 0")


def engines_fit_model(recipe: Recipe, shape: ModelShape) -> Violations:
    """An engine's layout divides the actor's model, and its KV cache holds a whole sequence."""
    rollout = recipe.rollout
    yield from engine_divides_model("rollout", rollout.layout, shape)
    if shape.experts is None and rollout.data > 1:
        # vLLM 0.32 makes engines of them that know nothing of each other (`reconfigure_for_independent_dp_rank`).
        rule = "shards experts, and the model has none: its data-parallel ranks would be engines like any others"
        yield Violation("rollout.data", rollout.data, rule, f"1, and {_more_engines(recipe)}")
    yield from _stages_hold_experts(recipe, shape)
    # The stage with most layers has the largest cache. A cache of null has a legal size (`sizes.py`).
    token_bytes = cached_layers(shape, rollout.layout) * cache_width(shape, rollout.tensor) * BYTES[recipe.rollout_precision]
    needed = token_bytes * recipe.max_sequence_tokens
    if rollout.kv_cache_bytes is not None and rollout.kv_cache_bytes < needed:
        rule = f"must hold one sequence of {recipe.max_sequence_tokens} tokens at {token_bytes} bytes a token"
        yield Violation("rollout.kv_cache_bytes", rollout.kv_cache_bytes, rule, str(needed))


def engine_divides_model(key: str, layout: RolloutLayout, shape: ModelShape) -> Violations:
    """The layout of the engine whose section is under `key` divides a model."""

    def is_legal(name: str, size: int) -> bool:
        changed = RolloutLayout(**asdict(layout) | {name: size})
        return all(fault != name for fault, _ in vllm.layout_faults(shape, changed))

    most = max(shape.heads, shape.num_layers)
    for name, rule in vllm.layout_faults(shape, layout):
        value = getattr(layout, name)
        nearest = "false" if name == "expert_parallel" else closest_number(value, partial(is_legal, name), most) or "1"
        yield Violation(f"{key}.{name}", value, rule, nearest)


def _more_engines(recipe: Recipe) -> str:
    return f"rollout.engines: {recipe.rollout.engines * recipe.rollout.data}"


def _stages_hold_experts(recipe: Recipe, shape: ModelShape) -> Violations:
    stages, layers = recipe.rollout.pipeline, shape.num_layers
    # vLLM ends with an error on a stage without any of the parameters that engines keep through their sleep.
    sleeps = recipe.rollout.placement == "colocated" and recipe.device is not None and recipe.device.kind == "gpu"
    keeps_bias = sleeps and bool(vllm.fixed_parameters(shape))

    def without_experts(size: int) -> list[range]:
        of_stages = [vllm.stage_layers(layers, size, stage) for stage in range(size)]
        return [held for held in of_stages if not any(map(shape.has_experts, held))]

    empty = without_experts(stages) if stages <= layers and (keeps_bias or shape.family in EXPERTS_ON_EVERY_STAGE) else []
    if empty:
        what = "sleep" if keeps_bias else "start"
        rule = f"leaves a stage with layers {empty[0][0]} to {empty[0][-1]}, none with experts, where vLLM does not {what}"
        nearest = closest_number(stages, lambda size: not without_experts(size), layers)
        yield Violation("rollout.pipeline", stages, rule, nearest)
