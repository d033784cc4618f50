"""From a Hugging Face `config.json` to a ModelShape: what families read alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.family.shape import Experts, ModelShape


def refuse(config: Mapping[str, Any], origin: str, *keys: str) -> None:
    """Raises ValueError for the first of these switches that is on."""
    for key in keys:
        if config.get(key):
            shown = "true" if config[key] is True else repr(config[key])
            raise ValueError(f"{origin}: {key} = {shown} is not supported for {config['model_type']}")


def whole_number(config: Mapping[str, Any], origin: str, key: str, least: int = 1) -> int:
    """A size. Raises ValueError where it is none, KeyError where it is not there."""
    size = config[key]
    if not isinstance(size, int) or isinstance(size, bool) or size < least:
        raise ValueError(f"{origin}: {key} = {size!r} must be a whole number of at least {least}")
    return size


def read_rope(config: Mapping[str, Any], origin: str) -> tuple[float, tuple[tuple[str, Any], ...]]:
    """(base, scaling) of the rotary embedding; transformers 5 writes rope_parameters, 4 rope_theta
    and rope_scaling. Raises ValueError for another scaling than Llama 3.1's."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    if kind not in ("default", "llama3"):
        raise ValueError(f"{origin}: rope_type = {kind!r} is not supported; default and llama3 are")
    return float(theta), tuple(sorted(rope.items())) if kind == "llama3" else ()


def read_decoder(
    config: Mapping[str, Any],
    origin: str,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    experts: Experts | None = None,
) -> ModelShape:
    """What every family says in the same words. Raises ValueError for what no family supports."""
    refuse(config, origin, "use_sliding_window", "mlp_bias", "quantization_config")
    if not qkv_bias:
        refuse(config, origin, "attention_bias")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{origin}: hidden_act = {config['hidden_act']!r} is not supported; silu is")
    theta, scaling = read_rope(config, origin)
    heads = whole_number(config, origin, "num_attention_heads")
    groups = whole_number(config, origin, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    if heads % groups:
        raise ValueError(f"{origin}: num_attention_heads = {heads} must be a multiple of num_key_value_heads = {groups}")
    hidden = whole_number(config, origin, "hidden_size")
    return ModelShape(
        family=config["model_type"],
        num_layers=whole_number(config, origin, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        groups=groups,
        head_dim=config.get("head_dim") or hidden // heads,
        ffn=whole_number(config, origin, "intermediate_size"),
        vocab=whole_number(config, origin, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=config.get("max_position_embeddings", 2048),
        initializer_range=config.get("initializer_range", 0.02),
        experts=experts,
    )


def read_expert_counts(config: Mapping[str, Any], origin: str, *keys: str) -> tuple[int, int]:
    """(experts, experts of a token); `keys` are the names that the first may have, the usual one first."""
    key = next((key for key in keys if key in config), keys[0])
    count, chosen = whole_number(config, origin, key), whole_number(config, origin, "num_experts_per_tok")
    if chosen > count:
        raise ValueError(f"{origin}: num_experts_per_tok = {chosen} must be at most {key} = {count}")
    return count, chosen
