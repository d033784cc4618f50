"""Build the Megatron model of a role from a `ModelShape` and a layout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megarl import platform  # before megatron.core: on a machine without CUDA it makes it importable
from megarl.megatron.lora import CHILD, Adapter, MergedShards
from megarl.megatron.parallel import virtual_pipeline
from megarl.models import ModelShape
from megarl.models.attention import PackedAttention, Packing
from megarl.models.latent_attention import latent_attention
from megarl.models.layers import (
    ACTIVATIONS,
    RMSNorm,
    SandwichLayer,
    ValueHead,
    WindowedSelfAttention,
    scale_embedding,
)
from megarl.models.layout import Layout
from megarl.models.megatron_weights import chunk_prefix, padded_vocab
from megarl.models.rotary import inverse_frequencies, token_angles
from megarl.recipe.role_sections import FreezeSection, MemorySection

from megatron.core import parallel_state  # isort: skip
from megatron.core.models.gpt import GPTModel  # isort: skip
from megatron.core.models.gpt import gpt_layer_specs  # isort: skip
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip
from megatron.core.transformer.moe.moe_layer import MoELayer  # isort: skip
from megatron.core.transformer.moe.router import TopKRouter  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build  # isort: skip
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # isort: skip

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Hybrid: more digits forward, more range for gradients (Micikevicius et al. 2022, sec. 3.2). With block-wise scales
# gradients need no extra range.
_FP8_FORMAT = {"tensorwise": "hybrid", "delayed": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}

# Roles with a scalar head, and the name of its output.
SCALAR_ROLES = {"critic": "values", "reward_model": "scores"}


class DecoderModel(GPTModel):
    """A GPTModel that ends before the vocabulary and returns only the hidden rows that a phase needs.

    Set `head_positions` [n] before a forward pass. The rows [n, 1, hidden] and `head_weight` go to `LogProbabilities`, which
    never makes all logits at once; a value head is applied here. Under sequence parallelism the rows are gathered first; the
    head's gradient is whole on every tensor rank, and each rank takes its rows of it.
    """

    head_positions: Tensor | None = None

    def _preprocess(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        # megatron-core makes the angles of positions 0, 1, 2, ...; here each token gets those of its position.
        inputs = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if not isinstance(packed_seq_params, Packing):
            return inputs
        embedded, _, *more = inputs
        return embedded, token_angles(self.rotary_pos_emb.inv_freq, kwargs["position_ids"][0]), *more

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # hidden_states [slots, 1, hidden], under sequence parallelism [slots / tensor, 1, hidden]
        if self.post_process and self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        if self.post_process and self.head_positions is not None:
            hidden_states = hidden_states.index_select(0, self.head_positions)
        if self.post_process and not isinstance(self.output_layer, ValueHead):
            return hidden_states
        return super()._postprocess(hidden_states, *args, **kwargs)

    @property
    def head_weight(self) -> Tensor:
        """This rank's rows of the vocabulary [vocabulary / tensor, hidden], on the last stage."""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight


def _leave(weight: Tensor) -> Tensor:
    """Skip the initialisation: every weight is read from the checkpoint."""
    return weight


def transformer_config(
    shape: ModelShape,
    layout: Layout,
    precision: str,
    fp8: str | None = None,
    memory: MemorySection | None = None,
    options: Mapping[str, Any] | None = None,
    router_replay: bool = False,
) -> TransformerConfig:
    """Return megatron-core's configuration of a decoder; `options` is `trainer.megatron`.

    `precision` is "fp32", "bf16" or "fp16" (weights and activations), `fp8` None or a Transformer Engine recipe for the
    matrix products of the layers. Raises ValueError if megatron-core refuses the options."""
    spec = spec_name(precision)
    settings = (
        _sizes(shape)
        | _experts(shape, spec)
        | _layout_settings(shape, layout)
        | _precision_settings(precision, fp8)
        | _recompute_settings(memory or MemorySection())
        | fusion_settings(shape, spec, router_replay)
        # Not perform_initialization=False, which leaves out the attributes that tell a tensor-parallel shard from a replica;
        # the gradient norm would then count the shards of one rank only.
        | dict(init_method=_leave, output_layer_init_method=_leave)
    )
    try:
        config = TransformerConfig(**settings | dict(options or {}))
    except (TypeError, ValueError, AssertionError) as error:
        if not options:
            raise
        raise ValueError(f"trainer.megatron = {dict(options)}: megatron-core refuses it: {error}") from error
    if memory is not None and memory.recompute == "selective" and "mla_up_proj" in memory.recompute_modules:
        config.recompute_modules.append("mla_up_proj")  # for megarl's latent attention
    return config


def _precision_settings(precision: str, fp8: str | None) -> dict[str, Any]:
    dtype = DTYPES[precision]
    settings = dict(params_dtype=dtype, pipeline_dtype=dtype, bf16=precision == "bf16", fp16=precision == "fp16")
    if fp8 is None:
        return settings
    # The length of Transformer Engine's own history of maxima.
    history = dict(fp8_amax_history_len=1024, fp8_amax_compute_algo="max") if fp8 == "delayed" else {}
    return {**settings, "fp8": _FP8_FORMAT[fp8], "fp8_recipe": fp8, **history}


def _recompute_settings(memory: MemorySection) -> dict[str, Any]:
    if memory.recompute == "none":
        return {}
    settings: dict[str, Any] = {"recompute_granularity": memory.recompute}
    if memory.recompute == "selective":  # megatron-core refuses `mla_up_proj` for any latent attention but its own
        return settings | {"recompute_modules": [name for name in memory.recompute_modules if name != "mla_up_proj"]}
    return settings | {"recompute_method": "uniform", "recompute_num_layers": 1}


def fusion_settings(shape: ModelShape, spec: str, router_replay: bool) -> dict[str, bool]:
    """Fuse operations of a layer. The kernels come from Transformer Engine (2.7 or newer) or Triton, so the local spec has
    none."""
    if spec == "local":
        return {}
    has_experts = shape.experts is not None
    return dict(
        # megarl's own attention has per-token angles, and Megatron's fused rotation drops YaRN's factor.
        apply_rope_fusion=not shape.has_own_attention,
        bias_activation_fusion=shape.activation == "silu",  # the only gate that megatron-core and megarl share
        moe_permute_fusion=has_experts,
        # The fused router ignores `router_replay` (megatron-core 0.16 and 0.19).
        moe_router_fusion=has_experts and not router_replay,
    )


def _sizes(shape: ModelShape) -> dict[str, Any]:
    """Sizes and modules of every decoder layer."""
    return dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        layernorm_zero_centered_gamma=shape.norm_offset,
        softmax_scale=shape.attention_scale,
        gated_linear_unit=True,
        activation_func=ACTIVATIONS[shape.activation],
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        # Also in the spec; without this field the q/k-norm gradients are silently not summed over the tensor group.
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def _experts(shape: ModelShape, spec: str) -> dict[str, Any]:
    """Routing and experts, without capacity limits or dropped tokens.

    There is no auxiliary loss: it balances experts in pretraining, and would pull a policy away from its reward. For the
    same reason the bias of the experts' choice stays as the checkpoint has it.
    """
    # variable_seq_lengths is refused under any other dispatcher, for dense models too (megatron-core 0.16 and 0.19).
    dispatcher = {"moe_token_dispatcher_type": "alltoall"}
    experts = shape.experts
    if experts is None:
        return dispatcher
    grouped = experts.groups > 1
    return dispatcher | dict(
        num_moe_experts=experts.count,
        moe_ffn_hidden_size=experts.ffn,
        moe_shared_expert_intermediate_size=experts.shared_ffn or None,
        moe_layer_freq=[int(shape.has_experts(layer)) for layer in range(shape.num_layers)],
        moe_grouped_gemm=spec == "transformer_engine",
        moe_router_topk=experts.per_token,
        moe_router_score_function=experts.scoring,
        # A softmax over the chosen scores equals a softmax over all scores normalised over the chosen ones, as Qwen3-MoE
        # (norm_topk_prob) and Mixtral compute it. Sigmoid scores are always normalised.
        moe_router_pre_softmax=experts.scoring == "softmax" and not experts.normalise,
        moe_router_topk_scaling_factor=experts.scale if experts.scale != 1.0 else None,
        moe_router_num_groups=experts.groups if grouped else None,
        moe_router_group_topk=experts.chosen_groups if grouped else None,
        moe_router_enable_expert_bias=experts.bias,
        moe_router_bias_update_rate=0.0,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


def _layout_settings(shape: ModelShape, layout: Layout) -> dict[str, Any]:
    chunks = [["decoder"] * count for count in layout.stages]
    if chunks:
        chunks[0].insert(0, "embedding")
        chunks[-1].append("loss")
    return dict(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=virtual_pipeline(layout),
        pipeline_model_parallel_layout=chunks or None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor_size,
        # In a virtual pipeline forward and backward messages go the same way, and a batch would mix them up (megatron-core
        # 0.16 and 0.19).
        overlap_p2p_comm=layout.virtual_pipeline > 1,
        batch_p2p_comm=layout.virtual_pipeline == 1,
        # megatron-core refuses it for one tensor rank.
        sequence_parallel=layout.sequence_parallel and layout.tensor > 1,
        variable_seq_lengths=layout.pipeline > 1,
        # A stage frees the output that it has sent. Not in a virtual pipeline, where megatron-core (0.16 and 0.19) frees it
        # before the send has read it, which gives wrong losses.
        deallocate_pipeline_outputs=layout.pipeline > 1 and layout.virtual_pipeline == 1,
    )


# From this compute capability on Transformer Engine (2.20) runs packed sequences with cuDNN, in 16-bit formats. Elsewhere it
# computes the scores between all sequences, and does not support context parallelism.
PACKED_ATTENTION_CAPABILITY = (9, 0)


def spec_name(precision: str) -> str:
    """Return the layer spec of this process: "transformer_engine", or "local" for megatron-core's own layers with megarl's
    norm and attention."""
    capability = platform.current.capability
    if platform.current.layer_spec == "local" or precision == "fp32" or capability is None:
        return "local"
    return "transformer_engine" if capability >= PACKED_ATTENTION_CAPABILITY else "local"


def has_own_attention(shape: ModelShape, precision: str) -> bool:
    """Return whether a model's core attention is megarl's `PackedAttention`."""
    return shape.has_own_attention or spec_name(precision) == "local"


def layer_spec(shape: ModelShape, config: TransformerConfig, spec: str, chunk: int | None) -> TransformerBlockSubmodules:
    """Return the block spec of a chunk; `spec` is a `spec_name`."""
    first = get_transformer_layer_offset(config, vp_stage=chunk)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=chunk))
    norm: Any = RMSNorm
    if spec == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm  # absent without Transformer Engine

        norm = TENorm
    return TransformerBlockSubmodules([_layer(shape, layer, spec, norm) for layer in layers], norm)


# Norms that Transformer Engine fuses into the next linear layer have the local spec's keys in a checkpoint, so that both
# specs can read it.
_CHECKPOINT_KEYS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def _layer(shape: ModelShape, number: int, spec: str, norm: Any) -> ModuleSpec:
    """Return a layer of Transformer Engine's modules, with experts in one grouped matrix product; or one of megatron-core's
    own modules, with megarl's norm and one expert after the other. The latter, and families with windows or latent
    attention, use megarl's core attention. `norm` is the class of norms that are not fused into a linear layer."""
    has_experts = shape.has_experts(number)
    features = dict(
        num_experts=shape.experts.count if shape.experts is not None and has_experts else None,
        qk_layernorm=shape.qk_norm,
        multi_latent_attention=shape.latent is not None,
    )
    if spec == "transformer_engine":
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**features, moe_grouped_gemm=has_experts)
    else:
        layer = gpt_layer_specs.get_gpt_layer_local_spec(**features, normalization="RMSNorm")
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    layer.submodules.sharded_state_dict_keys_map = _CHECKPOINT_KEYS
    attention = layer.submodules.self_attention
    if spec == "local" and shape.qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = norm
    if spec == "local" or shape.has_own_attention:
        attention.submodules.core_attention = ModuleSpec(module=PackedAttention, params={"windows": shape.windows})
    if shape.latent is not None:
        layer.submodules.self_attention = latent_attention(shape, attention.submodules, norm)
    elif shape.local_rope_theta is not None:
        attention.module, attention.params = WindowedSelfAttention, attention.params | {"windows": shape.windows}
    if shape.sandwich_norms:
        layer.module, layer.params = SandwichLayer, {"norm": norm}
    return layer


def build_model(
    shape: ModelShape,
    layout: Layout,
    precision: str,
    role: str,
    device: torch.device,
    fp8: str | None = None,
    memory: MemorySection | None = None,
    options: Mapping[str, Any] | None = None,
    router_replay: bool = False,
) -> list[DecoderModel]:
    """Build the model chunks of this rank's stage, without weights; call this inside the layout's place. The last chunk of a
    scalar role has a value head instead of the vocabulary.

    The chunks share one configuration, as megatron-core's schedules expect.
    """
    config = transformer_config(shape, layout, precision, fp8, memory, options, router_replay)
    spec, is_scalar, chunks = spec_name(precision), role in SCALAR_ROLES, list[DecoderModel]()
    for number in range(layout.virtual_pipeline) if layout.virtual_pipeline > 1 else (None,):
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number)
        model = DecoderModel(
            config=config,
            transformer_layer_spec=layer_spec(shape, config, spec, number),
            vocab_size=padded_vocab(shape, config.tensor_model_parallel_size),
            max_sequence_length=shape.max_positions,
            pre_process=first,
            share_embeddings_and_output_weights=shape.tied and not is_scalar,
            post_process=last,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            vp_stage=number,
        )
        if is_scalar and last:
            model.output_layer = ValueHead(config)
        if first and shape.embedding_scale != 1.0:
            scale_embedding(model.embedding, shape.embedding_scale, config.params_dtype)
        model.rotary_pos_emb.inv_freq = inverse_frequencies(shape).to(model.rotary_pos_emb.inv_freq.device)
        model = model.to(device=device, dtype=config.params_dtype)
        for layer in model.modules():
            if isinstance(layer, TopKRouter) and layer.expert_bias is not None:
                layer.expert_bias = layer.expert_bias.float()  # bf16 would round it
            elif isinstance(layer, MoELayer) and config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
                # megatron-core (0.16 and 0.19) marks experts only under expert parallelism; without the mark their gradients
                # are reduced over ranks that hold other shards.
                for parameter in layer.experts.parameters():
                    parameter.allreduce = False
        chunks.append(model)
    return chunks


class WithoutContent(TorchFunctionMode):
    """Makes weights without content, for a model on the device "meta".

    `torch.device("meta")` as a context has no effect: megatron-core names a device wherever it makes a weight.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = {"device": torch.device("meta")} if func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **more})


_TRANSFORMER_ENGINE_NAMES = (
    (re.compile(r"mlp\.experts\.linear_fc([12])\.weight(\d+)$"), r"mlp.experts.local_experts.\2.linear_fc\1.weight"),
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
)


def local_name(name: str) -> str:
    """Return a parameter's name under the local spec (Transformer Engine fuses norms and groups experts)."""
    for pattern, replacement in _TRANSFORMER_ENGINE_NAMES:
        name = pattern.sub(replacement, name)
    return name


def named_shards(chunks: Sequence[nn.Module], layout: Layout) -> dict[str, Tensor]:
    """Return this rank's weights by the names of `rank_boxes`: parameters without adapters, and the biases of the
    experts' choice, which are buffers."""
    return {
        chunk_prefix(layout, number) + local_name(name): weight
        for number, chunk in enumerate(chunks)
        for name, weight in [*chunk.named_parameters(), *chunk.named_buffers()]
        if (isinstance(weight, nn.Parameter) and f".{CHILD}." not in name) or name.endswith(".expert_bias")
    }


def merged_shards(chunks: Sequence[nn.Module], layout: Layout) -> Mapping[str, Tensor]:
    """Return this rank's weights by the same names, with adapters merged in at each read. Without adapters this is a dict of
    the weights themselves, which the weight sync may read in place."""
    adapters = {
        chunk_prefix(layout, number) + local_name(name.removesuffix(CHILD) + "weight"): module
        for number, chunk in enumerate(chunks)
        for name, module in chunk.named_modules()
        if isinstance(module, Adapter)
    }
    shards = named_shards(chunks, layout)
    return MergedShards(shards, adapters) if adapters else shards


def freeze(chunks: Sequence[DecoderModel], frozen: FreezeSection) -> None:
    """Freeze weights of this rank's chunks; call this before gradient buffers and optimizer are made."""
    for model in chunks:
        weights: list[nn.Parameter] = []
        tied = bool(model.share_embeddings_and_output_weights)
        if frozen.embedding and model.pre_process:
            weights += model.embedding.parameters()
        # The last stage of a tied model has a copy of the embedding.
        if model.post_process and (frozen.head or (frozen.embedding and tied)):
            weights += model.output_layer.parameters()
        if frozen.norms:  # in the name under both specs: Transformer Engine has `layer_norm_weight`
            weights += [parameter for name, parameter in model.named_parameters() if "norm" in name]
        for layer in model.decoder.layers:
            if layer.layer_number <= frozen.layers:  # counted from 1, over all stages
                weights += layer.parameters()
        for parameter in weights:
            parameter.requires_grad_(False)


def keep_gradients_through_recompute(chunks: Sequence[DecoderModel]) -> None:
    """Make the output of a frozen embedding require a gradient: recomputed layers give their weights gradients only if
    their input requires one (megatron-core's checkpoint is a torch.autograd.Function, like torch's reentrant one)."""
    for model in chunks:
        if model.config.recompute_granularity is None or not model.pre_process:
            continue
        if not any(parameter.requires_grad for parameter in model.embedding.parameters()):
            model.embedding.register_forward_hook(
                lambda module, inputs, output: output.requires_grad_() if module.training else output
            )
