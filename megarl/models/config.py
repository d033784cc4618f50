"""Read a Hugging Face `config.json` into a ModelShape: the parts that families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megarl.models.shape import Experts, ModelShape


def refuse(config: Mapping[str, Any], origin: str, *keys: str) -> None:
    """Raise ValueError for the first of these keys that is set."""
    for key in keys:
        if config.get(key):
            shown = "true" if config[key] is True else repr(config[key])
            raise ValueError(f"{origin}: {key} = {shown} is not supported for {config['model_type']}")


def whole_number(config: Mapping[str, Any], origin: str, key: str, least: int = 1) -> int:
    """Return a size. Raises ValueError for another kind of value, KeyError if the key is missing."""
    size = config[key]
    if not isinstance(size, int) or isinstance(size, bool) or size < least:
        raise ValueError(f"{origin}: {key} = {size!r} must be a whole number of at least {least}")
    return size


# Keys that vLLM or transformers read and megarl does not, with the value that changes nothing.
_UNREAD = {
    "is_causal": True, "logit_scale": 1.0, "bias": False, "dual_chunk_attention_config": None,
    "shared_expert_intermediate_size": 0, "index_topk": None, "partial_rotary_factor": 1.0, "compression_config": None,
}  # fmt: skip


def _refuse_unread(config: Mapping[str, Any], origin: str, neutral: Mapping[str, Any]) -> None:
    """Raise ValueError for a key that would make the engines' model differ from the trainer's model."""
    for key, value in neutral.items():
        if config.get(key) not in (None, value):
            raise ValueError(
                f"{origin}: {key} = {config[key]!r} is not supported: vLLM acts on it, and the trainer does not; use a "
                "model without it, or remove the key if its weights do not need it"
            )


# The required keys and the defaults of each scaling of the rotary embedding.
_SCALINGS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "linear": (("factor",), {}),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), {}),
    "yarn": (("factor", "original_max_position_embeddings"), {"beta_fast": 32, "beta_slow": 1}),
}


def read_rope(config: Mapping[str, Any], origin: str, scalings: Sequence[str]) -> tuple[float, tuple[tuple[str, Any], ...]]:
    """Return base and scaling of the rotary embedding; the scaling includes the `rope_type`, or is empty. transformers 5
    writes rope_parameters; transformers 4 wrote rope_theta and rope_scaling. Raises ValueError for a scaling not in
    `scalings`."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if old and new and old != new:
        raise ValueError(
            f"{origin}: rope_scaling = {old} beside rope_parameters = {new}: transformers and vLLM take the first alone, "
            "with its rope_theta or the default one; write all of it into rope_parameters"
        )
    rope = dict(new or old or {})
    nested = next((key for key, value in rope.items() if isinstance(value, Mapping)), None)
    if nested is not None:
        raise ValueError(f"{origin}: rope_parameters.{nested}: rotary embeddings by kind of layer are not supported")
    _refuse_unread(rope, origin, {"partial_rotary_factor": 1.0})
    scaled_from = config.get("original_max_position_embeddings")
    if scaled_from not in (None, rope.get("original_max_position_embeddings")):
        raise ValueError(
            f"{origin}: original_max_position_embeddings = {scaled_from} outside of rope_parameters is not supported; "
            "write it there alone"
        )
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    if kind == "default":
        return float(theta), ()
    if kind not in scalings:
        raise ValueError(f"{origin}: rope_type = {kind!r} is not supported; one of {['default', *scalings]} is")
    needed, defaults = _SCALINGS[kind]
    for key in needed:
        if not isinstance(rope.get(key), int | float) or rope[key] <= 0:
            raise ValueError(f"{origin}: {key} = {rope.get(key)!r} of rope_type {kind!r} must be a number above 0")
    if rope.get("truncate") is False:
        raise ValueError(f"{origin}: truncate = false of rope_type {kind!r} is not supported")
    return float(theta), tuple(sorted({**defaults, **rope, "rope_type": kind}.items()))


def read_decoder(
    config: Mapping[str, Any],
    origin: str,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    experts: Experts | None = None,
    scalings: Sequence[str] = ("llama3",),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> ModelShape:
    """Read the keys that families share; `defaults` are transformers' (and vLLM's) values of missing keys. Raises ValueError
    for features that no family supports."""
    config = {**defaults, **config}
    refuse(config, origin, "use_sliding_window", "mlp_bias")
    _refuse_unread(config, origin, _UNREAD | {"qk_norm": qk_norm})
    if "use_sliding_window" not in defaults:  # vLLM takes a window from any config.json
        _refuse_unread(config, origin, {"sliding_window": 0})
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"{origin}: layer_types = {config['layer_types']} is not supported; full_attention everywhere is")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise ValueError(
            f"{origin}: quantization_config.quant_method = {method!r} is not supported; convert the checkpoint to bf16 first"
        )
    if not qkv_bias:
        refuse(config, origin, "attention_bias", "qkv_bias")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{origin}: hidden_act = {config['hidden_act']!r} is not supported; silu is")
    theta, scaling = read_rope(config, origin, scalings)
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
    """Return the number of experts and the number of experts per token; `keys` are names of the first key, the usual name
    first."""
    key = next((key for key in keys if key in config), keys[0])
    count, chosen = whole_number(config, origin, key), whole_number(config, origin, "num_experts_per_tok")
    if chosen > count:
        raise ValueError(f"{origin}: num_experts_per_tok = {chosen} must be at most {key} = {count}")
    return count, chosen
