"""Policy losses: how the ratio of the new policy to the old one enters the loss of each token.

Each returns the loss of each token, unreduced, and which tokens lost their gradient to a bound. Ratios of sequences are
spread over their tokens, so that `sequence_mean` of such a loss is the mean over sequences that its paper has. The
log-ratio is clamped to +-20, so that a wild token gives a large finite number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithm.kl import MAX_LOG_RATIO
from megarl.algorithm.registry import POLICY_LOSS
from megarl.recipe.algorithm_section import (
    CispoLossSection,
    ClipLossSection,
    FunctionLossSection,
    GmpoLossSection,
    GspoLossSection,
    PolicyLossSection,
    SapoLossSection,
)
from megarl.recipe.own_code import load_marked


class PolicyTokens(NamedTuple):
    """Completion tokens of some whole sequences, end to end: three of [tokens], and the tokens of each sequence. Where an
    environment answers in between, its tokens are not among them."""

    logprobs: Tensor  # under the policy that learns; the one that has a gradient
    old_logprobs: Tensor  # under the policy before the first update of the step
    advantages: Tensor
    lengths: tuple[int, ...]


Loss = tuple[Tensor, Tensor]
PolicyLoss = Callable[..., Loss]


def log_ratio(tokens: PolicyTokens) -> Tensor:
    """log(new / old) of each token, within +-20."""
    return (tokens.logprobs - tokens.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sums(values: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The sum of each sequence's tokens, at each of its tokens: [tokens] from [tokens]."""
    # By the lengths that the host knows: on a GPU nothing waits, and the order of the sums is fixed.
    return torch.cat([part.sum().expand(len(part)) for part in values.split(lengths)])


def sequence_means(values: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The same for the mean."""
    return torch.cat([(part.sum() / max(len(part), 1)).expand(len(part)) for part in values.split(lengths)])


def clip(tokens: PolicyTokens, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Loss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)); with `dual`, where A < 0, at most -dual A.

    Source: Schulman et al. 2017 (PPO, arXiv:1707.06347), equation 7; separate bounds: Yu et al. 2025 (DAPO,
    arXiv:2503.14476), equation 10; dual clip: Ye et al. 2019 (arXiv:1912.09729).
    """
    return _clipped(torch.exp(log_ratio(tokens)), tokens.advantages, low, high, dual)


def gspo(tokens: PolicyTokens, low: float = 3e-4, high: float = 4e-4) -> Loss:
    """The clipped surrogate with the ratio of the sequence, s = exp(mean of its tokens' log-ratios).

    A token's gradient is s times that of its own log-probability (the token form), so that advantages may differ in a
    sequence; where they do not, `sequence_mean` gives the gradient of the sequence form.
    Source: Zheng et al. 2025 (GSPO, arXiv:2507.18071), equations 5, 7 and 14.
    """
    sequence = sequence_means(log_ratio(tokens).detach(), tokens.lengths)
    ratio = torch.exp(sequence + tokens.logprobs - tokens.logprobs.detach())
    return _clipped(ratio, tokens.advantages, low, high, None)


def cispo(tokens: PolicyTokens, low: float = 1.0, high: float = 0.3) -> Loss:
    """-A log(new) clip(r, 1 - low, 1 + high), the last factor without a gradient; "clipped" tokens keep theirs.

    Source: MiniMax 2025 (MiniMax-M1, arXiv:2506.13585), equations 4 and 5.
    """
    ratio = torch.exp(log_ratio(tokens).detach())
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    return -tokens.advantages * weight * tokens.logprobs, weight != ratio


def gmpo(tokens: PolicyTokens, low: float = 0.4, high: float = 0.4) -> Loss:
    """-A exp(mean over the sequence of the bounded log-ratios): from above by `high` where A > 0, from below by -low else.

    The advantage is one of the sequence. Source: Zhao et al. 2025 (GMPO, arXiv:2507.20673), section 3.
    """
    ratio = log_ratio(tokens)
    bounded = torch.where(tokens.advantages > 0, ratio.clamp(max=high), ratio.clamp(min=-low))
    return -tokens.advantages * torch.exp(sequence_means(bounded, tokens.lengths)), (bounded != ratio).detach()


def sapo(tokens: PolicyTokens, positive_temperature: float = 1.0, negative_temperature: float = 1.05) -> Loss:
    """-A (4 / t) sigmoid(t (r - 1)), t by the sign of A: the gradient fades smoothly on both sides of r = 1.

    No token is clipped. Source: Gao et al. 2025 (SAPO, arXiv:2511.20347), section 3.
    """
    positive = tokens.advantages > 0
    # Not from a bool times a float, which would be of 32 bits.
    temperature = torch.where(positive, positive_temperature, torch.full_like(tokens.advantages, negative_temperature))
    gate = torch.sigmoid(temperature * (torch.exp(log_ratio(tokens)) - 1.0)) * 4.0 / temperature
    return -tokens.advantages * gate, torch.zeros_like(positive)


def policy_gradient(tokens: PolicyTokens) -> Loss:
    """-A log(new). Source: Williams 1992 (REINFORCE), section 5."""
    return -tokens.advantages * tokens.logprobs, torch.zeros_like(tokens.advantages, dtype=torch.bool)


def load_policy_loss(section: PolicyLossSection) -> Callable[[PolicyTokens], Loss]:
    """The loss of a recipe's `algorithm.policy_loss`. Raises RecipeError for a function that does not load."""
    function = _with_options(section)

    def loss(tokens: PolicyTokens) -> Loss:
        found, clipped = function(tokens)
        if found.shape != tokens.logprobs.shape or clipped.shape != found.shape:
            raise ValueError(
                f"the policy loss {section.kind} gave losses {tuple(found.shape)} and clipped {tuple(clipped.shape)} for "
                f"{tuple(tokens.logprobs.shape)} tokens; each token has one of both"
            )
        return found, clipped

    return loss


def _with_options(section: PolicyLossSection) -> PolicyLoss:
    match section:
        case ClipLossSection():
            return partial(clip, low=section.low, high=section.high, dual=section.dual)
        case GspoLossSection():
            return partial(gspo, low=section.low, high=section.high)
        case CispoLossSection():
            return partial(cispo, low=section.low, high=section.high)
        case GmpoLossSection():
            return partial(gmpo, low=section.low, high=section.high)
        case SapoLossSection():
            positive, negative = section.positive_temperature, section.negative_temperature
            return partial(sapo, positive_temperature=positive, negative_temperature=negative)
        case FunctionLossSection():
            found = load_marked("algorithm.policy_loss.target", section.target, POLICY_LOSS, section.options)
            return partial(found, **section.options)
        case _:
            return policy_gradient


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> Loss:
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    loss, clipped = torch.maximum(free, bounded), bounded.detach() > free.detach()
    if dual is None:
        return loss, clipped
    worst = torch.where(advantages < 0, -advantages * dual, math.inf)
    return torch.minimum(loss, worst), clipped | (worst < loss.detach())
