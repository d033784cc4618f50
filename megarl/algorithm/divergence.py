"""Divergences of two softmax distributions p (the policy) and q (the teacher), token by token.

    reverse_kl       KL(p || q) = sum p (log p - log q)
    forward_kl       KL(q || p) = sum q (log q - log p)
    jensen_shannon   b KL(q || m) + (1 - b) KL(p || m), m = b q + (1 - b) p, b = `mixture`

The gradient by the policy's logit j is s_j - p_j sum s, with s of

    reverse_kl       p (log p - log q)
    forward_kl       -q
    jensen_shannon   (1 - b) p (log p - log m)

The teacher is constant. Sources: Agarwal et al. 2023 (GKD, arXiv:2306.13649), section 3; reverse KL on the policy's own
completions: Gu et al. 2023 (MiniLLM, arXiv:2306.08543), section 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def summands(logs: Tensor, teacher_logs: Tensor, divergence: str, mixture: float) -> tuple[Tensor, Tensor]:
    """Return what adds up to the divergence over the tokens, and s of its gradient, shaped as the log-probabilities."""
    if divergence == "forward_kl":
        teacher = teacher_logs.exp()
        return teacher * (teacher_logs - logs), -teacher
    if divergence == "reverse_kl":
        policy = logs.exp() * (logs - teacher_logs)
        return policy, policy
    mixed = torch.logaddexp(logs + math.log1p(-mixture), teacher_logs + math.log(mixture))
    policy = (1.0 - mixture) * logs.exp() * (logs - mixed)
    return policy + mixture * teacher_logs.exp() * (teacher_logs - mixed), policy


def slopes(logs: Tensor, teacher_logs: Tensor, total: Tensor, divergence: str, mixture: float) -> Tensor:
    """Return the gradient by the logits of some columns; `total` [rows] is the sum of s over all."""
    return summands(logs, teacher_logs, divergence, mixture)[1] - logs.exp() * total.unsqueeze(-1)


def over_likeliest(logprobs: Tensor, teacher_logprobs: Tensor, divergence: str, mixture: float) -> Tensor:
    """Return the divergence over some tokens and all others as one: [rows] from twice [rows, tokens], differentiable in
    `logprobs`.

    It is at most that over the vocabulary, and grows to it with the tokens (the data-processing inequality).
    """
    sides = [_with_rest(side) for side in (logprobs, teacher_logprobs)]
    return summands(*sides, divergence, mixture)[0].sum(-1)


def _with_rest(logprobs: Tensor) -> Tensor:
    """Add a column for all tokens that have none; its probability is at least the rounding error of the others' sum."""
    rest = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(logprobs.dtype).eps)
    return torch.cat([logprobs, rest.log()], -1)
