"""The advantages of a step: overlong penalty, KL penalty, then the estimator that `algorithm.advantage` names.

They are those of rollouts, whose segments count as one sequence, end to end, here and in `loss_weights`. So they do not
depend on how a rollout's history fell into segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megarl.algorithm.advantage import gae, group_advantages, returns_to_go, token_rewards, whiten
from megarl.algorithm.loss import kl
from megarl.recipe.algorithm_section import AlgorithmSection, DpoSection, GroupSection, OverlongSection
from megarl.recipe.own_code import Marked, load_marked, mark

ADVANTAGE = "megarl.algorithm.advantage"


def advantage(function: Marked) -> Marked:
    """Mark a user's advantage: f(rewards [n], groups [n] ids, valid [n] bool) -> advantages [n], one a rollout.

    Rewards that are not valid are 0, and their advantages are ignored. In the recipe: `advantage: "my_advantages:mine"`.
    """
    return mark(function, ADVANTAGE)


class StepRewards(NamedTuple):
    """What the advantages of a step are computed from. A token is one that the policy sampled."""

    rewards: Tensor  # [rollouts]
    valid: Tensor  # [rollouts] bool
    groups: Tensor  # [rollouts] ids
    truncated: Tensor  # [rollouts] bool
    segments: Sequence[int]  # sequences of each rollout, which follow each other
    lengths: Tensor  # [sequences] own tokens
    # By name, [own tokens] of each sequence: "logprobs" and "reference_logprobs" for a KL term in the reward, "values". An
    # estimator also gets "penalties", the KL of each token, or zeros.
    results: Mapping[str, Sequence[Tensor]]
    baselines: Tensor | None  # [rollouts], the reward of the prompt's greedy completion
    longest: int  # the most own tokens that a rollout may have
    limit: str  # the recipe key and value that truncate a rollout, for messages


class StepAdvantages(NamedTuple):
    """What the updates of a step learn from."""

    advantages: list[Tensor]  # [own tokens] of each sequence; of a reward model one number each
    returns: list[Tensor] | None  # [own tokens] of each sequence, for the critic
    valid: Tensor  # [rollouts] bool, without the rollouts that algorithm.overlong masks; of pairs, those that are whole
    metrics: dict[str, float] = {}


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
    results = {**step.results, "penalties": divergences}
    step = step._replace(rewards=torch.where(valid, rewards, 0.0), valid=valid, results=results)
    learned = estimate(step, coefficient, settings)
    metrics |= learned.metrics
    if learned.returns is not None:
        values = step.results["values"]
        counted = [value for value, counts in zip(values, valid.tolist(), strict=True) if counts]
        metrics["critic/value_mean"] = float(torch.cat(counted).mean())
        metrics["critic/explained_variance"] = explained_variance(values, learned.returns, valid)
    return learned._replace(metrics=metrics)


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


def estimate(step: StepRewards, coefficient: float, settings: AlgorithmSection) -> StepAdvantages:
    """Compute the advantages that `algorithm.advantage` names; `coefficient` weights the KL term in the reward.

    Raises ValueError where a user's function gives another number of advantages, or one that is not finite.
    """
    if settings.advantage in ADVANTAGES:
        return ADVANTAGES[settings.advantage](step, coefficient, settings)
    function = load_marked("algorithm.advantage", settings.advantage, ADVANTAGE, {})
    scores = torch.where(step.valid, _scores(step, coefficient), 0.0)
    advantages = function(scores, step.groups, step.valid)
    if advantages.shape != step.rewards.shape or not torch.isfinite(advantages[step.valid]).all():
        raise ValueError(
            f"algorithm.advantage = {settings.advantage} gave {tuple(advantages.shape)} advantages for "
            f"{len(step.rewards)} rollouts, or some that are not finite; return one finite number a rollout"
        )
    return _spread(torch.where(step.valid, advantages, 0.0), step)


def _group_relative(step: StepRewards, coefficient: float, deviation: bool, leave_one_out: bool) -> StepAdvantages:
    scores = _scores(step, coefficient)
    return _spread(group_advantages(scores, step.groups, step.valid, deviation, leave_one_out), step)


def _grpo(step: StepRewards, coefficient: float, settings: AlgorithmSection) -> StepAdvantages:
    group = settings.group or GroupSection()
    return _group_relative(step, coefficient, group.deviation, group.leave_one_out)


def _reinforce_plus_plus(step: StepRewards, coefficient: float, settings: AlgorithmSection) -> StepAdvantages:
    """The reward minus the KL from each token on, whitened over all tokens of the step.

    Source: Hu et al. 2025 (REINFORCE++, arXiv:2501.03262).
    """
    rewards = _token_rewards(step, step.rewards, coefficient)
    return StepAdvantages(_whitened([returns_to_go(tokens) for tokens in rewards], step.valid), None, step.valid)


def _reinforce_plus_plus_baseline(step: StepRewards, coefficient: float, settings: AlgorithmSection) -> StepAdvantages:
    """The reward minus the group's mean, whitened over all tokens of the step. Source: ibid., the form with a baseline."""
    centered = _group_relative(step, coefficient, deviation=False, leave_one_out=False).advantages
    return StepAdvantages(_whitened(centered, step.valid), None, step.valid)


def _remax(step: StepRewards, coefficient: float, settings: AlgorithmSection) -> StepAdvantages:
    """The reward minus that of the prompt's greedy completion, minus the KL from each token on.

    Source: Li et al. 2023 (ReMax, arXiv:2310.10505); the KL term is taken token by token, as in their code.
    """
    assert step.baselines is not None
    rewards = _token_rewards(step, step.rewards - step.baselines, coefficient)
    return StepAdvantages([returns_to_go(tokens) for tokens in rewards], None, step.valid)


def _gae(step: StepRewards, coefficient: float, settings: AlgorithmSection) -> StepAdvantages:
    assert settings.gae is not None
    rewards = _token_rewards(step, step.rewards, coefficient)
    advantages, returns = gae(rewards, step.results["values"], settings.gae.discount, settings.gae.smoothing)
    advantages = _whitened(advantages, step.valid) if settings.gae.whiten else advantages
    return StepAdvantages(advantages, returns, step.valid)


def _dpo(step: StepRewards, coefficient: float, settings: AlgorithmSection) -> StepAdvantages:
    """How much the mean loss of the pairs falls as each sequence's log-probability rises.

    The score of a sequence is its implicit reward, beta * log(policy / reference). Source: Rafailov et al. 2023 (DPO,
    arXiv:2305.18290), section 4.
    """
    section, results = settings.dpo or DpoSection(), step.results
    pairs = zip(results["logprobs"], results["reference_logprobs"], strict=True)
    scores = section.beta * torch.stack([(policy.double() - reference.double()).sum() for policy, reference in pairs])
    return pair_slopes(step, scores, section.beta, section.label_smoothing)


def pair_slopes(step: StepRewards, scores: Tensor, scale: float = 1.0, label_smoothing: float = 0.0) -> StepAdvantages:
    """Return the weight of each sequence in the update, which sequences count, and metrics of the loss.

    A batch has the pairs one after the other, the chosen sequence first. A pair counts if both of its sequences are valid.
    With the weights w_i the loss sum_i -w_i x_i / (sequences that count) has the gradient of the pairs' mean loss, where
    score i rises by `scale` with x_i: by beta with the log-probability of DPO, by 1 with a reward model's score.

        m    = score of the chosen - score of the rejected
        loss = -(1 - e) log sigmoid(m) - e log sigmoid(-m), e = label_smoothing
        -d loss / d score of the chosen = sigmoid(-m) - e, and the opposite for the rejected

    scores [sequences].
    Sources: Bradley and Terry 1952, as in Ouyang et al. 2022 (InstructGPT, arXiv:2203.02155), equation 1; Rafailov et al.
    2023 (DPO, arXiv:2305.18290), equation 7 and the gradient below it; label smoothing: Mitchell 2023, "A note on DPO with
    noisy preferences".
    """
    pairs, counted = scores.double().view(-1, 2), step.valid.view(-1, 2).all(1)
    margin = pairs[:, 0] - pairs[:, 1]
    losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    slope = torch.where(counted, torch.sigmoid(-margin) - label_smoothing, 0.0)
    weights = 2.0 * scale * torch.stack([slope, -slope], 1).flatten()  # each pair is two of the sequences that count
    metrics: dict[str, float] = {}
    if counted.any():
        known = {"loss": losses, "accuracy": (margin > 0).double(), "margin": margin}
        known |= {"chosen": pairs[:, 0], "rejected": pairs[:, 1]}
        metrics = {f"preference/{name}": float(values[counted].mean()) for name, values in known.items()}
    results = zip(weights, step.results["logprobs"], strict=True)
    spread = [weight.to(tokens.dtype).expand(len(tokens)) for weight, tokens in results]
    return StepAdvantages(spread, None, counted.repeat_interleave(2), metrics)


ADVANTAGES: dict[str, Callable[[StepRewards, float, AlgorithmSection], StepAdvantages]] = {
    "gae": _gae,
    "grpo": _grpo,
    "dr_grpo": lambda step, coefficient, _: _group_relative(step, coefficient, deviation=False, leave_one_out=False),
    "rloo": lambda step, coefficient, _: _group_relative(step, coefficient, deviation=False, leave_one_out=True),
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": _remax,
    "supervised": lambda step, *_: _spread(torch.ones_like(step.rewards), step),
    "dpo": _dpo,
    # The scores of a reward model, one a sequence, stand in for log-probabilities.
    "bradley_terry": lambda step, *_: pair_slopes(step, torch.cat(list(step.results["logprobs"]))),
    "none": lambda step, coefficient, _: _spread(torch.zeros_like(step.rewards), step),
}


def _scores(step: StepRewards, coefficient: float) -> Tensor:
    """The reward of each rollout minus the KL of its tokens: [rollouts]."""
    return step.rewards - coefficient * torch.stack([penalty.sum() for penalty in step.results["penalties"]])


def _token_rewards(step: StepRewards, rewards: Tensor, coefficient: float) -> list[Tensor]:
    pairs = zip(rewards.tolist(), step.results["penalties"], strict=True)
    return [token_rewards(reward, penalty, coefficient) for reward, penalty in pairs]


def _spread(advantages: Tensor, step: StepRewards) -> StepAdvantages:
    """Give every token the advantage of its rollout."""
    pairs = zip(advantages, step.results["penalties"], strict=True)
    return StepAdvantages([advantage.expand(len(tokens)) for advantage, tokens in pairs], None, step.valid)


def _whitened(advantages: Sequence[Tensor], valid: Tensor) -> list[Tensor]:
    """Whiten over the tokens of valid rollouts; the other rollouts stay as they are."""
    whitened = list(advantages)
    counted = [sample for sample, counts in enumerate(valid.tolist()) if counts]
    for sample, white in zip(counted, whiten([whitened[sample] for sample in counted]), strict=True):
        whitened[sample] = white
    return whitened
