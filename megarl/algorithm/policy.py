"""Policy losses, and the importance weights of tokens that another policy sampled.

Each loss returns the loss of each token, unreduced, and which tokens lost their gradient to a bound. Sequence-level ratios
are spread over the tokens, so that `sequence_mean` gives the mean over sequences of the paper. The log-ratio is clamped to
+-20, so that an outlier gives a large finite number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithm.loss import MAX_LOG_RATIO
from megarl.recipe.algorithm_section import FunctionLossSection, MismatchSection, PolicyLossSection
from megarl.recipe.own_code import Marked, load_marked, mark

POLICY_LOSS = "megarl.algorithm.policy_loss"
Loss = tuple[Tensor, Tensor]


def policy_loss(function: Marked) -> Marked:
    """Mark a user's policy loss: f(tokens: PolicyTokens, **options) -> (loss [tokens], clipped [tokens] bool).

    In the recipe: `policy_loss: {kind: function, target: "my_losses:mine", options: {...}}`.
    """
    return mark(function, POLICY_LOSS)


class PolicyTokens(NamedTuple):
    """The tokens that the policy sampled in some whole sequences, end to end: [tokens] three times."""

    logprobs: Tensor  # under the current policy, with a gradient
    old_logprobs: Tensor  # under the policy before the first update of the step
    advantages: Tensor
    lengths: tuple[int, ...]  # tokens of each sequence


def log_ratio(tokens: PolicyTokens) -> Tensor:
    """Return log(new / old) of each token, clamped to +-20."""
    return (tokens.logprobs - tokens.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sums(values: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return at each token the sum over its sequence: [tokens] from [tokens]."""
    # The host knows the lengths: nothing waits for the GPU, and the order of the sums is fixed.
    return torch.cat([part.sum().expand(len(part)) for part in values.split(lengths)])


def sequence_means(values: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return at each token the mean over its sequence: [tokens] from [tokens]."""
    return torch.cat([(part.sum() / max(len(part), 1)).expand(len(part)) for part in values.split(lengths)])


def clip(tokens: PolicyTokens, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Loss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)); with `dual`, where A < 0, at most -dual A.

    Source: Schulman et al. 2017 (PPO, arXiv:1707.06347), equation 7; separate bounds: Yu et al. 2025 (DAPO,
    arXiv:2503.14476), equation 10; dual clip: Ye et al. 2019 (arXiv:1912.09729).
    """
    return _clipped(torch.exp(log_ratio(tokens)), tokens.advantages, low, high, dual)


def gspo(tokens: PolicyTokens, low: float = 3e-4, high: float = 4e-4) -> Loss:
    """The clipped surrogate with the ratio of the sequence, s = exp(mean of its tokens' log-ratios).

    A token's gradient is s times that of its own log-probability (the token form), so that advantages may differ within
    a sequence; where they do not, `sequence_mean` gives the gradient of the sequence form.
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
    # torch.where of two floats would give fp32 whatever the type of the advantages.
    temperature = torch.where(positive, positive_temperature, torch.full_like(tokens.advantages, negative_temperature))
    gate = torch.sigmoid(temperature * (torch.exp(log_ratio(tokens)) - 1.0)) * 4.0 / temperature
    return -tokens.advantages * gate, torch.zeros_like(positive)


def policy_gradient(tokens: PolicyTokens) -> Loss:
    """-A log(new). Source: Williams 1992 (REINFORCE), section 5."""
    return -tokens.advantages * tokens.logprobs, torch.zeros_like(tokens.advantages, dtype=torch.bool)


def load_policy_loss(section: PolicyLossSection) -> Callable[[PolicyTokens], Loss]:
    """Return the loss of a recipe's `algorithm.policy_loss`. Raises RecipeError for a function that does not load.

    The loss raises ValueError where a user's function does not give each token a loss and a mark.
    """
    match section.kind:
        case "clip":
            return partial(clip, low=section.low, high=section.high, dual=section.dual)
        case "gspo":
            return partial(gspo, low=section.low, high=section.high)
        case "cispo":
            return partial(cispo, low=section.low, high=section.high)
        case "gmpo":
            return partial(gmpo, low=section.low, high=section.high)
        case "sapo":
            positive, negative = section.positive_temperature, section.negative_temperature
            return partial(sapo, positive_temperature=positive, negative_temperature=negative)
        case "function":
            function = load_marked("algorithm.policy_loss.target", section.target, POLICY_LOSS, section.options)
            return partial(_checked, section, function)
        case _:
            return policy_gradient


def _checked(section: FunctionLossSection, function: Callable[..., Loss], tokens: PolicyTokens) -> Loss:
    losses, clipped = function(tokens, **section.options)
    if losses.shape != tokens.logprobs.shape or clipped.shape != losses.shape:
        raise ValueError(
            f"the policy loss {section.target} gave losses {tuple(losses.shape)} and clipped {tuple(clipped.shape)} for "
            f"{tuple(tokens.logprobs.shape)} tokens; return one of each for every token"
        )
    return losses, clipped


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> Loss:
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    loss, clipped = torch.maximum(free, bounded), bounded.detach() > free.detach()
    if dual is None:
        return loss, clipped
    worst = torch.where(advantages < 0, -advantages * dual, math.inf)
    return torch.minimum(loss, worst), clipped | (worst < loss.detach())


def mismatch_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, lengths: tuple[int, ...], section: MismatchSection
) -> tuple[Tensor, Tensor]:
    """Return the importance weights of the tokens' losses, corrected and uncorrected.

    The engine samples with other kernels than the trainer's, and with older weights if `rollout.max_staleness` allows it.
    old_logprobs [tokens] of the proximal policy (the trainer's before the first update), rollout_logprobs [tokens] of the
    behavior policy (the engine's), `lengths` the tokens of each sequence; returns two times [tokens], without a gradient.
        w = old / rollout of a token, or of its sequence: the product (level `sequence`), the geometric mean (`geometric`)
        truncate  min(w, cap)
        clip      w clamped to [floor, cap]
        mask      w, and 0 outside [floor, cap]
    A loss bounds the ratio new / old, and w corrects for the policy that sampled: the decoupled objective of Hilton et al.
    2021 (arXiv:2110.00641), for language models Fu et al. 2025 (AReaL, arXiv:2505.24298).
    Sources: token level and truncation: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training", after Ionides 2008, truncated importance sampling; sequence and geometric level, and masks: Liu et al. 2025,
    "When speed kills stability", parts 2 and 3; masks with a lower bound: IcePop, in Ring-1T (arXiv:2510.18855).
    """
    log_weights = (old_logprobs - rollout_logprobs).detach()
    if section.level == "sequence":
        log_weights = sequence_sums(log_weights, lengths)
    elif section.level == "geometric":
        log_weights = sequence_means(log_weights, lengths)
    weights = torch.exp(log_weights.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    if section.correction == "mask":
        return torch.where((weights < section.floor) | (weights > section.cap), 0.0, weights), weights
    return weights.clamp(section.floor, section.cap), weights
