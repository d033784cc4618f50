"""The advantages of a step, from what the recipe names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.algorithm.advantage import gae, group_advantages, returns_to_go, token_rewards, whiten
from megarl.algorithm.kl import kl
from megarl.algorithm.overlong import apply_overlong
from megarl.algorithm.registry import ADVANTAGE
from megarl.recipe.algorithm_section import AlgorithmSection, GroupSection
from megarl.recipe.own_code import load_marked


class Scored(NamedTuple):
    """All sequences of a step."""

    rewards: Tensor  # [sequences], 0 where not valid
    groups: Tensor  # [sequences] ids
    valid: Tensor  # [sequences] bool
    penalties: Sequence[
        Tensor
    ]  # KL of each token, [completion tokens] a sequence; zeros where the KL term is not in the reward
    values: Sequence[Tensor] | None = None  # the critic's, [completion tokens] a sequence
    baselines: Tensor | None = None  # [sequences], the reward of the prompt's greedy completion


class Estimated(NamedTuple):
    """[completion tokens] a sequence."""

    advantages: list[Tensor]
    returns: list[Tensor] | None = None  # what the critic learns


Estimate = Callable[[Scored, float, AlgorithmSection], Estimated]


def estimate(scored: Scored, coefficient: float, settings: AlgorithmSection) -> Estimated:
    """The advantages by `algorithm.advantage`; `coefficient` is that of the KL term in the reward, 0 without one."""
    found = ADVANTAGES.get(settings.advantage)
    return found(scored, coefficient, settings) if found is not None else _of_user(scored, coefficient, settings)


class StepAdvantages(NamedTuple):
    """What the updates of a step learn from."""

    advantages: list[Tensor]  # [own tokens] a sequence
    returns: list[Tensor] | None  # [own tokens] a sequence, for the critic
    valid: Tensor  # [sequences] bool, without what algorithm.overlong masks
    metrics: dict[str, float]


def step_advantages(
    settings: AlgorithmSection,
    rewards: Tensor,
    valid: Tensor,
    groups: Tensor,
    lengths: Tensor,
    truncated: Tensor,
    results: Mapping[str, Sequence[Tensor]],
    baselines: Tensor | None,
    longest: int,
    limit: str,
) -> StepAdvantages:
    """Compute the advantages of a step from its rewards: overlong penalty and mask, KL penalty, then the estimator.

    rewards, valid, groups, lengths (own tokens), truncated: [sequences]. `results` holds what earlier phases computed, by
    name, [own tokens] a sequence: "logprobs" and "reference_logprobs" for a KL term in the reward, "values" with a critic.
    `baselines` [sequences] are the rewards of greedy completions. `longest` and `limit` as of `apply_overlong`.
    """
    metrics: dict[str, float] = {}
    added: Tensor | float = 0.0
    if settings.overlong is not None:
        added, valid, metrics = apply_overlong(settings.overlong, lengths, truncated, valid, longest, limit)
    rewards = torch.where(valid, rewards.float() + added, 0.0)
    penalties, coefficient = [torch.zeros(length) for length in lengths.tolist()], 0.0
    if settings.kl is not None and settings.kl.place == "reward":
        coefficient = settings.kl.coefficient
        pairs = zip(results["logprobs"], results["reference_logprobs"], strict=True)
        penalties = [kl(policy, reference, settings.kl.estimator) for policy, reference in pairs]
    values = results.get("values")
    advantages, returns = estimate(Scored(rewards, groups, valid, penalties, values, baselines), coefficient, settings)
    if returns is not None:
        assert values is not None, "returns are what values are compared with"
        counted = [value for value, counts in zip(values, valid.tolist(), strict=True) if counts]
        metrics["critic/value_mean"] = float(torch.cat(counted).mean())
        metrics["critic/explained_variance"] = explained_variance(values, returns, valid)
    return StepAdvantages(advantages, returns, valid, metrics)


def greedy_baselines(rewards: np.ndarray, scored: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the baseline of each sequence, and which still count: without a baseline a sequence does not.

    rewards [groups] of the prompts' greedy completions, scored [groups] bool; valid [sequences] bool, by group; returns
    fp32 and bool [sequences]. Raises ValueError if no sequence is left.
    """
    group_size = len(valid) // len(rewards)
    valid = valid & np.repeat(scored, group_size)
    if not valid.any():
        raise ValueError("no prompt has both a completion and a greedy completion that could be scored")
    return np.repeat(np.where(scored, rewards, 0.0).astype(np.float32), group_size), valid


def check_advantage(settings: AlgorithmSection) -> None:
    """Raises RecipeError for a function of the user's that does not load."""
    if settings.advantage not in ADVANTAGES:
        load_marked("algorithm.advantage", settings.advantage, ADVANTAGE, {})


def explained_variance(values: Sequence[Tensor], returns: Sequence[Tensor], valid: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the tokens of valid sequences; 0 where returns do not vary.

    1 is a perfect critic, 0 one that says the mean, below 0 one that is worse than that."""
    kept = [sample for sample, ok in enumerate(valid.tolist()) if ok]
    if not kept:
        return 0.0
    said, came = (torch.cat([of[sample] for sample in kept]) for of in (values, returns))
    variance = came.var(correction=0)
    return float(1.0 - (came - said).var(correction=0) / variance) if variance > 0 else 0.0


def _grpo(scored: Scored, coefficient: float, settings: AlgorithmSection) -> Estimated:
    group = settings.group or GroupSection()
    return _of_groups(scored, coefficient, group.deviation, group.leave_one_out)


def _dr_grpo(scored: Scored, coefficient: float, settings: AlgorithmSection) -> Estimated:
    return _of_groups(scored, coefficient, deviation=False, leave_one_out=False)


def _rloo(scored: Scored, coefficient: float, settings: AlgorithmSection) -> Estimated:
    return _of_groups(scored, coefficient, deviation=False, leave_one_out=True)


def _reinforce_plus_plus(scored: Scored, coefficient: float, settings: AlgorithmSection) -> Estimated:
    """Reward less the KL from each token on, whitened over all tokens of the step: Hu et al. 2025 (REINFORCE++,
    arXiv:2501.03262)."""
    pairs = zip(scored.rewards.tolist(), scored.penalties, strict=True)
    return Estimated(_whitened([returns_to_go(token_rewards(*pair, coefficient)) for pair in pairs], scored.valid))


def _reinforce_plus_plus_baseline(scored: Scored, coefficient: float, settings: AlgorithmSection) -> Estimated:
    """Reward less the group's mean, whitened over all tokens of the step: ibid., the form with a baseline."""
    centered = _of_groups(scored, coefficient, deviation=False, leave_one_out=False).advantages
    return Estimated(_whitened(centered, scored.valid))


def _remax(scored: Scored, coefficient: float, settings: AlgorithmSection) -> Estimated:
    """Reward less that of the prompt's greedy completion, less the KL from each token on: Li et al. 2023 (ReMax,
    arXiv:2310.10505). A KL term in the reward is one of tokens, as in their code."""
    assert scored.baselines is not None
    rewards = (scored.rewards - scored.baselines).tolist()
    pairs = zip(rewards, scored.penalties, strict=True)
    return Estimated([returns_to_go(token_rewards(*pair, coefficient)) for pair in pairs])


def _gae(scored: Scored, coefficient: float, settings: AlgorithmSection) -> Estimated:
    assert settings.gae is not None and scored.values is not None
    pairs = zip(scored.rewards.tolist(), scored.penalties, strict=True)
    rewards = [token_rewards(*pair, coefficient) for pair in pairs]
    advantages, returns = gae(rewards, scored.values, settings.gae.discount, settings.gae.smoothing)
    if settings.gae.whiten:
        advantages = _whitened(advantages, scored.valid)
    return Estimated(advantages, returns)


def _of_user(scored: Scored, coefficient: float, settings: AlgorithmSection) -> Estimated:
    function = load_marked("algorithm.advantage", settings.advantage, ADVANTAGE, {})
    scores = torch.where(scored.valid, _scores(scored, coefficient), 0.0)  # a KL term in the reward is none of theirs either
    found = function(scores, scored.groups, scored.valid)
    if found.shape != scored.rewards.shape or not torch.isfinite(found[scored.valid]).all():
        raise ValueError(
            f"algorithm.advantage = {settings.advantage} gave {tuple(found.shape)} advantages for {len(scored.rewards)} "
            "sequences, or some that are not finite; each sequence has one"
        )
    return _spread(torch.where(scored.valid, found, 0.0), scored)


ADVANTAGES: dict[str, Estimate] = {
    "gae": _gae,
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": _remax,
}


def _of_groups(scored: Scored, coefficient: float, deviation: bool, leave_one_out: bool) -> Estimated:
    scores = _scores(scored, coefficient)
    return _spread(group_advantages(scores, scored.groups, scored.valid, deviation, leave_one_out), scored)


def _scores(scored: Scored, coefficient: float) -> Tensor:
    """The rewards of whole sequences, each less its tokens' KL."""
    return scored.rewards - coefficient * torch.stack([penalty.sum() for penalty in scored.penalties])


def _spread(advantages: Tensor, scored: Scored) -> Estimated:
    """The advantage of a sequence at each of its tokens."""
    return Estimated([one.expand(len(tokens)) for one, tokens in zip(advantages, scored.penalties, strict=True)])


def _whitened(advantages: Sequence[Tensor], valid: Tensor) -> list[Tensor]:
    """Whitened over the tokens of valid sequences; the others stay as they are."""
    whitened = list(advantages)
    counted = [sample for sample, ok in enumerate(valid.tolist()) if ok]
    for sample, white in zip(counted, whiten([whitened[sample] for sample in counted]), strict=True):
        whitened[sample] = white
    return whitened
