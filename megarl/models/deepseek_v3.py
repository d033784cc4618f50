"""DeepSeek-V3 and similar models: multi-latent attention, shared experts, sigmoid routing with a bias for the choice.

The layers for multi-token prediction (`num_nextn_predict_layers`, tensors of `model.layers.N` from N = num_hidden_layers on)
are not part of the decoder: megarl neither reads nor trains nor saves them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.models.shape import Experts, LatentAttention, ModelShape, read_decoder, read_expert_counts, whole_number
from megarl.models.weight_table import (
    Columns,
    Family,
    Held,
    Replicated,
    Rows,
    Weight,
    feed_forward,
    matrix,
    pre_norm_layer,
    swiglu,
    whole,
)

# For the norms inside attention, Hugging Face's model uses this value and ignores rms_norm_eps; vLLM's model uses
# rms_norm_eps.
_EPSILON = 1e-6
# The values that transformers, and so vLLM, assumes for missing keys of config.json.
_DEFAULTS = {"max_position_embeddings": 4096, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "q_lora_rank": 1536,
             "num_key_value_heads": 128}  # fmt: skip


def read(config: Mapping[str, Any], origin: str) -> ModelShape:
    config = _DEFAULTS | dict(config)
    shape = read_decoder(config, origin, scalings=("yarn",), experts=_read_experts(config, origin))
    latent = LatentAttention(
        key_value_rank=whole_number(config, origin, "kv_lora_rank"),
        plain_dim=whole_number(config, origin, "qk_nope_head_dim"),
        rotary_dim=whole_number(config, origin, "qk_rope_head_dim"),
        value_dim=whole_number(config, origin, "v_head_dim"),
        query_rank=whole_number(config, origin, "q_lora_rank") if config.get("q_lora_rank") is not None else 0,
        interleaved=bool(config.get("rope_interleave", True)),
    )
    rules = {
        f"num_key_value_heads = {shape.groups} must be num_attention_heads = {shape.heads}": shape.groups == shape.heads,
        f"rms_norm_eps = {shape.norm_epsilon} must be {_EPSILON}": shape.norm_epsilon == _EPSILON,
        f"rope_interleave = {config.get('rope_interleave')} must be true: vLLM knows nothing else": latent.interleaved,
        f"qk_rope_head_dim = {latent.rotary_dim} must be even": latent.rotary_dim % 2 == 0,
    }
    _hold(rules, origin)
    attention, rotary = _yarn_scales(dict(shape.rope_scaling))
    return replace(
        shape,
        head_dim=latent.rotary_dim,
        latent=replace(latent, rotary_scale=rotary),
        attention_scale=latent.key_dim**-0.5 * attention,
    )


def _read_experts(config: Mapping[str, Any], origin: str) -> Experts:
    count, chosen = read_expert_counts(config, origin, "n_routed_experts")
    groups, chosen_groups = (whole_number(config, origin, key) for key in ("n_group", "topk_group"))
    ffn = whole_number(config, origin, "moe_intermediate_size")
    rules = {
        f"{key} = {config.get(key)!r} must be {value!r}": config.get(key) == value
        for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("norm_topk_prob", True))
    } | {
        f"moe_layer_freq = {config.get('moe_layer_freq')} must be 1": config.get("moe_layer_freq", 1) == 1,
        # megatron-core normalises the weights of two experts or more.
        f"num_experts_per_tok = {chosen} must be at least 2": chosen >= 2,
        f"n_group = {groups} must divide n_routed_experts = {count}": count % groups == 0,
        f"topk_group = {chosen_groups} must be at most n_group = {groups}": chosen_groups <= groups,
    }
    if groups > 1:
        # A group's score is a sum over its best experts: the best two in DeepSeek-V3, the best num_experts_per_tok //
        # topk_group in megatron-core.
        rule = f"num_experts_per_tok = {chosen} must be twice topk_group = {chosen_groups}"
        rules[rule] = chosen // chosen_groups == 2
    _hold(rules, origin)
    return Experts(
        count,
        chosen,
        ffn,
        shared_ffn=ffn * (config.get("n_shared_experts") or 0),
        scoring="sigmoid",
        normalise=True,
        scale=float(config.get("routed_scaling_factor", 1.0)),
        bias=True,
        groups=groups,
        chosen_groups=chosen_groups,
        first_dense=whole_number(config, origin, "first_k_dense_replace", least=0),
    )


def _hold(rules: Mapping[str, bool], origin: str) -> None:
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(f"{origin}: {rule}; megarl supports no other for deepseek_v3")


def _yarn_scales(scaling: Mapping[str, Any]) -> tuple[float, float]:
    """Return YaRN's factors of the attention's scale and of the rotary cosines and sines (Peng et al. 2023, sec. 3.4).
    DeepSeek's model splits them: the first factor uses `mscale_all_dim`, the second uses `mscale` over `mscale_all_dim`."""
    if not scaling:
        return 1.0, 1.0

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    every = scaling.get("mscale_all_dim") or 0.0
    attention = magnitude(every) ** 2 if every else 1.0
    if scaling.get("attention_factor") is not None:
        return attention, float(scaling["attention_factor"])
    if scaling.get("mscale") and every:
        return attention, magnitude(scaling["mscale"]) / magnitude(every)
    return attention, magnitude(1.0)


def layer(shape: ModelShape, number: int) -> list[Weight]:
    experts, networks = shape.experts, feed_forward(shape, number)
    if experts is not None and shape.has_experts(number):
        bias = whole("mlp.gate.e_score_correction_bias", experts.count, "mlp.router.expert_bias")._replace(fixed=True)
        networks.insert(1, bias)
        if experts.shared_ffn:
            shared = swiglu(shape.hidden, experts.shared_ffn, "mlp.shared_experts", "mlp.shared_experts")
            networks += [weight._replace(shared=True) for weight in shared]
    return pre_norm_layer(shape, _attention(shape), networks)


def _attention(shape: ModelShape) -> list[Weight]:
    latent = shape.latent
    assert latent is not None, "every layer of the family has latent attention"
    queries, narrow = shape.heads * latent.key_dim, latent.key_value_rank + latent.rotary_dim
    total = latent.query_rank + narrow
    # vLLM fuses the down-projections if there are two.
    fused = "self_attn.fused_qkv_a_proj.weight" if latent.query_rank else "self_attn.kv_a_proj_with_mqa.weight"
    weights = []
    if latent.query_rank:
        weights = [_down("q_a_proj", latent.query_rank, shape.hidden, "linear_q_down_proj", fused, 0, total)]
    weights.append(_down("kv_a_proj_with_mqa", narrow, shape.hidden, "linear_kv_down_proj", fused, latent.query_rank, total))
    if latent.query_rank:
        weights += [
            whole("self_attn.q_a_layernorm.weight", latent.query_rank, "self_attention.q_layernorm.weight"),
            _up("q_b_proj", queries, latent.query_rank, "linear_q_up_proj"),
        ]
    else:
        weights.append(_up("q_proj", queries, shape.hidden, "linear_q_proj"))
    values = shape.heads * latent.value_dim
    return [
        *weights,
        whole("self_attn.kv_a_layernorm.weight", latent.key_value_rank, "self_attention.kv_layernorm.weight"),
        _up("kv_b_proj", shape.heads * latent.plain_dim + values, latent.key_value_rank, "linear_kv_up_proj"),
        matrix("self_attn.o_proj.weight", shape.hidden, values, Columns(), "self_attention.linear_proj.weight"),
    ]


def _down(name: str, rows: int, columns: int, megatron: str, vllm: str, before: int, total: int) -> Weight:
    """Return a down-projection: whole on every rank, fused in vLLM."""
    held = Held(f"self_attention.{megatron}.weight", Replicated())
    return Weight(f"self_attn.{name}.weight", rows, columns, held, Held(vllm, Replicated(before, total)))


def _up(name: str, rows: int, columns: int, megatron: str) -> Weight:
    """Return a projection to all heads, sharded by heads."""
    return matrix(f"self_attn.{name}.weight", rows, columns, Rows(), f"self_attention.{megatron}.weight")


FAMILY = Family("deepseek_v3", "DeepseekV3ForCausalLM", read, layer, harmless=(r"^model\.layers\.NUM_LAYERS\.",))
