"""Multi-latent attention (DeepSeek-V2, sec. 2.1) on megatron-core's tensor-parallel layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl import platform  # noqa: F401  # before megatron.core: on a machine without CUDA it makes it importable
from megarl.models import LatentAttention, ModelShape
from megarl.models.layers import ReplicatedLinear
from megarl.models.rotary import rotate

from megatron.core import tensor_parallel  # isort: skip
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region  # isort: skip
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # isort: skip
from megatron.core.transformer.enums import AttnMaskType  # isort: skip
from megatron.core.transformer.module import MegatronModule  # isort: skip
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec, build_module  # isort: skip

# Epsilon of the inner norms in DeepSeek's and Hugging Face's models, independent of rms_norm_eps.
EPSILON = 1e-6


class LatentSelfAttention(MegatronModule):
    """Attention whose keys and values (and queries, if `query_rank` is set) come from one short vector per token.

    Down-projections are replicated over the tensor group; up-projections are sharded by heads. All heads share the rotary
    part of the keys.
    """

    def __init__(
        self,
        config: Any,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        latent: LatentAttention,
        pg_collection: Any,
        cp_comm_type: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.latent, self.layer_number, self.groups = latent, layer_number, pg_collection
        self.heads = config.num_attention_heads // pg_collection.tp.size()
        parallel = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        column = {"init_method": config.init_method, "gather_output": False, "skip_bias_add": False} | parallel
        queries = config.num_attention_heads * latent.key_dim
        if latent.query_rank:
            self.linear_q_down_proj = ReplicatedLinear(config, config.hidden_size, latent.query_rank)
            self.q_layernorm = build_module(submodules.q_layernorm, config, latent.query_rank, EPSILON)
            self.linear_q_up_proj = build_module(submodules.linear_q_up_proj, latent.query_rank, queries, **column)
        else:
            self.linear_q_proj = build_module(submodules.linear_q_up_proj, config.hidden_size, queries, **column)
        self.linear_kv_down_proj = ReplicatedLinear(config, config.hidden_size, latent.key_value_rank + latent.rotary_dim)
        self.kv_layernorm = build_module(submodules.kv_layernorm, config, latent.key_value_rank, EPSILON)
        self.linear_kv_up_proj = build_module(
            submodules.linear_q_up_proj,
            latent.key_value_rank,
            config.num_attention_heads * (latent.plain_dim + latent.value_dim),
            **column,
        )
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            softmax_scale=config.softmax_scale,
            k_channels=latent.key_dim,
            v_channels=latent.value_dim,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            config.num_attention_heads * latent.value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **parallel,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, rotary_pos_emb: Tensor,
        packed_seq_params: Any, **_: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        # hidden_states and result [tokens, 1, hidden], under sequence parallelism [tokens / tensor, 1, hidden]
        config = self.config
        again = config.recompute_modules if self.training and config.recompute_granularity == "selective" else ()
        if "mla_up_proj" in again:
            query, key, value = tensor_parallel.checkpoint(
                self._queries_keys_values, False, hidden_states.squeeze(1), rotary_pos_emb
            )
        else:
            query, key, value = self._queries_keys_values(hidden_states.squeeze(1), rotary_pos_emb)
        if "core_attn" in again:
            attend = partial(self._attend, packed_seq_params)
            attended = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            attended = self._attend(packed_seq_params, query, key, value)
        return self.linear_proj(attended.unsqueeze(1))

    def _attend(self, packing: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = self.core_attention(
            query, key, value, None, packed_seq_params=packing, attn_mask_type=AttnMaskType.causal
        )
        return attended.reshape(len(query), -1)  # [tokens, own heads * value_dim]

    def _queries_keys_values(self, hidden: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # hidden [own rows, hidden], angles [tokens, 1, rotary_dim] ->
        # query and key [tokens, own heads, key_dim], value [tokens, own heads, value_dim]
        latent = self.latent
        if latent.query_rank:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        else:
            query, _ = self.linear_q_proj(hidden)
        compressed, rotary_key = self.linear_kv_down_proj(hidden).split([latent.key_value_rank, latent.rotary_dim], -1)
        # Each tensor rank uses the rotary keys for its heads, so their gradient is summed over the ranks.
        if self.config.sequence_parallel:
            rotary_key = gather_from_sequence_parallel_region(rotary_key, group=self.groups.tp)
        else:
            rotary_key = copy_to_tensor_model_parallel_region(rotary_key, group=self.groups.tp)
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(compressed))

        plain_query, rotary_query = query.unflatten(-1, (self.heads, -1)).split([latent.plain_dim, latent.rotary_dim], -1)
        plain_key, value = key_value.unflatten(-1, (self.heads, -1)).split([latent.plain_dim, latent.value_dim], -1)
        turns = [(latent.rotary_scale * part).to(hidden.dtype) for part in (angles.cos(), angles.sin())]
        rotary_query = rotate(self._apart(rotary_query), *turns)
        rotary_key = rotate(self._apart(rotary_key.unsqueeze(1)), *turns).expand(-1, self.heads, -1)
        return torch.cat([plain_query, rotary_query], -1), torch.cat([plain_key, rotary_key], -1), value.contiguous()

    def _apart(self, part: Tensor) -> Tensor:
        # part [tokens, heads, rotary_dim]. Queries and keys are reordered alike, which keeps their products.
        return torch.cat([part[..., 0::2], part[..., 1::2]], -1) if self.latent.interleaved else part


def latent_attention(shape: ModelShape, parts: MLASelfAttentionSubmodules, norm: type) -> ModuleSpec:
    """Return the self-attention of a layer, from the parts of megatron-core's latent attention and the class of its norms.

    megatron-core's MLASelfAttention cannot be built without Transformer Engine (0.16.1).
    """
    parts.q_layernorm = parts.kv_layernorm = norm
    return ModuleSpec(module=LatentSelfAttention, params={"latent": shape.latent}, submodules=parts)
