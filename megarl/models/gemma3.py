"""Gemma 3's text models: norms around attention and feed-forward network, windows in most layers, a scaled embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.models.shape import ModelShape, read_decoder, refuse, whole_number
from megarl.models.weight_table import Family, Weight, attention, swiglu, whole

# The values that transformers assumes for missing keys of config.json.
_PATTERN = 6  # every sixth layer sees all tokens
_DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "tie_word_embeddings": True}
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def read(config: Mapping[str, Any], origin: str) -> ModelShape:
    refuse(config, origin, "final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention")
    activation = config.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise ValueError(f"{origin}: hidden_activation = {activation!r} is not supported; gelu_pytorch_tanh is")
    everywhere, local_theta = _read_ropes(config, origin)
    overrides = {"rope_parameters": everywhere, "rope_scaling": None, "sliding_window": None, "layer_types": None}
    shape = read_decoder({**config, **overrides}, origin, scalings=("linear",), qk_norm=True, defaults=_DEFAULTS)
    scalar = config.get("query_pre_attn_scalar", 256)
    if not isinstance(scalar, int | float) or scalar <= 0:
        raise ValueError(f"{origin}: query_pre_attn_scalar = {scalar!r} must be a number above 0")
    return replace(
        shape,
        attention_scale=scalar**-0.5,
        activation="gelu_tanh",
        norm_offset=True,
        sandwich_norms=True,
        embedding_scale=shape.hidden**0.5,
        windows=_read_windows(config, origin, shape.num_layers),
        local_rope_theta=local_theta,
    )


def _read_ropes(config: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], float]:
    """Return the rotary embedding of the layers that see all tokens, and the base of the layers with a window. transformers
    5 writes both below rope_parameters; transformers 4 wrote rope_theta, rope_scaling and rope_local_base_freq. A file with
    both forms means the same here as in transformers."""
    parameters = config.get("rope_parameters") or {}
    everywhere = {"rope_theta": config.get("rope_theta") or _GLOBAL_THETA} | dict(parameters.get("full_attention") or {})
    everywhere |= dict(config.get("rope_scaling") or {})
    local = {"rope_theta": config.get("rope_local_base_freq") or _LOCAL_THETA}
    local |= dict(parameters.get("sliding_attention") or {})
    kind = local.get("rope_type", "default")
    if kind != "default":
        raise ValueError(f"{origin}: rope_type = {kind!r} of sliding_attention is not supported; default is")
    return everywhere, float(local["rope_theta"])


def _read_windows(config: Mapping[str, Any], origin: str, num_layers: int) -> tuple[int, ...]:
    window = whole_number({"sliding_window": 4096, **config}, origin, "sliding_window")
    pattern = config.get("sliding_window_pattern") or _PATTERN
    kinds = config.get("layer_types") or [
        "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(num_layers)
    ]
    known = {"full_attention": 0, "sliding_attention": window}
    if len(kinds) != num_layers or not set(kinds) <= known.keys():
        raise ValueError(f"{origin}: layer_types = {kinds} must name one of {sorted(known)} for each of {num_layers} layers")
    return tuple(known[kind] for kind in kinds)


def layer(shape: ModelShape, number: int) -> list[Weight]:
    return [
        whole("input_layernorm.weight", shape.hidden, "input_layernorm.weight"),
        *attention(shape),
        whole("post_attention_layernorm.weight", shape.hidden, "post_self_attn_layernorm.weight"),
        whole("pre_feedforward_layernorm.weight", shape.hidden, "pre_mlp_layernorm.weight"),
        *swiglu(shape.hidden, shape.ffn),
        whole("post_feedforward_layernorm.weight", shape.hidden, "post_mlp_layernorm.weight"),
    ]


FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", read, layer)
