"""Rules on what a recipe says in Megatron's own words: recompute, and further options of its `TransformerConfig`."""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Iterator, Set
from typing import Any

from megarl.models import ModelShape
from megarl.models.megatron_weights import chunk_layers
from megarl.recipe.cpu_rules import is_for_cpus
from megarl.recipe.feature_rules import trained_sections
from megarl.recipe.foreign_fields import dataclass_fields, needed_type
from megarl.recipe.nearest import closest_text
from megarl.recipe.recipe import Recipe
from megarl.recipe.sections import MemorySection
from megarl.recipe.violation import Violation

Violations = Iterator[Violation]

_CONFIG = "megatron.core.transformer.transformer_config"
_DEFAULTS = {name: field.default for name, field in MemorySection.model_fields.items()}

# Fields of a TransformerConfig that megarl sets itself, and where a user sets what they say.
_OWNERS = {
    "model.path, whose config.json says it": """
        num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size normalization
        layernorm_epsilon layernorm_zero_centered_gamma softmax_scale softmax_type gated_linear_unit activation_func
        add_bias_linear add_qkv_bias qk_layernorm qk_l2_norm num_moe_experts moe_ffn_hidden_size
        moe_shared_expert_intermediate_size moe_layer_freq moe_router_topk moe_router_score_function
        moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk
        moe_router_enable_expert_bias multi_latent_attention mtp_num_layers window_size window_attn_skip_freq
        rotary_interleaved no_rope_freq experimental_attention_variant is_hybrid_model heterogeneous_block_specs""",
    "ROLE.layout": """
        tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size sequence_parallel
        context_parallel_size hierarchical_context_parallel_sizes expert_model_parallel_size expert_tensor_parallel_size
        pipeline_model_parallel_layout num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split variable_seq_lengths
        overlap_p2p_comm batch_p2p_comm deallocate_pipeline_outputs""",
    "trainer.precision": "params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype",
    "trainer.fp8": "fp8 fp8_recipe fp8_param fp8_amax_history_len fp8_amax_compute_algo fp4 fp4_recipe fp4_param",
    "ROLE.memory.recompute": "recompute_granularity moe_layer_recompute",
    "ROLE.memory.recompute_modules": "recompute_modules",
    "ROLE.memory.recompute_method": "recompute_method",
    "ROLE.memory.recompute_num_layers": "recompute_num_layers",
    "ROLE.memory.offload_activations": """
        cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
        fine_grained_activation_offloading offload_modules""",
    "actor.router_replay": "moe_enable_routing_replay",
}
# Fields that megarl needs as they are.
FIXED = frozenset(
    """hidden_dropout attention_dropout moe_grouped_gemm moe_token_dispatcher_type moe_router_dtype
    moe_router_load_balancing_type moe_aux_loss_coeff moe_router_bias_update_rate moe_router_force_load_balancing
    moe_expert_capacity_factor moe_token_dropping gradient_accumulation_fusion calculate_per_token_loss init_method
    output_layer_init_method perform_initialization init_model_with_meta_device transformer_impl""".split()  # noqa: SIM905
)
OWNER_OF = {field: owner for owner, fields in _OWNERS.items() for field in fields.split()}
# Types of fields that a recipe has no words for.
_OBJECTS = re.compile(r"Callable|torch\.|ContextManager|RecipeConfig|AttnBackend")


def options(recipe: Recipe) -> Violations:
    """Each key of `trainer.megatron` is a field of megatron-core's TransformerConfig that megarl leaves alone. Where
    megatron-core is not installed its fields are not known."""
    fields = dataclass_fields(_CONFIG, "TransformerConfig") if recipe.trainer.megatron else None
    latent = (dataclass_fields(_CONFIG, "MLATransformerConfig") or {}).keys() - (fields or {}).keys()
    for name, value in recipe.trainer.megatron.items():
        key = f"trainer.megatron.{name}"
        if refusal := _refusal(name, key, latent):
            yield Violation(key, value, *refusal)
        elif fields is None:
            continue
        elif name in fields:
            yield from _type(key, value, fields[name])
        else:
            free = [field for field in fields if _refusal(field, key, latent) is None]
            nearest = closest_text(name, [*free, *OWNER_OF, *sorted(FIXED | latent)])
            rule = f"the TransformerConfig of megatron-core {importlib.metadata.version('megatron-core')} has no such field"
            way_out = f"trainer.megatron.{nearest}"
            if refusal := _refusal(nearest, key, latent):
                rule, way_out = f"{rule}, and of the nearest, {nearest}, holds: {refusal[0]}", refusal[1]
            yield Violation(key, value, rule, way_out)


def _refusal(name: str, key: str, latent: Set[str]) -> tuple[str, str] | None:
    """Why a recipe cannot set a field of Megatron's, and the way out of the recipe's `key`; None for a free field."""
    if name in OWNER_OF:
        return "megarl sets this field itself", OWNER_OF[name]
    if name in FIXED:
        return "megarl sets this field itself and needs it as it is", f"remove {key}"
    if name in latent:
        rule = "is a field of Megatron's latent attention; megarl has its own, which reads the model's config.json"
        return rule, f"remove {key}"
    return None


def _type(key: str, value: Any, annotation: str) -> Violations:
    """The value is of the field's type, where that is a plain one."""
    optional = re.fullmatch(r"Optional\[(.*)\]", annotation)
    inner = annotation if optional is None else optional[1]
    if _OBJECTS.search(inner):
        yield Violation(key, value, f"is a Python object ({annotation}), which a recipe cannot hold", f"remove {key}")
    elif words := needed_type(value, annotation):
        yield Violation(key, value, f"must be {words}: megatron-core says {annotation}")
    elif value is not None and inner.startswith("Literal["):
        words_of = re.findall(r"'([^']*)'", inner)
        if words_of and value not in words_of:
            yield Violation(key, value, f"must be one of {', '.join(words_of)}", closest_text(value, words_of))


def recompute(recipe: Recipe) -> Violations:
    """Settings of one kind of recompute are not given with another."""
    for role, section in trained_sections(recipe):
        memory, key = section.memory, f"{role}.memory"
        readers = {
            "recompute_modules": ("selective", memory.recompute_modules),
            "recompute_method": ("full", memory.recompute_method),
            "recompute_num_layers": ("full", memory.recompute_num_layers),
        }
        for name, (reader, value) in readers.items():
            if memory.recompute != reader and value != _DEFAULTS[name]:
                shown = list(value) if isinstance(value, tuple) else value
                rule = f"only {key}.recompute: {reader} reads it, and it is {memory.recompute}"
                yield Violation(f"{key}.{name}", shown, rule, f"{key}.recompute: {reader}, or remove {key}.{name}")
        modules = memory.recompute_modules
        if len(set(modules)) < len(modules):
            rule, way_out = "names a module twice", f"[{', '.join(dict.fromkeys(modules))}]"
            yield Violation(f"{key}.recompute_modules", list(modules), rule, way_out)
        if memory.recompute == "selective" and is_for_cpus(recipe):
            yield from without_transformer_engine(recipe, role)


def without_transformer_engine(recipe: Recipe, role: str) -> Violations:
    """To be called for a trained role whose layers are not Transformer Engine's."""
    modules = dict(trained_sections(recipe))[role].memory.recompute_modules
    foreign = [module for module in ("layernorm", "moe_act") if module in modules]
    if foreign:
        rule = f"Megatron recomputes {' and '.join(foreign)} in Transformer Engine's layers alone, and these are not"
        rest = [module for module in modules if module not in foreign] or ["core_attn"]
        yield Violation(f"{role}.memory.recompute_modules", list(modules), rule, f"[{', '.join(rest)}]")


def recomputed(recipe: Recipe, shape: ModelShape, role: str) -> Violations:
    """What is recomputed is there. To be called for roles that are trained."""
    memory = dict(trained_sections(recipe))[role].memory
    if memory.recompute == "full":
        layout = recipe.layout(role)
        if layout.stages or shape.num_layers % (layout.pipeline * layout.virtual_pipeline) == 0:
            places = [(stage, chunk) for stage in range(layout.pipeline) for chunk in range(layout.virtual_pipeline)]
            layers = sorted({len(chunk_layers(shape, layout, *place)) for place in places})
            key, number = f"{role}.memory.recompute_num_layers", memory.recompute_num_layers
            if number > layers[-1]:
                rule = f"a model chunk of the {role}'s pipeline stages has at most {layers[-1]} layers"
                yield Violation(key, number, rule, str(layers[-1]))
            elif memory.recompute_method == "uniform" and any(count % number for count in layers):
                # megatron-core 0.16.1 runs past the end of a chunk.
                rule = f"uniform recompute cuts each model chunk of the {role} evenly, and they have {layers} layers"
                yield Violation(key, number, rule, str(math.gcd(*layers)))
    if memory.recompute != "selective":
        return
    missing = _missing(shape, memory.recompute_modules)
    if recipe.trainer.fp8 == "delayed":
        missing |= {
            module: "has scales of FP8 that trainer.fp8: delayed takes from earlier passes, which a second pass changes"
            for module in ("layernorm", "moe_act")
        }
    for module in memory.recompute_modules:
        if module in missing:
            rest = [other for other in memory.recompute_modules if other not in missing] or ["core_attn"]
            rule = f"{module} {missing[module]}"
            yield Violation(f"{role}.memory.recompute_modules", list(memory.recompute_modules), rule, f"[{', '.join(rest)}]")


def _missing(shape: ModelShape, modules: tuple[str, ...]) -> dict[str, str]:
    """Modules that a model has none of, and why."""
    missing: dict[str, str] = {}
    if shape.experts is None:
        missing |= dict.fromkeys(("moe", "moe_act", "shared_experts"), "is a part of experts, and the model has none")
    elif not shape.experts.shared_ffn:
        missing["shared_experts"] = "is a part that the model's layers do not have"
    if "moe" in modules:
        missing |= dict.fromkeys(("moe_act", "shared_experts"), "is recomputed with moe already")
    if all(shape.has_experts(layer) for layer in range(shape.num_layers)):
        missing["mlp"] = "is a dense feed-forward network, and every layer of the model has experts"
    if shape.latent is None:
        missing["mla_up_proj"] = "is a part of latent attention, which the model does not have"
        if shape.experts is None:
            missing["layernorm"] = "of a dense model is fused into the next linear layer, which keeps only its input"
    return missing
