"""How much better a token was than expected: group-relative and generalized advantages.

Conventions that differ between frameworks, chosen here once:
- group deviation is the unbiased one (divisor n - 1) with 1e-6 added to it, as in DeepSeek's and verl's GRPO;
- a group with fewer than two valid members has nothing to be compared with: advantage 0, not its raw score;
- a masked (invalid) sequence takes part in no mean and no deviation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

GROUP_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


def group_advantages(
    rewards: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor, deviation: bool = True, leave_one_out: bool = False
) -> torch.Tensor:
    """Reward of each sequence relative to its group: r - mean, or with `deviation` (r - mean) / (deviation + 1e-6).

    rewards [n] float, groups [n] integer ids in any order, valid [n] bool; returns [n], 0 where not valid. Groups may differ
    in size. A reward that is not valid is never read, so it may be NaN. With `leave_one_out` the mean is that of the other
    members; the deviation stays the whole group's. Computed in double precision: a mean of equal rewards that were rounded
    to single would differ from them, and the deviation, nearly 0, would make an advantage of that.
    Sources: Shao et al. 2024 (GRPO, DeepSeekMath, arXiv:2402.03300), section 4.1.2, outcome supervision; without the
    deviation Liu et al. 2025 (Dr. GRPO, arXiv:2503.20783), section 3.2; without it and leaving one out Ahmadian et al. 2024
    (RLOO, arXiv:2402.14740), section 3.2.
    Raises ValueError where a valid reward is not finite.
    """
    known = torch.where(valid, rewards, torch.zeros_like(rewards))
    if not torch.isfinite(known).all():
        bad = torch.nonzero(~torch.isfinite(known)).flatten().tolist()
        raise ValueError(f"rewards of samples {bad} are not finite; mask them as not valid or repair the reward")
    _, position = torch.unique(groups, return_inverse=True)
    num_groups = int(position.max()) + 1 if len(position) else 0
    known = known.double()
    weight = valid.double()
    totals = known.new_zeros(num_groups)
    count = totals.index_add(0, position, weight)
    mean = totals.index_add(0, position, known) / count.clamp(min=1)
    centered = (known - mean[position]) * weight
    others = (count - 1).clamp(min=1)
    advantages = centered
    if leave_one_out:  # r - (n mean - r) / (n - 1) = (r - mean) n / (n - 1)
        advantages = centered * (count / others)[position]
    if deviation:
        variance = totals.index_add(0, position, centered.square()) / others
        advantages = advantages / (variance.sqrt() + GROUP_EPSILON)[position]
    return advantages.to(rewards.dtype)


def returns_to_go(rewards: torch.Tensor) -> torch.Tensor:
    """The sum of a sequence's rewards from each token on: [tokens] from [tokens]."""
    return rewards.flip(0).cumsum(0).flip(0)


def token_rewards(reward: float, kl: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Rewards of one sequence's tokens: the score at the last one, less coefficient * KL at each.

    kl [tokens]; returns [tokens]. With coefficient 0, `kl` only gives the length and may be zeros.
    Source: Ouyang et al. 2022 (InstructGPT, arXiv:2203.02155), equation 2, KL taken token by token.
    """
    rewards = -coefficient * kl
    if len(rewards):
        rewards[-1] += reward
    return rewards


def gae(
    rewards: Sequence[torch.Tensor], values: Sequence[torch.Tensor], discount: float, smoothing: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Generalized advantages of some sequences, and the returns their values should have predicted.

    One [tokens] tensor a sequence; returns (advantages, returns), each of the same shapes. The state after the
    last token is terminal, worth 0; a completion cut at its length limit is treated the same way.
        delta_t = r_t + discount * V_(t+1) - V_t
        A_t     = delta_t + discount * smoothing * A_(t+1)
        returns = A + V
    Source: Schulman et al. 2015 (arXiv:1506.02438), equations 11, 12 and 16.
    """
    shapes = [[tuple(one.shape) for one in each] for each in (rewards, values)]
    assert shapes[0] == shapes[1], f"rewards {shapes[0]}, values {shapes[1]}"
    if not rewards:
        return [], []
    # All sequences at once, their ends together: a loop over the tokens of each one by itself takes minutes.
    longest = max(len(one) for one in rewards)
    delta = torch.stack([_at_the_end(one, longest) for one in rewards])
    value = torch.stack([_at_the_end(one, longest) for one in values])
    delta -= value
    delta[:, :-1] += discount * value[:, 1:]
    advantages = torch.empty_like(delta)
    following = delta.new_zeros(len(delta))
    for t in reversed(range(longest)):
        following = delta[:, t] + discount * smoothing * following
        advantages[:, t] = following
    found = [row[longest - len(one) :].clone() for row, one in zip(advantages, rewards, strict=True)]
    return found, [advantage + one for advantage, one in zip(found, values, strict=True)]


def _at_the_end(tokens: torch.Tensor, longest: int) -> torch.Tensor:
    """[longest] with `tokens` at its end and zeros before them."""
    row = tokens.new_zeros(longest)
    row[longest - len(tokens) :] = tokens
    return row


def whiten(advantages: list[torch.Tensor]) -> list[torch.Tensor]:
    """Shift and scale advantages to mean 0 and deviation 1 over all tokens of all given sequences.

    One [tokens] tensor a sequence, same shapes back; leave masked sequences out. With fewer than two tokens
    there is no deviation, and they come back only shifted. Double precision, as for groups.
    Source: the PPO2 code of OpenAI baselines normalises advantages over the batch; unbiased deviation, with
    1e-8 added to the variance, as TRL and verl have it.
    """
    flat = torch.cat(advantages).double() if advantages else torch.zeros(0)
    if not len(flat):
        return [advantage.clone() for advantage in advantages]
    mean = flat.mean()
    scale = torch.rsqrt(flat.var() + WHITEN_EPSILON) if len(flat) > 1 else 1.0
    return [((advantage - mean) * scale).to(advantage.dtype) for advantage in advantages]
