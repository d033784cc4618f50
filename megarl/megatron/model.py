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

# Forward in the format with more digits, gradients in the one with more range, as Micikevicius et al. 2022 (sec. 3.2) do;
# block-wise scales leave the gradients no need of range.
_FP8_FORMAT = {"tensorwise": "hybrid", "delayed": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}

# Roles whose head gives one number, and what it is.
SCALAR_ROLES = {"critic": "values", "reward_model": "scores"}


class DecoderModel(GPTModel):
    """A GPTModel that ends before the vocabulary: it returns the hidden rows of the positions that a phase asks for.

    Set `head_positions` [n] before a forward: prompts need no logits. The rows [n, 1, hidden] and `head_weight` go to
    `LogProbabilities`, which never makes all logits at once; a value head is applied here. Under sequence parallelism the
    rows are gathered first, and the head works as without it: the gradient that it returns is whole on every tensor rank,
    which takes its own rows of it.
    """

    head_positions: Tensor | None = None

    def _preprocess(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        # megatron-core makes the angles of positions 0, 1, 2, ...; here each token gets its position's.
        found = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if not isinstance(packed_seq_params, Packing):
            return found
        embedded, _, *more = found
        return embedded, token_angles(self.rotary_pos_emb.inv_freq, kwargs["position_ids"][0]), *more

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # hidden_states [slots, 1, hidden], of sequence parallelism [slots / tensor, 1, hidden]
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
    """An initialisation that costs nothing."""
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
    """megatron-core's configuration of a decoder. `precision` and `fp8` are as `precision_settings` takes them, `options` is
    `trainer.megatron`. Raises ValueError where megatron-core refuses the options."""
    spec = spec_name(precision)
    settings = (
        _sizes(shape)
        | _experts(shape, spec)
        | _cuts(shape, layout)
        | precision_settings(precision, fp8)
        | recompute_settings(memory or MemorySection())
        | _UNINITIALISED
        | fusion_settings(shape, spec, router_replay)
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


def precision_settings(precision: str, fp8: str | None) -> dict[str, Any]:
    """Fields of a TransformerConfig. `precision` is "fp32", "bf16" or "fp16" (weights and activations), `fp8` None or a
    Transformer Engine recipe for the matrix products of the layers; their weights stay in `precision`."""
    dtype = DTYPES[precision]
    settings = dict(params_dtype=dtype, pipeline_dtype=dtype, bf16=precision == "bf16", fp16=precision == "fp16")
    if fp8 is None:
        return settings
    # A scale that is taken from past maxima needs some: Transformer Engine's own length.
    history = dict(fp8_amax_history_len=1024, fp8_amax_compute_algo="max") if fp8 == "delayed" else {}
    return {**settings, "fp8": _FP8_FORMAT[fp8], "fp8_recipe": fp8, **history}


def recompute_settings(memory: MemorySection) -> dict[str, Any]:
    """Fields of a TransformerConfig, whose names and values are the recipe's. Without `mla_up_proj`, which megatron-core
    takes for its own latent attention alone."""
    if memory.recompute == "none":
        return {}
    settings: dict[str, Any] = {"recompute_granularity": memory.recompute}
    if memory.recompute == "selective":
        return settings | {"recompute_modules": [name for name in memory.recompute_modules if name != "mla_up_proj"]}
    return settings | {"recompute_method": memory.recompute_method, "recompute_num_layers": memory.recompute_num_layers}


def fusion_settings(shape: ModelShape, spec: str, router_replay: bool) -> dict[str, bool]:
    """Fields of a TransformerConfig that fuse operations of a layer. Their kernels are Transformer Engine's (all since 2.7;
    megarl's lock has 2.20) or compiled by Triton, so the local spec takes none."""
    if spec == "local":
        return {}
    has_experts = shape.experts is not None
    return dict(
        # megarl's own attention rotates by per-token angles, and Megatron's fused rotation drops YaRN's factor.
        apply_rope_fusion=not shape.has_own_attention,
        bias_activation_fusion=shape.activation == "silu",  # the only gate that megatron-core and megarl share
        moe_permute_fusion=has_experts,
        # The fused router asks nobody for the experts that the rollout engine chose (megatron-core 0.16 and 0.19).
        moe_router_fusion=has_experts and not router_replay,
    )


def _sizes(shape: ModelShape) -> dict[str, Any]:
    """What every decoder layer is made of."""
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
        # Not only in the spec: without it the q/k-norm gradients are silently not summed over the tensor group.
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def _experts(shape: ModelShape, spec: str) -> dict[str, Any]:
    """Routing and experts. Every token reaches all the experts it chose: none has a capacity, none is dropped.

    There is no auxiliary loss: it balances the experts of a model in pretraining, and would pull a policy away from what its
    reward asks for. For the same reason the bias of the experts' choice stays as the checkpoint has it.
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
        # The softmax of the chosen scores alone is the softmax of all of them, normalised over the chosen: what Qwen3-MoE
        # (norm_topk_prob) and Mixtral compute. Sigmoid scores are always normalised, and this says nothing there.
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


def _cuts(shape: ModelShape, layout: Layout) -> dict[str, Any]:
    """The layout, in megatron-core's words."""
    return dict(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=virtual_pipeline(layout),
        pipeline_model_parallel_layout=_uneven_chunks(layout.stages) if layout.stages else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor_size,
        # Sent in one batch, what two stages of a virtual pipeline send each other is mixed up: forward and backward go the
        # same way there (megatron-core 0.16 and 0.19).
        overlap_p2p_comm=layout.virtual_pipeline > 1,
        batch_p2p_comm=layout.virtual_pipeline == 1,
        # Of one tensor rank megatron-core refuses it; there it has nothing to split.
        sequence_parallel=layout.sequence_parallel and layout.tensor > 1,
        variable_seq_lengths=layout.pipeline > 1,
        # A stage keeps the graph of what it sent to the next one, and not its content. Not so in a virtual pipeline: there
        # megatron-core frees the content before the send has read it (0.16 and 0.19), which gave wrong losses.
        deallocate_pipeline_outputs=layout.pipeline > 1 and layout.virtual_pipeline == 1,
    )


def _uneven_chunks(stages: Sequence[int]) -> list[list[str]]:
    """What each chunk holds, in the model's order: layers, the embedding before the first and the loss behind the last."""
    chunks = [["decoder"] * count for count in stages]
    return [["embedding", *chunks[0]], *chunks[1:-1], [*chunks[-1], "loss"]]


# Every weight is read from the checkpoint. Not perform_initialization=False: that leaves out the attributes which tell a
# tensor-parallel shard from a replica, and the gradient norm then counts one rank's shards only.
_UNINITIALISED: dict[str, Any] = dict(init_method=_leave, output_layer_init_method=_leave)


# Transformer Engine's attention over packed sequences (2.20) is cuDNN's, for GPUs from this compute capability on and 16-bit
# formats. Elsewhere it writes out the square of all sequences together, and with context parallelism does nothing at all.
PACKED_ATTENTION_CAPABILITY = (9, 0)


def spec_name(precision: str) -> str:
    """Which layer spec models of this process are built by: "transformer_engine", or "local" for megatron-core's own layers
    with megarl's norm and attention."""
    capability = platform.current.capability
    if platform.current.layer_spec == "local" or precision == "fp32" or capability is None:
        return "local"
    return "transformer_engine" if capability >= PACKED_ATTENTION_CAPABILITY else "local"


def has_own_attention(shape: ModelShape, precision: str) -> bool:
    """Whether a model's core attention is megarl's `PackedAttention`."""
    return shape.has_own_attention or spec_name(precision) == "local"


def layer_spec(shape: ModelShape, config: TransformerConfig, spec: str, chunk: int | None) -> TransformerBlockSubmodules:
    """The block spec of a chunk, for "transformer_engine" or "local" (megarl's own norm and packed attention)."""
    first = get_transformer_layer_offset(config, vp_stage=chunk)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=chunk))
    if spec == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm  # absent without Transformer Engine

        return TransformerBlockSubmodules([_transformer_engine_layer(shape, layer, TENorm) for layer in layers], TENorm)
    return TransformerBlockSubmodules([_local_layer(shape, layer) for layer in layers], RMSNorm)


# A norm that Transformer Engine fuses into the next linear layer has the local spec's key in a checkpoint, so that models of
# either spec read it.
_CHECKPOINT_KEYS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def _transformer_engine_layer(shape: ModelShape, layer: int, norm: Any) -> ModuleSpec:
    """A layer of Transformer Engine's modules, its experts in one grouped matrix product; its core attention is megarl's
    where megarl has not fitted Transformer Engine's to the family (windows, latent attention)."""
    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=_count_experts(shape, layer),
        moe_grouped_gemm=shape.has_experts(layer),
        qk_layernorm=shape.qk_norm,
        multi_latent_attention=shape.latent is not None,
    )
    if shape.has_own_attention:
        _adapt_layer(shape, spec, norm)
    spec.submodules.sharded_state_dict_keys_map = _CHECKPOINT_KEYS
    return spec


def _local_layer(shape: ModelShape, layer: int) -> ModuleSpec:
    """A layer of megatron-core's own modules, with megarl's norm and attention; its experts one after the other."""
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=_count_experts(shape, layer),
        qk_layernorm=shape.qk_norm,
        multi_latent_attention=shape.latent is not None,
        normalization="RMSNorm",
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention
    if shape.qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    _adapt_layer(shape, spec, RMSNorm)
    spec.submodules.sharded_state_dict_keys_map = _CHECKPOINT_KEYS
    return spec


def _count_experts(shape: ModelShape, layer: int) -> int | None:
    """As megatron-core wants it said: None for a layer with one feed-forward network."""
    return shape.experts.count if shape.experts is not None and shape.has_experts(layer) else None


def _adapt_layer(shape: ModelShape, layer: ModuleSpec, norm: Any) -> None:
    """Put megarl's core attention into a layer's spec, and the modules of families that differ in a layer's parts; `norm` is
    the class of the norms that are no part of a linear layer."""
    attention = layer.submodules.self_attention
    attention.submodules.core_attention = ModuleSpec(module=PackedAttention, params={"windows": shape.windows})
    if shape.latent is not None:
        layer.submodules.self_attention = latent_attention(shape, attention.submodules, norm)
    elif shape.local_rope_theta is not None:
        attention.module, attention.params = WindowedSelfAttention, attention.params | {"windows": shape.windows}
    if shape.sandwich_norms:
        layer.module, layer.params = SandwichLayer, {"norm": norm}


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
    """This rank's stage of a role, weights not read yet: its model chunks, one without a virtual pipeline. They share one
    configuration, where megatron-core's schedules look up what holds for all of them.

    To be called inside the layout's place.
    """
    config = transformer_config(shape, layout, precision, fp8, memory, options, router_replay)
    spec = spec_name(precision)
    return [_build_chunk(shape, config, spec, chunk, role, device) for chunk in range(layout.virtual_pipeline)]


class WithoutContent(TorchFunctionMode):
    """Weights made inside have sizes and take no memory; the model must be built for the device "meta".

    `torch.device("meta")` alone would change nothing: megatron-core names a device wherever it makes a weight.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = {"device": torch.device("meta")} if func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **more})


def _build_chunk(
    shape: ModelShape, config: TransformerConfig, spec: str, chunk: int, role: str, device: torch.device
) -> DecoderModel:
    """A critic's or reward model's last chunk gets a value head in place of the vocabulary."""
    number = chunk if config.virtual_pipeline_model_parallel_size is not None else None
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number)
    critic = role in SCALAR_ROLES
    model = DecoderModel(
        config=config,
        transformer_layer_spec=layer_spec(shape, config, spec, number),
        vocab_size=padded_vocab(shape, config.tensor_model_parallel_size),
        max_sequence_length=shape.max_positions,
        pre_process=first,
        # A critic's stages share nothing: its head is not an embedding.
        share_embeddings_and_output_weights=shape.tied and not critic,
        post_process=last,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        vp_stage=number,
    )
    if critic and last:
        model.output_layer = ValueHead(config)
    if first and shape.embedding_scale != 1.0:
        scale_embedding(model.embedding, shape.embedding_scale, config.params_dtype)
    model.rotary_pos_emb.inv_freq = inverse_frequencies(shape).to(model.rotary_pos_emb.inv_freq.device)
    model = model.to(device=device, dtype=config.params_dtype)
    _mark_experts(model, config)
    return model


def _mark_experts(model: nn.Module, config: TransformerConfig) -> None:
    """Which ranks reduce the experts' gradients, and in what format the bias of their choice is kept."""
    for layer in model.modules():
        if isinstance(layer, TopKRouter) and layer.expert_bias is not None:
            layer.expert_bias = layer.expert_bias.float()  # before it is read: bf16 would round it
        elif isinstance(layer, MoELayer) and config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
            # megatron-core (0.16 and 0.19) says so only where experts are cut by their number too; unsaid, their gradients
            # are reduced over ranks that hold other parts of them.
            for parameter in layer.experts.parameters():
                parameter.allreduce = False


_TRANSFORMER_ENGINE_NAMES = (
    (re.compile(r"mlp\.experts\.linear_fc([12])\.weight(\d+)$"), r"mlp.experts.local_experts.\2.linear_fc\1.weight"),
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
)


def local_name(name: str) -> str:
    """The parameter's name under the local spec, whichever spec built the model (Transformer Engine fuses norms, groups
    experts)."""
    for pattern, replacement in _TRANSFORMER_ENGINE_NAMES:
        name = pattern.sub(replacement, name)
    return name


def named_shards(chunks: Sequence[nn.Module], layout: Layout) -> dict[str, Tensor]:
    """This rank's weights by the names that `megatron_segments` uses: its parameters, and the biases of the experts' choice,
    which no optimizer moves. Adapters are none of the model's weights."""
    return {
        chunk_prefix(layout, number) + local_name(name): weight
        for number, chunk in enumerate(chunks)
        for name, weight in [*chunk.named_parameters(), *chunk.named_buffers()]
        if (isinstance(weight, nn.Parameter) and f".{CHILD}." not in name) or name.endswith(".expert_bias")
    }


def merged_shards(chunks: Sequence[nn.Module], layout: Layout) -> Mapping[str, Tensor]:
    """This rank's weights by the same names, adapters merged in as they are read. Without adapters it is a dict of the
    weights themselves, which the weight sync may read in place."""
    adapters = {
        chunk_prefix(layout, number) + local_name(name.removesuffix(CHILD) + "weight"): module
        for number, chunk in enumerate(chunks)
        for name, module in chunk.named_modules()
        if isinstance(module, Adapter)
    }
    shards = named_shards(chunks, layout)
    return MergedShards(shards, adapters) if adapters else shards


def freeze(chunks: Sequence[DecoderModel], frozen: FreezeSection) -> None:
    """Take the gradient from the frozen weights of this rank's chunks, before gradient buffers and optimizer are made."""
    for model in chunks:
        for parameter in _frozen(model, frozen):
            parameter.requires_grad_(False)


def _frozen(model: DecoderModel, frozen: FreezeSection) -> list[nn.Parameter]:
    weights: list[nn.Parameter] = []
    tied = bool(model.share_embeddings_and_output_weights)
    if frozen.embedding and model.pre_process:
        weights += model.embedding.parameters()
    # Of a tied model the last stage of a pipeline has a copy of the embedding.
    if model.post_process and (frozen.head or (frozen.embedding and tied)):
        weights += model.output_layer.parameters()
    if frozen.norms:  # a part of a name under every spec: Transformer Engine calls a fused one `layer_norm_weight`
        weights += [parameter for name, parameter in model.named_parameters() if "norm" in name]
    for layer in model.decoder.layers:
        if layer.layer_number <= frozen.layers:  # counted from 1, over all stages
            weights += layer.parameters()
    return weights


def keep_gradients_through_recompute(chunks: Sequence[DecoderModel]) -> None:
    """What is recomputed gives its weights and adapters gradients only where its input asks for one, and what a frozen
    embedding puts out does not (megatron-core's checkpoint is a torch.autograd.Function, as torch's reentrant one)."""
    for model in chunks:
        if model.config.recompute_granularity is None or not model.pre_process:
            continue
        if not any(parameter.requires_grad for parameter in model.embedding.parameters()):
            model.embedding.register_forward_hook(_ask_for_gradient)


def _ask_for_gradient(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    # output [slots, 1, hidden], a leaf
    return output.requires_grad_() if module.training else output
