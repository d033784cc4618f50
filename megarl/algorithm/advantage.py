"""Group-relative and generalized advantages: how much better a token was than expected.

Conventions that differ between frameworks, chosen here once:
- group deviation is the unbiased one (divisor n - 1) with 1e-6 added to it, as in DeepSeek's and verl's GRPO;
- a group with fewer than two valid members has advantage 0, not its raw score;
- a masked (invalid) sequence enters no mean and no deviation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

GROUP_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


def group_advantages(
    rewards: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor, deviation: bool = True, leave_one_out: bool = False
) -> torch.Tensor:
    """Return each sequence's reward relative to its group: r - mean, or with `deviation` (r - mean) / (deviation + 1e-6).

    rewards [n] float, groups [n] integer ids in any order, valid [n] bool; returns [n], 0 where not valid. Groups may differ
    in size. Invalid rewards are never read, so they may be NaN. With `leave_one_out` the mean is that of the other members;
    the deviation stays the whole group's. Computed in fp64: in fp32 the mean of equal rewards may differ from them by a
    rounding error, which the deviation, nearly 0, would turn into an advantage.
    Sources: Shao et al. 2024 (GRPO, DeepSeekMath, arXiv:2402.03300), section 4.1.2, outcome supervision; without the
    deviation: Liu et al. 2025 (Dr. GRPO, arXiv:2503.20783), section 3.2; leave-one-out: Ahmadian et al. 2024 (RLOO,
    arXiv:2402.14740), section 3.2.
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
    """Return the sum of a sequence's rewards from each token on: [tokens] from [tokens]."""
    return rewards.flip(0).cumsum(0).flip(0)


def token_rewards(reward: float, kl: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Return the rewards of a sequence's tokens: -coefficient * KL at each, plus the score at the last.

    kl [tokens]; returns [tokens]. With coefficient 0, `kl` only gives the length and may be zeros.
    Source: Ouyang et al. 2022 (InstructGPT, arXiv:2203.02155), equation 2, with the KL taken token by token.
    """
    rewards = -coefficient * kl
    if len(rewards):
        rewards[-1] += reward
    return rewards


def gae(
    rewards: Sequence[torch.Tensor], values: Sequence[torch.Tensor], discount: float, smoothing: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the generalized advantages of some sequences, and the returns that their values should have predicted.

    One [tokens] tensor a sequence; returns (advantages, returns) of the same shapes. The state after the last token is
    terminal and worth 0, also for a completion cut at its length limit.
        delta_t = r_t + discount * V_(t+1) - V_t
        A_t     = delta_t + discount * smoothing * A_(t+1)
        returns = A + V
    Source: Schulman et al. 2015 (arXiv:1506.02438), equations 11, 12 and 16.
    """
    assert list(map(len, rewards)) == list(map(len, values)), "one value and one reward a token"
    if not rewards:
        return [], []
    # All sequences at once, padded in front: a loop over the tokens of each sequence by itself takes minutes.
    longest = max(map(len, rewards))
    delta, value = (
        torch.stack([torch.nn.functional.pad(tokens, (longest - len(tokens), 0)) for tokens in sequences])
        for sequences in (rewards, values)
    )
    delta -= value
    delta[:, :-1] += discount * value[:, 1:]
    advantages = torch.empty_like(delta)
    following = delta.new_zeros(len(delta))
    for t in reversed(range(longest)):
        following = delta[:, t] + discount * smoothing * following
        advantages[:, t] = following
    unpadded = [row[longest - len(tokens) :].clone() for row, tokens in zip(advantages, rewards, strict=True)]
    return unpadded, [advantage + value for advantage, value in zip(unpadded, values, strict=True)]


def whiten(advantages: list[torch.Tensor]) -> list[torch.Tensor]:
    """Shift and scale advantages to mean 0 and deviation 1 over all tokens of all given sequences.

    One [tokens] tensor a sequence, same shapes back; leave masked sequences out. A single token has no deviation and is
    only shifted. Computed in fp64, as for groups.
    Source: the PPO2 code of OpenAI baselines normalises advantages over the batch; unbiased deviation, with
    1e-8 added to the variance, as TRL and verl have it.
    """
    flat = torch.cat(advantages).double() if advantages else torch.zeros(0)
    if not len(flat):
        return [advantage.clone() for advantage in advantages]
    mean = flat.mean()
    scale = torch.rsqrt(flat.var() + WHITEN_EPSILON) if len(flat) > 1 else 1.0
    return [((advantage - mean) * scale).to(advantage.dtype) for advantage in advantages]


def informative_groups(rewards: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Say which groups have members with different rewards; in any other group every advantage is 0.

    rewards [groups, members], counted [groups, members] bool; returns [groups] bool. Rewards that do not count are never
    read, so they may be NaN.
    Source: Yu et al. 2025 (DAPO, arXiv:2503.14476), section 3.2 and the condition of equation 11, for any reward; with
    rewards of 0 and 1, as there, it drops groups that are all right or all wrong.
    """
    lowest = torch.where(counted, rewards, torch.inf).amin(dim=1)
    highest = torch.where(counted, rewards, -torch.inf).amax(dim=1)
    return highest > lowest
