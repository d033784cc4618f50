"""Rotary position embedding: the frequencies of each family, the angles of each token, and the rotation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megarl.models import ModelShape


def inverse_frequencies(shape: ModelShape) -> Tensor:
    """Return RoPE's inverse frequencies [head_dim / 2] (Su et al. 2021, sec. 3.2.2) with the model's scaling.

    If layers with a window have another base, their unscaled frequencies follow: [head_dim]. megatron-core passes the same
    angles to all layers; `own_angles` selects the angles of a layer.
    """
    inverse = _plain(shape.head_dim, shape.rope_theta)
    scaling = dict(shape.rope_scaling)
    if scaling:
        inverse = _SCALED[scaling.pop("rope_type")](inverse, shape.rope_theta, scaling)
    if shape.local_rope_theta is None:
        return inverse
    return torch.cat([inverse, _plain(shape.head_dim, shape.local_rope_theta)])


def token_angles(frequencies: Tensor, positions: Tensor) -> Tensor:
    """Return the angles of each token, [tokens, 1, 2 x frequencies], from its position [tokens]."""
    return torch.outer(positions.to(frequencies.dtype), frequencies).repeat(1, 2).unsqueeze(1)


def rotate(rows: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn each pair (i, i + dim / 2) of the rows [tokens, heads, dim] by its angle; cosines and sines [tokens, 1, dim]."""
    front, back = rows.chunk(2, -1)
    return rows * cosines + torch.cat([-back, front], -1) * sines


def own_angles(angles: Tensor, local: bool) -> Tensor:
    """Select a layer's angles [tokens, 1, head_dim] from the angles of both kinds of layers.

    `token_angles` returns [tokens, 1, 2 x (global, local) x head_dim / 2].
    """
    return angles.unflatten(-1, (2, 2, -1))[..., int(local), :].flatten(-2)


def _plain(dim: int, theta: float) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _linear(inverse: Tensor, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """Scale by position interpolation (Chen et al. 2023, eq. 4)."""
    return inverse / scaling["factor"]


def _llama3(inverse: Tensor, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """Scale as Llama 3.1 does: stretch long wavelengths and keep short wavelengths."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / inverse
    # 0 where the wavelength is longer than the original context over `low`, 1 where shorter than over `high`.
    ramp = ((scaling["original_max_position_embeddings"] / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * inverse / factor + ramp * inverse


def _yarn(inverse: Tensor, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """Scale by YaRN (Peng et al. 2023, sec. 3.2): keep dimensions that turn more than `beta_fast` times in the original
    context, and stretch dimensions that turn less than `beta_slow` times."""
    dim, original = 2 * len(inverse), scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling["beta_fast"])), 0)
    high = min(math.ceil(dimension(scaling["beta_slow"])), dim - 1)
    # If the ends are equal, the ramp is a step.
    stretched = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return (1 - stretched) * inverse + stretched * inverse / scaling["factor"]


_SCALED = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
