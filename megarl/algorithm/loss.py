"""The critic's loss, and the weights that aggregate the losses of tokens; the policy's losses are in `policy.py`.

Losses come back per token and unreduced. Reduction is one weighted sum with weights that `loss_weights` takes
from the whole mini-batch before it is split, so the result cannot depend on how the mini-batch was cut.
"""

from __future__ import annotations

import torch


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


def loss_weights(
    completion_lengths: torch.Tensor, valid: torch.Tensor, aggregation: str, longest: int | None = None
) -> torch.Tensor:
    """Weight of every token of sequence i, such that sum_i w_i * sum_t loss_it is the mini-batch's loss.

    completion_lengths [n] tokens, valid [n] bool, both of the WHOLE mini-batch; `longest` is the most tokens that a
    completion may have. Returns float32 [n], 0 where not valid or without tokens; all 0 where nothing is left.
        token_mean     1 / (tokens of all valid sequences): DAPO (arXiv:2503.14476), equation 8
        sequence_mean  1 / (valid sequences * tokens of sequence i): GRPO (arXiv:2402.03300), equation 3
        sequence_sum   1 / (valid sequences): the log-probability of a whole sequence, as REINFORCE and RLOO have it
        fixed_length   1 / (valid sequences * longest): Dr. GRPO (arXiv:2503.20783), section 3.2
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
