"""The advantages of a step: overlong penalty, KL penalty, then the estimator that `algorithm.advantage` names.

They are those of rollouts, whose segments count as one sequence, end to end, here and in `loss_weights`. So they do not
depend on how a rollout's history fell into segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from megarl.algorithm.advantage import gae, group_advantages, returns_to_go, token_rewards, whiten
from megarl.algorithm.loss import kl
from megarl.algorithm.preference import PairSlopes, implicit_rewards, pair_slopes
from megarl.recipe.algorithm_section import AlgorithmSection, DpoSection, GroupSection, OverlongSection
from megarl.recipe.own_code import load_marked, mark

ADVANTAGE = "megarl.algorithm.advantage"
Function = TypeVar("Function", bound=Callable[..., Any])


def advantage(function: Function) -> Function:
    """Mark a user's advantage: f(rewards [n], groups [n] ids, valid [n] bool) -> advantages [n], one a rollout.

    Rewards that are not valid are 0, and their advantages are ignored. In the recipe: `advantage: "my_advantages:mine"`.
    """
    return mark(function, ADVANTAGE)


class Scored(NamedTuple):
    """The rewards of all rollouts of a step, and what an estimator may need besides."""

    rewards: Tensor  # [rollouts], 0 where not valid
    groups: Tensor  # [rollouts] ids
    valid: Tensor  # [rollouts] bool
    penalties: Sequence[Tensor]  # KL [own tokens] of each rollout; zeros unless the KL term is in the reward
    values: Sequence[Tensor] | None = None  # the critic's, [own tokens] of each rollout
    baselines: Tensor | None = None  # [rollouts], the reward of the prompt's greedy completion
    results: Mapping[str, Sequence[Tensor]] = {}  # as in `StepRewards`


class Estimated(NamedTuple):
    """[own tokens] of each rollout; of a reward model one number each."""

    advantages: list[Tensor]
    returns: list[Tensor] | None = None  # the critic's targets
    valid: Tensor | None = None  # [sequences] bool: those in whole pairs; None without pairs
    metrics: dict[str, float] = {}


class StepRewards(NamedTuple):
    """What the advantages of a step are computed from. A token is one that the policy sampled."""

    rewards: Tensor  # [rollouts]
    valid: Tensor  # [rollouts] bool
    groups: Tensor  # [rollouts] ids
    truncated: Tensor  # [rollouts] bool
    segments: Sequence[int]  # sequences of each rollout, which follow each other
    lengths: Tensor  # [sequences] own tokens
    # By name, [own tokens] of each sequence: "logprobs" and "reference_logprobs" for a KL term in the reward, "values".
    results: Mapping[str, Sequence[Tensor]]
    baselines: Tensor | None  # [rollouts], the reward of the prompt's greedy completion
    longest: int  # the most own tokens that a rollout may have
    limit: str  # the recipe key and value that truncate a rollout, for messages


class StepAdvantages(NamedTuple):
    """What the updates of a step learn from."""

    advantages: list[Tensor]  # [own tokens] of each sequence
    returns: list[Tensor] | None  # [own tokens] of each sequence, for the critic
    valid: Tensor  # [rollouts] bool, without the rollouts that algorithm.overlong masks
    metrics: dict[str, float]


def step_advantages(settings: AlgorithmSection, step: StepRewards) -> StepAdvantages:
    """Compute the advantages of a step from its rewards. Raises ValueError if the overlong mask leaves no rollout."""
    segments = list(step.segments)
    if max(segments) == 1:  # a reward model's results are one number a sequence, and have no tokens to split
        return _rollout_advantages(settings, step)
    own_lengths = [part.tolist() for part in step.lengths.split(segments)]  # of the segments of each rollout
    joined: dict[str, Sequence[Tensor]] = {}
    for name, values in step.results.items():
        rows = iter(values)
        joined[name] = [torch.cat(list(islice(rows, count))) for count in segments]
    lengths = torch.tensor([sum(part) for part in own_lengths])
    learned = _rollout_advantages(settings, step._replace(lengths=lengths, results=joined))

    def split(rows: Sequence[Tensor]) -> list[Tensor]:
        return [piece for row, part in zip(rows, own_lengths, strict=True) for piece in row.split(part)]

    returns = None if learned.returns is None else split(learned.returns)
    return learned._replace(advantages=split(learned.advantages), returns=returns)


def _rollout_advantages(settings: AlgorithmSection, step: StepRewards) -> StepAdvantages:
    """`step_advantages` of rollouts that are one sequence each."""
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
    scored = Scored(torch.where(valid, rewards, 0.0), step.groups, valid, divergences, values, step.baselines, step.results)
    advantages, returns, counted_pairs, of_pairs = estimate(scored, coefficient, settings)
    valid, metrics = valid if counted_pairs is None else counted_pairs, metrics | of_pairs
    if returns is not None:
        assert values is not None, "an estimator with returns needs values"
        counted = [value for value, counts in zip(values, valid.tolist(), strict=True) if counts]
        metrics["critic/value_mean"] = float(torch.cat(counted).mean())
        metrics["critic/explained_variance"] = explained_variance(values, returns, valid)
    return StepAdvantages(advantages, returns, valid, metrics)


def evaluation_loss(
    metrics: Mapping[str, float], logprobs: Sequence[Tensor], valid: np.ndarray
) -> tuple[dict[str, float], float]:
    """Return the loss of held-out rows, and over how many tokens or pairs it is a mean: the metrics of pairs where a step's
    advantages have some, else minus the mean log-probability of a token."""
    if pairs := {name.removeprefix("preference/"): value for name, value in metrics.items()}:
        return pairs, float(valid.sum()) / 2
    counted = torch.cat([tokens for tokens, counts in zip(logprobs, valid.tolist(), strict=True) if counts]).double()
    return {"loss": -float(counted.mean())}, float(len(counted))


def _apply_overlong(section: OverlongSection, step: StepRewards) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return the penalties to add to the rewards [rollouts], the rollouts that still count, and metrics.

    Raises ValueError if the mask leaves no rollout: an empty update would still move weights by its momentum.
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
    """Return the baseline of each rollout, and which rollouts still count: those with a baseline.

    rewards [groups] of the prompts' greedy completions, scored [groups] bool; valid [rollouts] bool, by group; returns
    fp32 and bool [rollouts]. Raises ValueError if no rollout is left.
    """
    group_size = len(valid) // len(rewards)
    valid = valid & np.repeat(scored, group_size)
    if not valid.any():
        raise ValueError("no prompt has both a completion and a greedy completion that could be scored")
    return np.repeat(np.where(scored, rewards, 0.0).astype(np.float32), group_size), valid


def explained_variance(values: Sequence[Tensor], returns: Sequence[Tensor], valid: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the tokens of valid rollouts; 0 where returns do not vary.

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
    scores = torch.where(scored.valid, _scores(scored, coefficient), 0.0)
    advantages = function(scores, scored.groups, scored.valid)
    if advantages.shape != scored.rewards.shape or not torch.isfinite(advantages[scored.valid]).all():
        raise ValueError(
            f"algorithm.advantage = {settings.advantage} gave {tuple(advantages.shape)} advantages for "
            f"{len(scored.rewards)} rollouts, or some that are not finite; return one finite number a rollout"
        )
    return _spread(torch.where(scored.valid, advantages, 0.0), scored)


def _group_relative(scored: Scored, coefficient: float, deviation: bool, leave_one_out: bool) -> Estimated:
    scores = _scores(scored, coefficient)
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


def _dpo(scored: Scored, coefficient: float, settings: AlgorithmSection) -> Estimated:
    """How much the mean loss of the pairs falls as each sequence's log-probability rises. Source: see `pair_slopes`."""
    section, results = settings.dpo or DpoSection(), scored.results
    rewards = implicit_rewards(results["logprobs"], results["reference_logprobs"], section)
    return _of_pairs(pair_slopes(rewards, scored.valid, section.beta, section.label_smoothing), scored)


def _bradley_terry(scored: Scored, coefficient: float, settings: AlgorithmSection) -> Estimated:
    """The same for the scores of a reward model, one a sequence, which stand in for its log-probabilities."""
    return _of_pairs(pair_slopes(torch.cat(list(scored.results["logprobs"])), scored.valid), scored)


def _of_pairs(slopes: PairSlopes, scored: Scored) -> Estimated:
    pairs = zip(slopes.weights, scored.results["logprobs"], strict=True)
    advantages = [weight.to(tokens.dtype).expand(len(tokens)) for weight, tokens in pairs]
    return Estimated(advantages, None, slopes.valid, slopes.metrics)


ADVANTAGES: dict[str, Callable[[Scored, float, AlgorithmSection], Estimated]] = {
    "gae": _gae,
    "grpo": _grpo,
    "dr_grpo": lambda scored, coefficient, _: _group_relative(scored, coefficient, deviation=False, leave_one_out=False),
    "rloo": lambda scored, coefficient, _: _group_relative(scored, coefficient, deviation=False, leave_one_out=True),
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": _remax,
    "supervised": lambda scored, *_: _spread(torch.ones_like(scored.rewards), scored),
    "dpo": _dpo,
    "bradley_terry": _bradley_terry,
    "none": lambda scored, coefficient, _: _spread(torch.zeros_like(scored.rewards), scored),
}


def _scores(scored: Scored, coefficient: float) -> Tensor:
    """The reward of each rollout minus the KL of its tokens: [rollouts]."""
    return scored.rewards - coefficient * torch.stack([penalty.sum() for penalty in scored.penalties])


def _token_rewards(scored: Scored, rewards: Tensor, coefficient: float) -> list[Tensor]:
    pairs = zip(rewards.tolist(), scored.penalties, strict=True)
    return [token_rewards(reward, penalty, coefficient) for reward, penalty in pairs]


def _spread(advantages: Tensor, scored: Scored) -> Estimated:
    """Give every token the advantage of its rollout."""
    pairs = zip(advantages, scored.penalties, strict=True)
    return Estimated([advantage.expand(len(tokens)) for advantage, tokens in pairs])


def _whitened(advantages: Sequence[Tensor], valid: Tensor) -> list[Tensor]:
    """Whiten over the tokens of valid rollouts; the other rollouts stay as they are."""
    whitened = list(advantages)
    counted = [sample for sample, counts in enumerate(valid.tolist()) if counts]
    for sample, white in zip(counted, whiten([whitened[sample] for sample in counted]), strict=True):
        whitened[sample] = white
    return whitened
