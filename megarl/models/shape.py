"""The sizes of a decoder, read from a Hugging Face `config.json`. No torch, because `megarl check` reads it too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts layers of a decoder."""

    count: int
    per_token: int
    ffn: int  # intermediate size of one expert
    shared_ffn: int = 0  # intermediate size of the shared experts together; 0 for none
    scoring: str = "softmax"  # or "sigmoid"
    normalise: bool = False  # the chosen experts' weights sum to 1
    scale: float = 1.0  # factor of the chosen experts' weights
    bias: bool = False  # a bias of each expert's score, used only for the choice
    groups: int = 1  # experts are chosen from the best `chosen_groups` groups
    chosen_groups: int = 1
    first_dense: int = 0  # layers before the first one with experts
    every: int = 1  # one of this many layers has experts


@dataclass(frozen=True)
class LatentAttention:
    """Multi-latent attention (DeepSeek-V2, sec. 2.1)."""

    key_value_rank: int
    plain_dim: int  # dimensions of a head's queries and keys without rotary embedding
    rotary_dim: int  # dimensions with rotary embedding
    value_dim: int
    query_rank: int = 0  # 0: queries are not compressed
    interleaved: bool = True  # rotary dimensions 2 i and 2 i + 1 are a pair; otherwise i and i + rotary_dim / 2
    rotary_scale: float = 1.0  # factor of the rotary embedding's cosines and sines (YaRN)

    @property
    def key_dim(self) -> int:
        """Dimensions of a head's queries and keys."""
        return self.plain_dim + self.rotary_dim


@dataclass(frozen=True)
class ModelShape:
    """The sizes and features of a decoder."""

    family: str
    num_layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    norm_epsilon: float
    rope_theta: float
    rope_scaling: tuple[tuple[str, Any], ...]
    max_positions: int
    initializer_range: float
    experts: Experts | None = None
    latent: LatentAttention | None = None  # head_dim is then its rotary_dim
    attention_scale: float | None = None  # factor of queries with keys; None for head_dim ** -0.5
    activation: str = "silu"  # or "gelu_tanh"; of the gate
    norm_offset: bool = False  # norms multiply by 1 + weight
    sandwich_norms: bool = False  # also norm the outputs of attention and of the feed-forward network
    embedding_scale: float = 1.0  # factor of the embedding's rows
    windows: tuple[int, ...] = ()  # for each layer: how many of the last tokens a token sees, 0 for all; empty: 0 everywhere
    local_rope_theta: float | None = None  # of the layers with a window, if it is not rope_theta

    @property
    def has_own_attention(self) -> bool:
        """Whether the model uses megarl's core attention also on a GPU (windows, latent attention)."""
        return self.latent is not None or bool(self.windows)

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts instead of one feed-forward network."""
        experts = self.experts
        return experts is not None and layer >= experts.first_dense and (layer + 1) % experts.every == 0

    def active_rows(self, layer: int) -> int:
        """Return the rows (of `hidden` columns) of all feed-forward matrices that a token passes in a layer."""
        experts = self.experts
        if experts is None or not self.has_experts(layer):
            return 3 * self.ffn
        return 3 * (experts.per_token * experts.ffn + experts.shared_ffn) + experts.count

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelShape:
        """Read a Hugging Face directory. Raises ValueError for a family or a feature that megarl does not know."""
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ValueError(f"model.path = {str(path)!r}: no config.json there; give a Hugging Face directory")
        return cls.from_config(json.loads(file.read_text(encoding="utf-8")), str(file))

    @classmethod
    def from_config(cls, config: dict[str, Any], origin: str = "config.json") -> ModelShape:
        """Read a `config.json`'s content; `origin` names the file in errors. Raises ValueError like `from_directory`."""
        from megarl.models import FAMILIES

        kind = config.get("model_type")
        if kind not in FAMILIES:
            raise ValueError(f"{origin}: model_type = {kind!r} is not supported; one of {sorted(FAMILIES)}")
        family = FAMILIES[kind]
        # A reward model is a sequence classifier.
        known = (family.architecture, family.architecture.replace("CausalLM", "SequenceClassification"))
        named = config.get("architectures")
        if named and not set(named) <= set(known):
            raise ValueError(f"{origin}: architectures = {named} is not supported; {known[0]} is")
        return family.read(config, origin)


# The parts of config.json that families share --------------------------------------------------------------------------


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
    """Return the numbers of experts and of experts per token; `keys` are names for the first number, the usual first."""
    key = next((key for key in keys if key in config), keys[0])
    count, chosen = whole_number(config, origin, key), whole_number(config, origin, "num_experts_per_tok")
    if chosen > count:
        raise ValueError(f"{origin}: num_experts_per_tok = {chosen} must be at most {key} = {count}")
    return count, chosen
