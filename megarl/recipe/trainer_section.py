"""`trainer`: the trainer processes, their precision, and Megatron's own options."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from megarl.models import ModelShape
from megarl.recipe.device_section import is_for_cpus
from megarl.recipe.foreign_fields import dataclass_fields, option_rules
from megarl.recipe.layout_section import layout_owner
from megarl.recipe.section import BrokenRules, Positive, Seconds, Section
from megarl.recipe.violation import Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


class TrainerSection(Section):
    ranks: Positive
    """Trainer processes; the data-parallel size is what the layout leaves of them."""
    precision: Literal["fp32", "bf16", "fp16"]
    """Number format of weights and activations in the trainer. Gradients, the optimizer's weights and moments are fp32.
    `fp16` scales the loss; an update that overflows is skipped and counted (`actor/skipped_updates`)."""
    initial_loss_scale: Annotated[float, Field(ge=1)] = 65536.0
    """First loss scale of `precision: fp16`; overflows lower it, good updates raise it."""
    fp8: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] | None = None
    """Transformer Engine's FP8 recipe for the layers' matrix products, with `precision: bf16`; null for none. Needs a GPU
    with FP8."""
    collective_timeout_s: Seconds = 600.0
    """Deadline of every collective; half of it is the deadline of a machine that cannot be reached."""
    megatron: dict[str, Any] = {}
    """Further fields of Megatron's `TransformerConfig`, for every role. Fields that megarl sets are refused, except the
    fusions."""
    threads: Positive = 1
    """CPU threads of each trainer process."""
    compile: bool = False
    """Compile log-probabilities and entropy with torch.compile. A compiler that fails ends the run. Other ranks wait for a
    compiling rank at most `watchdog.first_step_s`."""

    def broken_rules(self) -> BrokenRules:
        # The default may stand: a resolved recipe writes it out.
        if self.precision != "fp16" and self.initial_loss_scale != TrainerSection.model_fields["initial_loss_scale"].default:
            yield "initial_loss_scale", f"only fp16 scales the loss, and trainer.precision is {self.precision}", "remove it"
        if self.fp8 is not None and self.precision != "bf16":
            rule = f"FP8 products work on bf16 weights, and trainer.precision is {self.precision}"
            yield "fp8", rule, "trainer.precision: bf16, or remove trainer.fp8"

    @property
    def token_multiple(self) -> int:
        """FP8 products need a multiple of this many tokens a rank: `mxfp8` scales 32 rows, other kernels take 16."""
        return {None: 1, "mxfp8": 32}.get(self.fp8, 16)


# Transformer Engine's FP8 products need weight sizes that are multiples of this.
FP8_MULTIPLE = 16


_CONFIG = "megatron.core.transformer.transformer_config"


# Fields of a TransformerConfig that megarl sets, by the recipe key for each.
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
    "ROLE.memory.recompute": "recompute_granularity recompute_method recompute_num_layers moe_layer_recompute",
    "ROLE.memory.recompute_modules": "recompute_modules",
    "ROLE.memory.offload_activations": """
        cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
        fine_grained_activation_offloading offload_modules""",
    "actor.router_replay": "moe_enable_routing_replay",
}


# Fields that must keep megarl's value.
FIXED = frozenset(
    """hidden_dropout attention_dropout moe_grouped_gemm moe_token_dispatcher_type moe_router_dtype
    moe_router_load_balancing_type moe_aux_loss_coeff moe_router_bias_update_rate moe_router_force_load_balancing
    moe_expert_capacity_factor moe_token_dropping gradient_accumulation_fusion calculate_per_token_loss init_method
    output_layer_init_method perform_initialization init_model_with_meta_device transformer_impl""".split()  # noqa: SIM905
)


OWNER_OF = {field: owner for owner, fields in _OWNERS.items() for field in fields.split()}


def trainer_rules(recipe: Recipe) -> Violations:
    """FP8 has a GPU, and each option of `trainer.megatron` is a TransformerConfig field that megarl leaves alone."""
    trainer = recipe.trainer
    if trainer.fp8 is not None and is_for_cpus(recipe):
        yield Violation("trainer.fp8", trainer.fp8, "FP8 products run on GPUs, and device.kind is cpu", "remove trainer.fp8")
    fields = dataclass_fields(_CONFIG, "TransformerConfig") if trainer.megatron else None
    latent = (dataclass_fields(_CONFIG, "MLATransformerConfig") or {}).keys() - (fields or {}).keys() if fields else ()
    refused = {name: ("megarl sets this field itself", owner) for name, owner in OWNER_OF.items()}
    refused |= dict.fromkeys(sorted(FIXED), ("megarl sets this field itself and needs it as it is", ""))
    rule = "is a field of Megatron's latent attention; megarl has its own, which reads the model's config.json"
    refused |= {name: (rule, "") for name in sorted(latent) if name not in refused}
    owner = "" if fields is None else f"the TransformerConfig of megatron-core {importlib.metadata.version('megatron-core')}"
    yield from option_rules("trainer.megatron", trainer.megatron, fields, refused, owner)


def fp8_fits_model(recipe: Recipe, shape: ModelShape, role: str) -> Violations:
    """FP8 kernels take the sizes that a tensor rank of the role multiplies."""
    if recipe.trainer.fp8 is None:
        return
    section = recipe.layout_section(role)
    tensor = section.tensor
    sizes = {
        "hidden size": shape.hidden,
        "attention width": shape.heads * shape.head_dim // tensor,
        "feed-forward rows": shape.ffn // tensor,
    }
    if shape.latent is not None:
        latent = shape.latent
        sizes["attention width"] = shape.heads * latent.value_dim // tensor
        sizes["rows of queries"] = shape.heads * latent.key_dim // tensor
        sizes["rows of keys and values"] = shape.heads * (latent.plain_dim + latent.value_dim) // tensor
        sizes |= {"query rank": latent.query_rank, "key-value rank": latent.key_value_rank}
    if shape.experts is not None:
        sizes["rows of an expert"] = shape.experts.ffn // (section.expert_tensor or tensor)
    odd = [f"{name} {size}" for name, size in sizes.items() if size % FP8_MULTIPLE]
    if odd:
        rule = f"FP8 products want multiples of {FP8_MULTIPLE}, and a tensor rank of the {role} has {', '.join(odd)}"
        yield Violation(f"{layout_owner(recipe, role)}.layout.tensor", tensor, rule, "a smaller one, or remove trainer.fp8")
