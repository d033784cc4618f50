"""Estimators of KL(policy || reference) from the log-probabilities of sampled tokens."""

from __future__ import annotations

import torch

# exp of a log-ratio beyond this says nothing but "far away", and overflows fp32 beyond 88.
MAX_LOG_RATIO = 20.0


def kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token KL estimates, [tokens] from [tokens] twice; differentiable in `logprobs`.

    With d = reference_logprobs - logprobs, tokens sampled from the policy:
        k1 = -d              unbiased, of either sign; as a loss its expected gradient is 0: for rewards
        k2 = d^2 / 2         biased, its expected gradient as a loss is that of the KL itself
        k3 = exp(d) - 1 - d  unbiased and never negative; d is at most 20, against overflow
        absolute = |d|       biased; a distance rather than a divergence
    Source: Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html).
    Raises ValueError for an unknown estimator.
    """
    d = reference_logprobs - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        d = d.clamp(max=MAX_LOG_RATIO)  # not from below: there its gradient is what holds the policy near the reference
        return torch.expm1(d) - d
    if estimator == "absolute":
        return d.abs()
    raise ValueError(f"algorithm.kl.estimator is {estimator!r}; it is one of k1, k2, k3, absolute")


def adapted(coefficient: float, measured: float, target: float, rate: float) -> float:
    """The KL coefficient of the next step: coefficient * (1 + rate * e), e = measured / target - 1 within +-0.2.

    `measured` and `target` are mean KLs of a token. Source: Ziegler et al. 2019 (arXiv:1909.08593), section 2.2, with `rate`
    in place of their 0.1.
    """
    error = min(max(measured / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + rate * error)
