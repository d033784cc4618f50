"""The sizes of a decoder from its Hugging Face `config.json`. No torch: `megarl check` reads it too."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
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
        """Return the number of rows, of `hidden` columns each, of the feed-forward matrices that a token passes in a
        layer."""
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
        """Read the content of a `config.json`; `origin` names the file in errors. Raises ValueError like
        `from_directory`."""
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
