"""Rules on how rollout engines are cut: what needs no model, and what a model's layers, heads and experts allow."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.models import ModelShape
from megarl.models import vllm_weights as vllm
from megarl.models.megatron_weights import checkpoint_sizes
from megarl.planner.engine_memory import cache_width, cached_layers
from megarl.planner.roles import BYTES
from megarl.recipe.foreign_fields import dataclass_fields, needed_type
from megarl.recipe.layout_rules import divisors, tensor_size
from megarl.recipe.nearest import closest_number, closest_text
from megarl.recipe.recipe import Recipe
from megarl.recipe.violation import Violation

Violations = Iterator[Violation]
# At most that much of a bucket is taken by what lies beside a row (`sync/stream.py`).
BESIDE_ROW_BYTES = 256
# Families whose vLLM model (0.32) ends with an error on a pipeline stage that has no layer with experts.
EXPERTS_ON_EVERY_STAGE = ("mixtral", "qwen3_moe")
# Arguments of vLLM that `rollout.engine_args` must not say, and the keys that say them; "" where megarl needs one value.
OWNED_ENGINE_ARGS = {
    "model": "model.path",
    "dtype": "rollout.precision",
    "quantization": "rollout.quantization",
    "tensor_parallel_size": "rollout.tensor",
    "pipeline_parallel_size": "rollout.pipeline",
    "data_parallel_size": "rollout.data",
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
    "seed": "run.seed",
    "weight_transfer_config": "weight_sync",
    "worker_extension_cls": "",
    "distributed_executor_backend": "",
    "skip_tokenizer_init": "",
    "generation_config": "",
    "logprobs_mode": "",
}


def concurrent(recipe: Recipe) -> Violations:
    """Data-parallel ranks decode side by side, each as many sequences."""
    count, ranks = recipe.phases.rollout.max_concurrent, recipe.rollout.data
    if count is not None and count % ranks:
        nearest = closest_number(count, lambda size: size % ranks == 0, count + ranks)
        rule = f"must be a multiple of the {ranks} data-parallel ranks of an engine (rollout.data)"
        yield Violation("phases.rollout.max_concurrent", count, rule, nearest)


def routed_experts(recipe: Recipe) -> Violations:
    """The experts that tokens chose are asked of one worker, which must know those of all layers and tokens."""
    if not recipe.actor.router_replay:
        return
    rule = "with actor.router_replay one worker says which experts were chosen, and {}"
    if recipe.rollout.pipeline > 1:
        what = rule.format("a pipeline stage knows those of its own layers")
        yield Violation("rollout.pipeline", recipe.rollout.pipeline, what, "1, with more rollout.tensor")
    if recipe.rollout.data > 1:
        what = rule.format("a data-parallel rank knows those of its own tokens")
        yield Violation("rollout.data", recipe.rollout.data, what, f"1, and {_more_engines(recipe)}")


def known_engine_args() -> dict[str, str] | None:
    """Names of vLLM's engine arguments and their annotations, from the source that is installed here; None without vLLM."""
    return dataclass_fields("vllm.engine.arg_utils", "AsyncEngineArgs")


def engine_args(recipe: Recipe) -> Violations:
    """Arguments that are passed on exist, and no other key says them."""
    given = recipe.rollout.engine_args
    known = known_engine_args() if given else None
    for name, value in given.items():
        key = f"rollout.engine_args.{name}"
        if name in OWNED_ENGINE_ARGS:
            yield Violation(key, value, *_owner(name, key))
        elif known is not None and name not in known:
            free = sorted(known.keys() - OWNED_ENGINE_ARGS.keys())
            nearest, rule = closest_text(name, [*free, *OWNED_ENGINE_ARGS]), "vLLM's AsyncEngineArgs has no such argument"
            if nearest in OWNED_ENGINE_ARGS:
                reason, way_out = _owner(nearest, key)
                yield Violation(key, value, f"{rule}, and of the nearest, {nearest}, holds: {reason}", way_out)
            else:
                yield Violation(key, value, rule, f"rollout.engine_args.{nearest}")
        elif words := needed_type(value, (known or {}).get(name, "")):
            yield Violation(key, value, f"must be {words}")
    tokens = given.get("max_num_batched_tokens")
    if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens < 1:
        yield Violation("rollout.engine_args.max_num_batched_tokens", tokens, "must be at least 1", "1")


def _owner(name: str, key: str) -> tuple[str, str]:
    """Why `rollout.engine_args` must not hold an argument, and the way out of the recipe's `key`."""
    owner = OWNED_ENGINE_ARGS[name]
    if not owner:
        return "megarl sets it, and works with no other value", f"remove {key}"
    return f"the recipe says it under {owner}", owner


def dealt_over_one(recipe: Recipe) -> Violations:
    """Experts are dealt over several ranks."""
    if recipe.rollout.expert_parallel and recipe.rollout.tensor * recipe.rollout.data == 1:
        rule = "deals experts over rollout.tensor x rollout.data ranks, of which there is one"
        yield Violation("rollout.expert_parallel", True, rule, "false")


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


def cut(recipe: Recipe, shape: ModelShape) -> Violations:
    """An engine's layout fits the actor's model; `vllm.check_layout` proves it."""
    tensor, rows = recipe.rollout.tensor, vllm.padded_vocab(shape)
    broken = list(tensor_size("rollout.tensor", tensor, shape))
    yield from broken
    if not broken and rows % tensor:
        yield Violation("rollout.tensor", tensor, f"must divide vLLM's {rows} padded vocabulary rows", "1")
    yield from _stages(recipe, shape)
    if shape.experts is not None:
        yield from _experts(recipe, shape) if not broken else ()
        return
    if recipe.rollout.expert_parallel:
        yield Violation("rollout.expert_parallel", True, "the model has no experts", "false")
    if recipe.rollout.data > 1:
        # vLLM 0.32 makes engines of them that know nothing of each other (`reconfigure_for_independent_dp_rank`).
        rule = "cuts experts, and the model has none: its data-parallel ranks would be engines like any others"
        yield Violation("rollout.data", recipe.rollout.data, rule, f"1, and {_more_engines(recipe)}")


def _more_engines(recipe: Recipe) -> str:
    return f"rollout.engines: {recipe.rollout.engines * recipe.rollout.data}"


def _stages(recipe: Recipe, shape: ModelShape) -> Violations:
    stages, layers = recipe.rollout.pipeline, shape.num_layers
    if stages > layers:
        rule = f"must be at most the {layers} layers of the model: each stage has one"
        yield Violation("rollout.pipeline", stages, rule, str(layers))
    elif (shape.family in EXPERTS_ON_EVERY_STAGE or _keeps_bias(recipe, shape)) and not _experts_everywhere(shape, stages):
        held = next(one for one in _layers_of_stages(shape, stages) if not any(map(shape.has_experts, one)))
        what = "sleep" if _keeps_bias(recipe, shape) else "start"
        rule = f"leaves a stage with layers {held[0]} to {held[-1]}, none with experts, where vLLM does not {what}"
        nearest = closest_number(stages, lambda size: _experts_everywhere(shape, size), layers)
        yield Violation("rollout.pipeline", stages, rule, nearest)


def _keeps_bias(recipe: Recipe, shape: ModelShape) -> bool:
    """Whether engines keep parameters through their sleep: vLLM ends with an error on a stage that has none of them."""
    sleeps = recipe.rollout.placement == "colocated" and recipe.device is not None and recipe.device.kind == "gpu"
    return sleeps and bool(vllm.fixed_parameters(shape))


def _layers_of_stages(shape: ModelShape, stages: int) -> list[range]:
    return [vllm.stage_layers(shape.num_layers, stages, stage) for stage in range(stages)]


def _experts_everywhere(shape: ModelShape, stages: int) -> bool:
    return all(any(map(shape.has_experts, layers)) for layers in _layers_of_stages(shape, stages))


def _experts(recipe: Recipe, shape: ModelShape) -> Violations:
    """Experts are cut or dealt over the tensor ranks of all data-parallel ranks."""
    assert shape.experts is not None, "a model with experts"
    rollout, count, rows = recipe.rollout, shape.experts.count, shape.experts.ffn
    ranks, key = rollout.tensor * rollout.data, "rollout.data" if rollout.data > 1 else "rollout.tensor"
    value = rollout.data if rollout.data > 1 else rollout.tensor
    product = f"rollout.tensor x rollout.data = {ranks}"
    if ranks > count and (rollout.expert_parallel or rollout.tensor > count):
        most = str(max(1, count // rollout.tensor)) if rollout.data > 1 else str(count)
        yield Violation(key, value, f"makes {product}, and the model has {count} experts", most)
    elif not rollout.expert_parallel and rows % ranks:
        fits = {size // (ranks // value) for size in divisors(rows) if size % (ranks // value) == 0}
        nearest = closest_number(value, fits.__contains__, rows)
        rule = f"makes {product}, which must divide the {rows} rows of an expert"
        yield Violation(key, value, rule, f"{nearest or '1'}, or rollout.expert_parallel: true")


def kv_cache(recipe: Recipe, shape: ModelShape) -> Violations:
    """The cache of the stage with most layers holds a whole sequence; one of null does (`engine_sizes.py`)."""
    width = cache_width(shape, recipe.rollout.tensor) * BYTES[recipe.rollout_precision]
    token_bytes = cached_layers(shape, recipe.rollout.layout) * width
    needed = token_bytes * recipe.max_sequence_tokens
    if recipe.rollout.kv_cache_bytes is not None and recipe.rollout.kv_cache_bytes < needed:
        rule = f"must hold one sequence of {recipe.max_sequence_tokens} tokens at {token_bytes} bytes a token"
        yield Violation("rollout.kv_cache_bytes", recipe.rollout.kv_cache_bytes, rule, str(needed))


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
