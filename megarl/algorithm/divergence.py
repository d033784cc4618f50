"""Divergences of two softmax distributions p (the policy) and q (the teacher), from blocks of their logits.

    reverse_kl       KL(p || q) = sum p (log p - log q)           gradient by logit j: p_j (log p_j - log q_j - D)
    forward_kl       KL(q || p) = sum q (log q - log p)           gradient by logit j: p_j - q_j
    jensen_shannon   b KL(q || m) + (1 - b) KL(p || m), m = b q + (1 - b) p, b = `mixture`
                     gradient by logit j: (1 - b) p_j (log p_j - log m_j - KL(p || m))

Gradients are by the policy's logits; the teacher is constant. Sources: Agarwal et al. 2023 (GKD, arXiv:2306.13649),
section 3; reverse KL on the policy's own completions: Gu et al. 2023 (MiniLLM, arXiv:2306.08543), section 2.

A block has some rows and columns of the logits, whose sums the caller joins. Functions overwrite the logits that they get.
Everything is computed in fp32, or in fp64 where the logits are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The largest log q - log p that is computed: its exponential is finite in fp32. Where the ratio would be larger, p is below
# 1e-34 and counts for nothing.
MOST_LOG_RATIO = 80.0


def normaliser_sums(logits: Tensor, other_logits: Tensor) -> Tensor:
    """Return [3, 2, rows]: the highest logit, the sum of the exponentials relative to it, and 0; of either side."""
    highest = torch.stack([logits.amax(-1), other_logits.amax(-1)])
    sides = zip((logits, other_logits), highest.unsqueeze(-1), strict=True)
    totals = torch.stack([side.sub_(most).exp_().sum(-1) for side, most in sides])
    return torch.stack([highest, totals, torch.zeros_like(totals)])


def kl_sums(logits: Tensor, other_logits: Tensor) -> Tensor:
    """As `normaliser_sums`, with the sum of exp(l - highest) (l - l of the other side) instead of the first side's 0: for
    KL(first || other)."""
    difference = logits - other_logits
    sums = normaliser_sums(logits, other_logits)  # leaves the exponentials
    sums[2, 0] = difference.mul_(logits).sum(-1)
    return sums


def mixture_sums(logs: Tensor, teacher_logs: Tensor, mixture: float) -> Tensor:
    """Return [2, rows]: the parts of KL(p || m) and KL(q || m) in a block of log-probabilities."""
    teacher = teacher_logs.exp()
    log_ratio = teacher_logs.sub_(logs).clamp_(max=MOST_LOG_RATIO)
    mixed = _mixture_over_policy(log_ratio, mixture)
    return torch.stack([logs.exp_().mul_(mixed).sum(-1).neg(), teacher.mul_(log_ratio.sub_(mixed)).sum(-1)])


def reverse_slopes(logs: Tensor, teacher_logs: Tensor, value: Tensor) -> Tensor:
    """Return the gradient of KL(p || q), which is `value` [rows], by the logits of a block of log-probabilities."""
    return logs.exp().mul_(logs.sub_(teacher_logs).sub_(value.unsqueeze(-1)))


def forward_slopes(logs: Tensor, teacher_logs: Tensor, value: Tensor) -> Tensor:
    """Return the gradient of KL(q || p) by the logits."""
    return logs.exp_().sub_(teacher_logs.exp_())


def mixture_slopes(logs: Tensor, teacher_logs: Tensor, value: Tensor, mixture: float) -> Tensor:
    """Return the gradient of the Jensen-Shannon divergence by the logits; `value` is KL(p || m)."""
    mixed = _mixture_over_policy(teacher_logs.sub_(logs).clamp_(max=MOST_LOG_RATIO), mixture)
    return logs.exp_().mul_(mixed.add_(value.unsqueeze(-1))).mul_(mixture - 1.0)


def _mixture_over_policy(log_ratio: Tensor, mixture: float) -> Tensor:
    """Return log m - log p from log q - log p."""
    return log_ratio.exp().mul_(mixture).add_(1.0 - mixture).log_()


def over_likeliest(logprobs: Tensor, teacher_logprobs: Tensor, divergence: str, mixture: float) -> Tensor:
    """Return the divergence over some tokens and all others as one: [rows] from twice [rows, tokens], differentiable in
    `logprobs`.

    It is at most that over the vocabulary, and grows to it with the tokens (the data-processing inequality).
    """
    logs, teacher_logs = (_with_rest(side) for side in (logprobs, teacher_logprobs))
    if divergence == "reverse_kl":
        return (logs.exp() * (logs - teacher_logs)).sum(-1)
    if divergence == "forward_kl":
        return (teacher_logs.exp() * (teacher_logs - logs)).sum(-1)
    mixed = torch.logaddexp(logs + math.log1p(-mixture), teacher_logs + math.log(mixture))
    policy, teacher = ((side.exp() * (side - mixed)).sum(-1) for side in (logs, teacher_logs))
    return mixture * teacher + (1.0 - mixture) * policy


def _with_rest(logprobs: Tensor) -> Tensor:
    """Add a column for all tokens that have none; its probability is at least the rounding error of the others' sum."""
    rest = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(logprobs.dtype).eps)
    return torch.cat([logprobs, rest.log()], -1)
