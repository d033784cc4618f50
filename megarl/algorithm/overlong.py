"""What a completion loses that comes near the limit of its length."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.recipe.algorithm_section import OverlongSection


def overlong_penalties(lengths: Tensor, longest: int, buffer: int, penalty: float) -> Tensor:
    """What is added to the rewards of long completions: 0 up to longest - buffer tokens, then linearly to -penalty.

    lengths [n] completion tokens; returns [n]. With `buffer` 0 nothing is added.
    Source: Yu et al. 2025 (DAPO, arXiv:2503.14476), equation 13, whose buffer ends at the longest.
    """
    if not buffer:
        return torch.zeros(len(lengths))
    return -penalty * ((lengths - (longest - buffer)) / buffer).clamp(0.0, 1.0)


class Overlong(NamedTuple):
    added: Tensor  # [sequences], at most 0: to add to the rewards
    valid: Tensor  # [sequences] bool, without what is masked
    metrics: dict[str, float]


def apply_overlong(
    section: OverlongSection, lengths: Tensor, truncated: Tensor, valid: Tensor, longest: int, limit: str
) -> Overlong:
    """Apply `algorithm.overlong` to a step.

    lengths [sequences] own tokens of at most `longest`; truncated, valid [sequences] bool. `limit` names the recipe key that
    completions have reached. Raises ValueError if the mask leaves no sequence: an update of nothing would still move
    weights, by its momentum.
    """
    added = overlong_penalties(lengths, longest, section.buffer, section.penalty).float()
    metrics = {"reward/overlong_penalty_mean": float(added.mean())}
    if not section.mask:
        return Overlong(added, valid, metrics)
    masked = int((truncated & valid).sum())
    metrics["reward/overlong_masked"] = masked
    valid = valid & ~truncated
    if not valid.any():
        raise ValueError(
            f"no completion is left to train on: the {masked} that still counted reached {limit}, and "
            "algorithm.overlong.mask = true leaves these out; raise that limit, or take algorithm.overlong.buffer "
            "in the place of the mask"
        )
    return Overlong(added, valid, metrics)
