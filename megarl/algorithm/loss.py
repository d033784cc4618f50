"""KL estimators, the critic's loss, and the weights that reduce token losses; the policy's losses are in `policy.py`.

Losses come back per token. They are reduced by one weighted sum, with weights that `loss_weights` takes from the whole
mini-batch before it is split, so the result does not depend on how the mini-batch is cut.
"""

from __future__ import annotations

import torch

# Larger log-ratios only say "far away"; exp overflows fp32 beyond 88.
MAX_LOG_RATIO = 20.0


def kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate KL(policy || reference) of each sampled token: [tokens], differentiable in `logprobs`.

    With d = reference_logprobs - logprobs:
        k1 = -d              unbiased, of either sign; its expected gradient as a loss is 0, so use it in rewards
        k2 = d^2 / 2         biased, its expected gradient as a loss is that of the KL itself
        k3 = exp(d) - 1 - d  unbiased and never negative; d is clamped to 20
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
        d = d.clamp(max=MAX_LOG_RATIO)  # not from below: that gradient holds the policy near the reference
        return torch.expm1(d) - d
    if estimator == "absolute":
        return d.abs()
    raise ValueError(f"algorithm.kl.estimator is {estimator!r}; it is one of k1, k2, k3, absolute")


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return half the squared error of the value, or of the value held within `clip` of the old one if that is larger.

    All [tokens]; returns (loss [tokens], clipped [tokens] bool: the clipped value gave the loss).
    Source: the PPO2 code of OpenAI baselines, with its factor one half; Schulman et al. 2015 (arXiv:1506.02438), section 5.
    """
    error = (values - returns).square()
    clipped_error = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return 0.5 * torch.maximum(error, clipped_error), clipped_error.detach() > error.detach()


def loss_weights(
    completion_lengths: torch.Tensor, valid: torch.Tensor, aggregation: str, longest: int | None = None
) -> torch.Tensor:
    """Return the weight w_i of every token of rollout i; the mini-batch's loss is sum_i w_i * sum_t loss_it.

    completion_lengths [n] tokens, of all segments of a rollout together, and valid [n] bool of the WHOLE mini-batch;
    `longest` is the most tokens that a rollout may have. Returns fp32 [n], 0 where not valid or without tokens.
        token_mean     1 / (tokens of all valid rollouts): DAPO (arXiv:2503.14476), equation 8
        sequence_mean  1 / (valid rollouts * tokens of rollout i): GRPO (arXiv:2402.03300), equation 3
        sequence_sum   1 / (valid rollouts): the log-probability of a whole rollout, as REINFORCE and RLOO have it
        fixed_length   1 / (valid rollouts * longest): Dr. GRPO (arXiv:2503.20783), section 3.2
    Raises ValueError for an unknown aggregation.
    """
    counted = valid & (completion_lengths > 0)
    lengths = completion_lengths.to(torch.float64) * counted
    sequences = counted.sum().clamp(min=1)
    if aggregation == "token_mean":
        weights = counted / lengths.sum().clamp(min=1)
    elif aggregation == "sequence_mean":
        weights = counted / (sequences * lengths.clamp(min=1))
    elif aggregation == "sequence_sum":
        weights = counted / sequences
    elif aggregation == "fixed_length":
        assert longest is not None, "fixed_length divides by the longest"
        weights = counted / (sequences.to(torch.float64) * longest)
    else:
        known = "token_mean, sequence_mean, sequence_sum, fixed_length"
        raise ValueError(f"algorithm.aggregation is {aggregation!r}; it is one of {known}")
    return weights.to(torch.float32)
