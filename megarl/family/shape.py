"""The sizes of a decoder, as its Hugging Face `config.json` gives them. No torch here: `megarl check` reads it too."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


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
    bias: bool = False  # a bias of each expert's score, for the choice alone
    groups: int = 1  # experts are chosen from the best `chosen_groups` of so many groups
    chosen_groups: int = 1
    first_dense: int = 0  # layers before the first one with experts
    every: int = 1  # every so many layers has experts


@dataclass(frozen=True)
class LatentAttention:
    """Multi-latent attention (DeepSeek-V2, sec. 2.1)."""

    key_value_rank: int
    plain_dim: int  # of a head's queries and keys, without rotary embedding
    rotary_dim: int  # with it
    value_dim: int
    query_rank: int = 0  # 0: queries are not compressed
    interleaved: bool = True  # rotary dimensions 2 i and 2 i + 1 are a pair; otherwise i and i + rotary_dim / 2
    rotary_scale: float = 1.0  # factor of the rotary embedding's cosines and sines (YaRN)

    @property
    def key_dim(self) -> int:
        """Of a head's queries and keys."""
        return self.plain_dim + self.rotary_dim


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder, in the words of its `config.json`."""

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
    sandwich_norms: bool = False  # attention's and the feed-forward network's outputs are normed, too
    embedding_scale: float = 1.0  # factor of the embedding's rows
    windows: tuple[int, ...] = ()  # of each layer: how many of the last tokens a token sees; 0 for all; empty for all layers
    local_rope_theta: float | None = None  # of the layers with a window, where not rope_theta

    def has_experts(self, layer: int) -> bool:
        """A layer, counted from 0, has experts in place of one feed-forward network."""
        experts = self.experts
        return experts is not None and layer >= experts.first_dense and (layer + 1) % experts.every == 0

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelShape:
        """Read a Hugging Face directory. Raises ValueError for a family or a feature that megarl does not know."""
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ValueError(f"model.path = {str(path)!r}: no config.json there; give a Hugging Face directory")
        return cls.from_config(json.loads(file.read_text()), str(file))

    @classmethod
    def from_config(cls, config: dict[str, Any], origin: str = "config.json") -> ModelShape:
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ValueError(f"{origin}: model_type = {family!r} is not supported; one of {sorted(FAMILIES)}")
        for key in ("use_sliding_window", "mlp_bias"):
            if config.get(key):
                raise ValueError(f"{origin}: {key} = true is not supported")
        if family != "qwen2" and config.get("attention_bias"):
            raise ValueError(f"{origin}: attention_bias = true is not supported for {family}")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"{origin}: hidden_act = {config['hidden_act']!r} is not supported; silu is")
        # transformers 5 writes rope_parameters, 4 wrote rope_theta and rope_scaling
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
        if kind not in ("default", "llama3"):
            raise ValueError(f"{origin}: rope_type = {kind!r} is not supported; default and llama3 are")
        heads = config["num_attention_heads"]
        groups = config.get("num_key_value_heads") or heads
        sizes = {key: config[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")}
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": groups}
        for key, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{origin}: {key} = {size!r} must be a whole number of at least 1")
        if heads % groups:
            raise ValueError(f"{origin}: num_attention_heads = {heads} must be a multiple of num_key_value_heads = {groups}")
        return cls(
            family=family,
            num_layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            groups=groups,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            norm_epsilon=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(theta),
            rope_scaling=tuple(sorted(rope.items())) if kind == "llama3" else (),
            max_positions=config.get("max_position_embeddings", 2048),
            initializer_range=config.get("initializer_range", 0.02),
        )
