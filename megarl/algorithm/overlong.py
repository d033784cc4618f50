"""What a completion loses that comes near the limit of its length."""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalties(lengths: Tensor, longest: int, buffer: int, penalty: float) -> Tensor:
    """What is added to the rewards of long completions: 0 up to longest - buffer tokens, then linearly to -penalty.

    lengths [n] completion tokens; returns [n]. With `buffer` 0 nothing is added.
    Source: Yu et al. 2025 (DAPO, arXiv:2503.14476), equation 13, whose buffer ends at the longest.
    """
    if not buffer:
        return torch.zeros(len(lengths))
    return -penalty * ((lengths - (longest - buffer)) / buffer).clamp(0.0, 1.0)
