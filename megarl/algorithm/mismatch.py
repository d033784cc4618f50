"""Importance sampling between the engine that sampled a token and the trainer that learns from it.

The two compute the same weights with other kernels, so that the trainer's policy is not quite the one that was sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithm.kl import MAX_LOG_RATIO
from megarl.algorithm.policy import sequence_sums


def mismatch_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, lengths: tuple[int, ...], correction: str, level: str, cap: float
) -> tuple[Tensor, Tensor]:
    """What each token's policy loss is multiplied by, and which tokens are beyond `cap`.

    old_logprobs [tokens] of the trainer before the first update, rollout_logprobs [tokens] of the engine, `lengths` the
    tokens of each sequence; returns (weights [tokens], beyond [tokens] bool), neither with a gradient.
        w = old / rollout of a token, or at level `sequence` the product over its sequence
        truncate  min(w, cap)
        mask      w, and 0 where w > cap
    Sources: token level and truncation: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"; sequence level and masks: Liu et al. 2025, "When speed kills stability". After Ionides 2008, truncated
    importance sampling.
    """
    ratio = (old_logprobs - rollout_logprobs).detach()
    if level == "sequence":
        ratio = sequence_sums(ratio, lengths)
    weights = torch.exp(ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    beyond = weights > cap
    if correction == "truncate":
        return weights.clamp(max=cap), beyond
    return torch.where(beyond, 0.0, weights), beyond
