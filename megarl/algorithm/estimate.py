"""The advantages of a step: overlong penalty, KL penalty, then the estimator that `algorithm.advantage` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from megarl.algorithm.advantage import gae, group_advantages, returns_to_go, token_rewards, whiten
from megarl.algorithm.loss import kl
from megarl.recipe.algorithm_section import AlgorithmSection, GroupSection, OverlongSection
from megarl.recipe.own_code import load_marked, mark

ADVANTAGE = "megarl.algorithm.advantage"
Function = TypeVar("Function", bound=Callable[..., Any])


def advantage(function: Function) -> Function:
    """Mark a user's advantage: f(rewards [n], groups [n] ids, valid [n] bool) -> advantages [n], one a sequence.

    Rewards that are not valid are 0, and their advantages are ignored. In the recipe: `advantage: "my_advantages:mine"`.
    """
    return mark(function, ADVANTAGE)


class Scored(NamedTuple):
    """The rewards of all sequences of a step, and what an estimator may need besides."""

    rewards: Tensor  # [sequences], 0 where not valid
    groups: Tensor  # [sequences] ids
    valid: Tensor  # [sequences] bool
    penalties: Sequence[Tensor]  # KL [own tokens] of each sequence; zeros unless the KL term is in the reward
    values: Sequence[Tensor] | None = None  # the critic's, [own tokens] of each sequence
    baselines: Tensor | None = None  # [sequences], the reward of the prompt's greedy completion


class Estimated(NamedTuple):
    """[own tokens] of each sequence."""

    advantages: list[Tensor]
    returns: list[Tensor] | None = None  # the critic's targets


class StepRewards(NamedTuple):
    """What the advantages of a step are computed from. A token is one that the policy sampled."""

    rewards: Tensor  # [sequences]
    valid: Tensor  # [sequences] bool
    groups: Tensor  # [sequences] ids
    lengths: Tensor  # [sequences] own tokens
    truncated: Tensor  # [sequences] bool
    # By name, [own tokens] of each sequence: "logprobs" and "reference_logprobs" for a KL term in the reward, "values".
    results: Mapping[str, Sequence[Tensor]]
    baselines: Tensor | None  # [sequences], the reward of the prompt's greedy completion
    longest: int  # the most own tokens that a sequence may have
    limit: str  # the recipe key and value that truncate a sequence, for messages


class StepAdvantages(NamedTuple):
    """What the updates of a step learn from."""

    advantages: list[Tensor]  # [own tokens] of each sequence
    returns: list[Tensor] | None  # [own tokens] of each sequence, for the critic
    valid: Tensor  # [sequences] bool, without the sequences that algorithm.overlong masks
    metrics: dict[str, float]


def step_advantages(settings: AlgorithmSection, step: StepRewards) -> StepAdvantages:
    """Compute the advantages of a step from its rewards. Raises ValueError if the overlong mask leaves no sequence."""
    metrics: dict[str, float] = {}
    rewards, valid = step.rewards.float(), step.valid
    if settings.overlong is not None:
        penalties, valid, metrics = _apply_overlong(settings.overlong, step)
        rewards = rewards + penalties
    divergences, coefficient = [torch.zeros(length) for length in step.lengths.tolist()], 0.0
    if settings.kl is not None and settings.kl.place == "reward":
        coefficient = settings.kl.coefficient
        pairs = zip(step.results["logprobs"], step.results["reference_logprobs"], strict=True)
        divergences = [kl(policy, reference, settings.kl.estimator) for policy, reference in pairs]
    values = step.results.get("values")
    scored = Scored(torch.where(valid, rewards, 0.0), step.groups, valid, divergences, values, step.baselines)
    advantages, returns = estimate(scored, coefficient, settings)
    if returns is not None:
        assert values is not None, "an estimator with returns needs values"
        counted = [value for value, counts in zip(values, valid.tolist(), strict=True) if counts]
        metrics["critic/value_mean"] = float(torch.cat(counted).mean())
        metrics["critic/explained_variance"] = explained_variance(values, returns, valid)
    return StepAdvantages(advantages, returns, valid, metrics)


def _apply_overlong(section: OverlongSection, step: StepRewards) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return the penalties to add to the rewards [sequences], the sequences that still count, and metrics.

    Raises ValueError if the mask leaves no sequence: an empty update would still move weights by its momentum.
    """
    penalties = overlong_penalties(step.lengths, step.longest, section.buffer, section.penalty).float()
    metrics = {"reward/overlong_penalty_mean": float(penalties.mean())}
    if not section.mask:
        return penalties, step.valid, metrics
    masked = int((step.truncated & step.valid).sum())
    valid = step.valid & ~step.truncated
    if not valid.any():
        raise ValueError(
            f"no completion is left to train on: all {masked} valid ones reached {step.limit}, and algorithm.overlong.mask "
            "= true leaves them out; raise that limit, or use algorithm.overlong.buffer instead of the mask"
        )
    return penalties, valid, metrics | {"reward/overlong_masked": masked}


def overlong_penalties(lengths: Tensor, longest: int, buffer: int, penalty: float) -> Tensor:
    """Return the penalty of long completions: 0 up to longest - buffer tokens, then linearly to -penalty.

    lengths [n] completion tokens; returns [n], zeros if `buffer` is 0.
    Source: Yu et al. 2025 (DAPO, arXiv:2503.14476), equation 13, whose buffer ends at the longest.
    """
    if not buffer:
        return torch.zeros(len(lengths))
    return -penalty * ((lengths - (longest - buffer)) / buffer).clamp(0.0, 1.0)


def greedy_baselines(rewards: np.ndarray, scored: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the baseline of each sequence, and which sequences still count: those with a baseline.

    rewards [groups] of the prompts' greedy completions, scored [groups] bool; valid [sequences] bool, by group; returns
    fp32 and bool [sequences]. Raises ValueError if no sequence is left.
    """
    group_size = len(valid) // len(rewards)
    valid = valid & np.repeat(scored, group_size)
    if not valid.any():
        raise ValueError("no prompt has both a completion and a greedy completion that could be scored")
    return np.repeat(np.where(scored, rewards, 0.0).astype(np.float32), group_size), valid


def explained_variance(values: Sequence[Tensor], returns: Sequence[Tensor], valid: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the tokens of valid sequences; 0 where returns do not vary.

    A perfect critic has 1, one that always predicts the mean 0, a worse one less than 0."""
    kept = [sample for sample, counts in enumerate(valid.tolist()) if counts]
    if not kept:
        return 0.0
    predicted, target = (torch.cat([tokens[sample] for sample in kept]) for tokens in (values, returns))
    variance = target.var(correction=0)
    return float(1.0 - (target - predicted).var(correction=0) / variance) if variance > 0 else 0.0


def check_advantage(settings: AlgorithmSection) -> None:
    """Raise RecipeError for a user's function that does not load."""
    if settings.advantage not in ADVANTAGES:
        load_marked("algorithm.advantage", settings.advantage, ADVANTAGE, {})


def estimate(scored: Scored, coefficient: float, settings: AlgorithmSection) -> Estimated:
    """Compute the advantages that `algorithm.advantage` names; `coefficient` weights the KL term in the reward.

    Raises ValueError where a user's function gives another number of advantages, or one that is not finite.
    """
    if settings.advantage in ADVANTAGES:
        return ADVANTAGES[settings.advantage](scored, coefficient, settings)
    function = load_marked("algorithm.advantage", settings.advantage, ADVANTAGE, {})
    scores = torch.where(scored.valid, _sequence_scores(scored, coefficient), 0.0)
    advantages = function(scores, scored.groups, scored.valid)
    if advantages.shape != scored.rewards.shape or not torch.isfinite(advantages[scored.valid]).all():
        raise ValueError(
            f"algorithm.advantage = {settings.advantage} gave {tuple(advantages.shape)} advantages for "
            f"{len(scored.rewards)} sequences, or some that are not finite; return one finite number a sequence"
        )
    return _spread(torch.where(scored.valid, advantages, 0.0), scored)


def _group_relative(scored: Scored, coefficient: float, deviation: bool, leave_one_out: bool) -> Estimated:
    scores = _sequence_scores(scored, coefficient)
    return _spread(group_advantages(scores, scored.groups, scored.valid, deviation, leave_one_out), scored)


def _grpo(scored: Scored, coefficient: float, settings: AlgorithmSection) -> Estimated:
    group = settings.group or GroupSection()
    return _group_relative(scored, coefficient, group.deviation, group.leave_one_out)


def _reinforce_plus_plus(scored: Scored, coefficient: float, settings: AlgorithmSection) -> Estimated:
    """The reward minus the KL from each token on, whitened over all tokens of the step.

    Source: Hu et al. 2025 (REINFORCE++, arXiv:2501.03262).
    """
    rewards = _token_rewards(scored, scored.rewards, coefficient)
    return Estimated(_whitened([returns_to_go(tokens) for tokens in rewards], scored.valid))


def _reinforce_plus_plus_baseline(scored: Scored, coefficient: float, settings: AlgorithmSection) -> Estimated:
    """The reward minus the group's mean, whitened over all tokens of the step. Source: ibid., the form with a baseline."""
    centered = _group_relative(scored, coefficient, deviation=False, leave_one_out=False).advantages
    return Estimated(_whitened(centered, scored.valid))


def _remax(scored: Scored, coefficient: float, settings: AlgorithmSection) -> Estimated:
    """The reward minus that of the prompt's greedy completion, minus the KL from each token on.

    Source: Li et al. 2023 (ReMax, arXiv:2310.10505); the KL term is taken token by token, as in their code.
    """
    assert scored.baselines is not None
    rewards = _token_rewards(scored, scored.rewards - scored.baselines, coefficient)
    return Estimated([returns_to_go(tokens) for tokens in rewards])


def _gae(scored: Scored, coefficient: float, settings: AlgorithmSection) -> Estimated:
    assert settings.gae is not None and scored.values is not None
    rewards = _token_rewards(scored, scored.rewards, coefficient)
    advantages, returns = gae(rewards, scored.values, settings.gae.discount, settings.gae.smoothing)
    return Estimated(_whitened(advantages, scored.valid) if settings.gae.whiten else advantages, returns)


ADVANTAGES: dict[str, Callable[[Scored, float, AlgorithmSection], Estimated]] = {
    "gae": _gae,
    "grpo": _grpo,
    "dr_grpo": lambda scored, coefficient, _: _group_relative(scored, coefficient, deviation=False, leave_one_out=False),
    "rloo": lambda scored, coefficient, _: _group_relative(scored, coefficient, deviation=False, leave_one_out=True),
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": _remax,
    "none": lambda scored, coefficient, _: _spread(torch.zeros_like(scored.rewards), scored),
}


def _sequence_scores(scored: Scored, coefficient: float) -> Tensor:
    """The reward of each sequence minus the KL of its tokens: [sequences]."""
    return scored.rewards - coefficient * torch.stack([penalty.sum() for penalty in scored.penalties])


def _token_rewards(scored: Scored, rewards: Tensor, coefficient: float) -> list[Tensor]:
    pairs = zip(rewards.tolist(), scored.penalties, strict=True)
    return [token_rewards(reward, penalty, coefficient) for reward, penalty in pairs]


def _spread(advantages: Tensor, scored: Scored) -> Estimated:
    """Give every token the advantage of its sequence."""
    pairs = zip(advantages, scored.penalties, strict=True)
    return Estimated([advantage.expand(len(tokens)) for advantage, tokens in pairs])


def _whitened(advantages: Sequence[Tensor], valid: Tensor) -> list[Tensor]:
    """Whiten over the tokens of valid sequences; the other sequences stay as they are."""
    whitened = list(advantages)
    counted = [sample for sample, counts in enumerate(valid.tolist()) if counts]
    for sample, white in zip(counted, whiten([whitened[sample] for sample in counted]), strict=True):
        whitened[sample] = white
    return whitened
