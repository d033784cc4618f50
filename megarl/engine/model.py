"""Build the Megatron model of a role from a `ModelShape` and a layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megarl import platform  # before megatron.core: on a machine without CUDA it makes it importable
from megarl.engine.attention import PackedAttention
from megarl.engine.gemma import ACTIVATIONS, SandwichLayer, WindowedSelfAttention, scale_embedding
from megarl.engine.latent_attention import latent_attention
from megarl.engine.layers import RMSNorm, ValueHead
from megarl.engine.parallel import virtual_pipeline
from megarl.engine.rotary import inverse_frequencies
from megarl.family import ModelShape
from megarl.reshard.boxes import Layout
from megarl.reshard.megatron import chunk_prefix, padded_vocab

from megatron.core import parallel_state  # isort: skip
from megatron.core.models.gpt import GPTModel  # isort: skip
from megatron.core.models.gpt import gpt_layer_specs  # isort: skip
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build  # isort: skip

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class DecoderModel(GPTModel):
    """A GPTModel whose head sees only the positions that a phase asks for.

    Set `head_positions` [n] before a forward: prompts need no logits, and logits are the largest activation. Under sequence
    parallelism the rows are gathered first, and the head works as without it: the gradient that it returns is whole on every
    tensor rank, which takes its own rows of it.
    """

    head_positions: Tensor | None = None

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # hidden_states [slots, 1, hidden], of sequence parallelism [slots / tensor, 1, hidden]
        if self.post_process and self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        if self.post_process and self.head_positions is not None:
            hidden_states = hidden_states.index_select(0, self.head_positions)
        return super()._postprocess(hidden_states, *args, **kwargs)


def _leave(weight: Tensor) -> Tensor:
    """An initialisation that costs nothing."""
    return weight


def transformer_config(shape: ModelShape, layout: Layout, precision: str) -> TransformerConfig:
    """megatron-core's configuration of a dense decoder. `precision` is "fp32" or "bf16" (weights and activations)."""
    dtype = DTYPES[precision]
    return TransformerConfig(
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
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=virtual_pipeline(layout),
        context_parallel_size=layout.context,
        # Sent in one batch, what two stages of a virtual pipeline send each other is mixed up: forward and backward go the
        # same way there (megatron-core 0.16 and 0.19).
        overlap_p2p_comm=layout.virtual_pipeline > 1,
        batch_p2p_comm=layout.virtual_pipeline == 1,
        # Of one tensor rank megatron-core refuses it; there it has nothing to split.
        sequence_parallel=layout.sequence_parallel and layout.tensor > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=precision == "bf16",
        # Every weight is read from the checkpoint. Not perform_initialization=False: that leaves out the attributes which
        # tell a tensor-parallel shard from a replica, and the gradient norm then counts one rank's shards only.
        init_method=_leave,
        output_layer_init_method=_leave,
        variable_seq_lengths=layout.pipeline > 1,
        # variable_seq_lengths is refused under any other dispatcher, for dense models too (megatron-core 0.16 and 0.19).
        moe_token_dispatcher_type="alltoall",
    )


def layer_spec(shape: ModelShape, config: TransformerConfig, spec: str, chunk: int | None) -> ModuleSpec:
    """The block spec for "transformer_engine" or "local" (megarl's own norm and packed attention)."""
    if spec == "transformer_engine":
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_norm)
    layer = gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention
    attention.submodules.core_attention = ModuleSpec(module=PackedAttention, params={"windows": shape.windows})
    if shape.qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    _adapt_layer(shape, layer)
    count = get_num_layers_to_build(config, vp_stage=chunk)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)


def _adapt_layer(shape: ModelShape, layer: ModuleSpec) -> None:
    """Put the modules of families that differ in a layer's parts into its spec."""
    attention = layer.submodules.self_attention
    if shape.latent is not None:
        layer.submodules.self_attention = latent_attention(shape, attention.submodules)
    elif shape.local_rope_theta is not None:
        attention.module, attention.params = WindowedSelfAttention, attention.params | {"windows": shape.windows}
    if shape.sandwich_norms:
        layer.module = SandwichLayer


def build_model(shape: ModelShape, layout: Layout, precision: str, role: str, device: torch.device) -> list[DecoderModel]:
    """This rank's stage of a role, weights not read yet: its model chunks, one without a virtual pipeline. They share one
    configuration, where megatron-core's schedules look up what holds for all of them.

    To be called inside the layout's place.
    """
    config = transformer_config(shape, layout, precision)
    return [_build_chunk(shape, config, chunk, role, device) for chunk in range(layout.virtual_pipeline)]


def _build_chunk(shape: ModelShape, config: TransformerConfig, chunk: int, role: str, device: torch.device) -> DecoderModel:
    """A critic's last chunk gets a value head in place of the vocabulary."""
    number = chunk if config.virtual_pipeline_model_parallel_size is not None else None
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number)
    critic = role == "critic"
    model = DecoderModel(
        config=config,
        transformer_layer_spec=layer_spec(shape, config, platform.current.layer_spec, number),
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
    elif last and config.sequence_parallel:
        # DecoderModel has gathered its input, and chosen from it.
        model.output_layer.sequence_parallel = False
    if first and shape.embedding_scale != 1.0:
        scale_embedding(model.embedding, shape.embedding_scale)
    model.rotary_pos_emb.inv_freq = inverse_frequencies(shape).to(model.rotary_pos_emb.inv_freq.device)
    return model.to(device=device, dtype=config.params_dtype)


_TRANSFORMER_ENGINE_NAMES = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
)


def local_name(name: str) -> str:
    """The parameter's name under the local spec, whichever spec built the model (Transformer Engine fuses the norms)."""
    for pattern, replacement in _TRANSFORMER_ENGINE_NAMES:
        name = pattern.sub(replacement, name)
    return name


def named_shards(chunks: Sequence[nn.Module], layout: Layout) -> dict[str, nn.Parameter]:
    """This rank's parameters by the names that `megatron_segments` uses."""
    return {
        chunk_prefix(layout, number) + local_name(name): parameter
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
