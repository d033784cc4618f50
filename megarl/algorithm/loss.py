"""Token losses of policy and critic, and the weights that aggregate them.

Losses come back per token and unreduced. Reduction is one weighted sum with weights that `loss_weights` takes
from the whole mini-batch before it is split, so the result cannot depend on how the mini-batch was cut.
"""

from __future__ import annotations

import torch

from megarl.algorithm.kl import MAX_LOG_RATIO


def policy_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped surrogate, as a loss: max(-A * ratio, -A * clip(ratio, 1 - low, 1 + high)).

    All [tokens]; returns (loss [tokens], clipped [tokens] bool: the clip took the gradient away). The
    log-ratio is clamped to +-20, so that a wild token gives a large finite number.
    Source: Schulman et al. 2017 (PPO, arXiv:1707.06347), equation 7; separate bounds from Yu et al. 2025
    (DAPO, arXiv:2503.14476), equation 10.
    """
    ratio = torch.exp((logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(free, bounded), bounded.detach() > free.detach()


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error, the worse one of the value and the value held within `clip` of the old one.

    All [tokens]; returns (loss [tokens], clipped [tokens] bool: the held value gave the loss).
    Source: the PPO2 code of OpenAI baselines; Schulman et al. 2015 (arXiv:1506.02438) section 5 has its trust
    region. The factor one half is theirs.
    """
    held = old_values + (values - old_values).clamp(-clip, clip)
    free_error = (values - returns).square()
    held_error = (held - returns).square()
    return 0.5 * torch.maximum(free_error, held_error), held_error.detach() > free_error.detach()


def loss_weights(completion_lengths: torch.Tensor, valid: torch.Tensor, aggregation: str) -> torch.Tensor:
    """Weight of every token of sequence i, such that sum_i w_i * sum_t loss_it is the mini-batch's loss.

    completion_lengths [n] tokens, valid [n] bool, both of the WHOLE mini-batch; returns float32 [n], 0 where
    not valid or without tokens; all 0 where nothing is left.
        token_mean     1 / (tokens of all valid sequences): DAPO (arXiv:2503.14476), equation 8
        sequence_mean  1 / (valid sequences * tokens of sequence i): GRPO (arXiv:2402.03300), equation 3
    Raises ValueError for an unknown aggregation.
    """
    counted = valid & (completion_lengths > 0)
    lengths = completion_lengths.to(torch.float64) * counted
    if aggregation == "token_mean":
        weights = counted / lengths.sum().clamp(min=1)
    elif aggregation == "sequence_mean":
        weights = counted / (counted.sum().clamp(min=1) * lengths.clamp(min=1))
    else:
        raise ValueError(f"algorithm.aggregation is {aggregation!r}; it is one of token_mean, sequence_mean")
    return weights.to(torch.float32)
