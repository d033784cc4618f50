"""The advantages of a step, by every name of the recipe, against formulas written out in plain Python; and the slopes of
pairs, which give the gradient of the pairs' mean loss."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid

from megarl.algorithm import advantage
from megarl.algorithm.advantage import group_advantages, whiten
from megarl.algorithm.estimate import (
    ADVANTAGES,
    StepRewards,
    check_advantage,
    estimate,
    explained_variance,
    pair_slopes,
)
from megarl.algorithm.loss import loss_weights
from megarl.recipe import RecipeError
from megarl.recipe.algorithm_section import AlgorithmSection, DpoSection, GaeSection, GroupSection

# Groups of unlike sizes, in no order: one of equal rewards, one of a lone member, one with a masked member.
REWARDS = [1.0, 0.0, 0.5, 2.0, 2.0, 3.0, 0.25, 0.0]
GROUPS = [7, 7, 7, 3, 3, 9, 4, 4]
VALID = [True, True, True, True, True, True, True, False]
LENGTHS = [3, 1, 2, 4, 1, 2, 0, 2]  # one completion is empty
COEFFICIENT = 0.1
PENALTIES = [[0.1 * (at + 1) * (-1) ** token for token in range(length)] for at, length in enumerate(LENGTHS)]
VALUES = [[0.3 * at - 0.2 * token for token in range(length)] for at, length in enumerate(LENGTHS)]
REFERENCE = [[value + 0.4 * at - 0.7 * token for token, value in enumerate(each)] for at, each in enumerate(VALUES)]
BASELINES = [0.5, 0.5, 0.5, -1.0, -1.0, 0.0, 2.0, 2.0]  # one of each group
MEMBERS = {group_id: [at for at, group in enumerate(GROUPS) if group == group_id and VALID[at]] for group_id in GROUPS}


def scored(scores: bool = False) -> StepRewards:
    """The sequences of this file; with `scores` a reward model's take the place of log-probabilities."""
    penalties = [torch.tensor(each, dtype=torch.float64) for each in PENALTIES]
    values = [torch.tensor(each, dtype=torch.float64) for each in VALUES]
    rewards = torch.tensor(REWARDS, dtype=torch.float64) * torch.tensor(VALID)
    baselines = torch.tensor(BASELINES, dtype=torch.float64)
    reference = [torch.tensor(each, dtype=torch.float64) for each in REFERENCE]
    results = {"logprobs": [reward[None] for reward in rewards] if scores else values, "reference_logprobs": reference}
    results |= {"penalties": penalties, "values": values}
    return StepRewards(
        rewards, torch.tensor(VALID), torch.tensor(GROUPS), torch.zeros(len(GROUPS), dtype=torch.bool), [1] * len(GROUPS),
        torch.tensor(LENGTHS), results, baselines, max(LENGTHS), "",
    )  # fmt: skip


def score(sample: int) -> float:
    return REWARDS[sample] - COEFFICIENT * sum(PENALTIES[sample])


def relative(sample: int, deviation: bool = False, leave_one_out: bool = False) -> float:
    members = MEMBERS[GROUPS[sample]]
    if sample not in members or len(members) < 2:
        return 0.0
    others = [other for other in members if other != sample] if leave_one_out else members
    difference = score(sample) - statistics.mean(map(score, others))
    return difference / (statistics.stdev(map(score, members)) + 1e-6) if deviation else difference


def whitened(tokens: list[list[float]]) -> list[list[float]]:
    flat = [token for sample, each in enumerate(tokens) for token in each if VALID[sample]]
    mean, scale = statistics.mean(flat), math.sqrt(statistics.variance(flat) + 1e-8)
    return [[(value - mean) / scale for value in each] if VALID[at] else each for at, each in enumerate(tokens)]


def spread(of: Callable[[int], float]) -> list[list[float]]:
    return [[of(sample)] * length for sample, length in enumerate(LENGTHS)]


def rewards_to_go() -> list[list[float]]:
    scores = [[-COEFFICIENT * penalty for penalty in each] for each in PENALTIES]
    for sample, each in enumerate(scores):
        if each:
            each[-1] += REWARDS[sample] if VALID[sample] else 0.0
    return [[sum(each[token:]) for token in range(len(each))] for each in scores]


def generalized(discount: float, smoothing: float) -> list[list[float]]:
    advantages = []
    for sample, (penalties, values) in enumerate(zip(PENALTIES, VALUES, strict=True)):
        rewards = [-COEFFICIENT * penalty for penalty in penalties]
        if rewards:
            rewards[-1] += REWARDS[sample] if VALID[sample] else 0.0
        following = [*values[1:], 0.0][: len(values)]
        delta = [r + discount * after - v for r, after, v in zip(rewards, following, values, strict=True)]
        advantages.append([
            sum((discount * smoothing) ** (later - token) * delta[later] for later in range(token, len(delta)))
            for token in range(len(delta))
        ])  # fmt: skip
    return advantages


def slopes(scores: list[float], scale: float) -> list[float]:
    """Of the pairs (0, 1), (2, 3), ..., of which the last one is not whole."""
    gradients = []
    for chosen in range(0, len(scores), 2):
        slope = 2 * scale / (1 + math.exp(scores[chosen] - scores[chosen + 1])) * VALID[chosen] * VALID[chosen + 1]
        gradients += [slope, -slope]
    return gradients


def implicit_rewards() -> list[float]:
    pairs = zip(VALUES, REFERENCE, strict=True)
    return [0.3 * sum(new - old for new, old in zip(*pair, strict=True)) for pair in pairs]


EXPECTED: dict[str, tuple[dict[str, Any], Callable[[], list[list[float]]]]] = {
    "grpo": ({}, lambda: spread(lambda sample: relative(sample, deviation=True))), "dr_grpo": ({}, lambda: spread(relative)),
    "rloo": ({}, lambda: spread(lambda sample: relative(sample, leave_one_out=True))),
    "reinforce_plus_plus": ({}, lambda: whitened(rewards_to_go())),
    "reinforce_plus_plus_baseline": ({}, lambda: whitened(spread(relative))),
    "remax": ({}, lambda: [[reward - BASELINES[at] for reward in each] for at, each in enumerate(rewards_to_go())]),
    "gae": ({"gae": GaeSection(discount=0.9, smoothing=0.8, whiten=False)}, lambda: generalized(0.9, 0.8)),
    "none": ({}, lambda: spread(lambda _: 0.0)), "supervised": ({}, lambda: spread(lambda _: 1.0)),
    "dpo": ({"dpo": DpoSection(beta=0.3)}, lambda: spread(lambda sample: slopes(implicit_rewards(), 0.3)[sample])),
    "bradley_terry": ({}, lambda: [[slope] for slope in slopes(REWARDS, 1.0)]),
}  # fmt: skip


def test_every_advantage_has_its_formula() -> None:
    assert EXPECTED.keys() == ADVANTAGES.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_the_advantages_are_those_of_the_formula(name: str) -> None:
    options, formula = EXPECTED[name]
    settings = AlgorithmSection(advantage=name, group_size=2, **options)
    result = estimate(scored(name == "bradley_terry"), COEFFICIENT, settings)
    wanted = formula()
    for sample, valid in enumerate(VALID):
        if valid:
            assert result.advantages[sample].tolist() == pytest.approx(wanted[sample], abs=1e-9), (name, sample)


@pytest.mark.parametrize("deviation", [True, False])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_groups_are_compared_as_the_recipe_says(deviation: bool, leave_one_out: bool) -> None:
    group = GroupSection(deviation=deviation, leave_one_out=leave_one_out)
    result = estimate(scored(), COEFFICIENT, AlgorithmSection(advantage="grpo", group_size=2, group=group))
    wanted = [relative(sample, deviation, leave_one_out) for sample in range(len(REWARDS))]
    for tokens, expected in zip(result.advantages, wanted, strict=True):
        assert tokens.tolist() == pytest.approx([expected] * len(tokens), abs=1e-9)


def test_returns_are_what_values_should_have_been() -> None:
    """tests/trainer/test_advantages.py compares the explained variance with its formula."""
    settings = AlgorithmSection(advantage="gae", group_size=1, gae=GaeSection(discount=0.9, smoothing=0.8, whiten=True))
    given = scored()
    result = estimate(given, COEFFICIENT, settings)
    assert result.returns is not None
    plain, white = generalized(0.9, 0.8), whitened(generalized(0.9, 0.8))
    for sample in (at for at, ok in enumerate(VALID) if ok):
        assert result.advantages[sample].tolist() == pytest.approx(white[sample], abs=1e-9)
    for sample, returns in enumerate(result.returns):
        assert returns.tolist() == pytest.approx([a + v for a, v in zip(plain[sample], VALUES[sample], strict=True)])
    assert explained_variance(result.returns, result.returns, given.valid) == 1.0
    flat = [torch.zeros(length) for length in LENGTHS]
    assert explained_variance(flat, flat, given.valid) == 0.0


@advantage
def doubled(rewards: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return rewards * 2


@advantage
def less_the_sum(rewards: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return rewards - rewards.sum()


@advantage
def broken(rewards: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return rewards / 0.0


def test_an_advantage_of_the_user() -> None:
    settings = AlgorithmSection(advantage=f"{__name__}:doubled", group_size=2)
    check_advantage(settings)
    result = estimate(scored(), COEFFICIENT, settings)
    for at, tokens in enumerate(result.advantages):
        assert tokens.tolist() == pytest.approx([2 * score(at) if VALID[at] else 0.0] * len(tokens))
    result = estimate(scored(), COEFFICIENT, AlgorithmSection(advantage=f"{__name__}:less_the_sum", group_size=2))
    total = sum(score(at) for at, ok in enumerate(VALID) if ok)  # what is not valid comes as 0
    assert float(result.advantages[0][0]) == pytest.approx(score(0) - total, abs=1e-9)
    with pytest.raises(ValueError, match="algorithm.advantage = .*:broken gave .* not finite"):
        estimate(scored(), COEFFICIENT, AlgorithmSection(advantage=f"{__name__}:broken", group_size=2))
    with pytest.raises(RecipeError, match="algorithm.advantage = .* is not decorated"):
        check_advantage(AlgorithmSection(advantage=f"{__name__}:score", group_size=2))


def test_a_valid_reward_that_is_not_finite_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"samples \[1\]"):
        group_advantages(torch.tensor([0.0, math.nan]), torch.zeros(2), torch.ones(2, dtype=torch.bool))


@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(-3, 3, width=32), st.booleans()), min_size=1, max_size=40),
    st.floats(-5, 5),
    st.floats(0.5, 4),
)
def test_group_advantages_sum_to_zero_and_forget_shift_and_order(
    rows: list[tuple[int, float, bool]], shift: float, scale: float
) -> None:
    groups = torch.tensor([g for g, _, _ in rows])
    rewards = torch.tensor([round(r, 2) for _, r, _ in rows], dtype=torch.float64)
    valid = torch.tensor([v for _, _, v in rows])
    advantages = group_advantages(rewards, groups, valid)
    for group in range(5):
        assert advantages[groups == group].sum().abs() < 1e-6
    moved = group_advantages(rewards * scale + shift, groups, valid)
    torch.testing.assert_close(moved, advantages, atol=1e-3, rtol=1e-3)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(group_advantages(rewards[order], groups[order], valid[order]), advantages[order])


def test_whitening_one_token_or_equal_tokens_stays_finite() -> None:
    assert whiten([torch.tensor([3.0])])[0].tolist() == [0.0]
    assert whiten([torch.tensor([3.0, 3.0])])[0].tolist() == [0.0, 0.0]
    assert whiten([]) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30), st.booleans(), st.booleans()), min_size=1, max_size=6),
       st.floats(0.01, 3), st.floats(0, 0.4))  # fmt: skip
def test_the_update_has_the_gradient_of_the_mean_loss(pairs, beta, smoothing):
    values = torch.tensor([value for pair in pairs for value in pair[:2]], dtype=torch.float64, requires_grad=True)
    valid = torch.tensor([flag for pair in pairs for flag in pair[2:]])
    margin = beta * (values[0::2] - values[1::2])
    whole = valid[0::2] & valid[1::2]
    losses = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
    count, results = len(valid), {"logprobs": list(values.detach().split(1))}
    rewards, groups, lengths = torch.zeros(count), torch.arange(count) // 2, torch.ones(count)
    step = StepRewards(rewards, valid, groups, ~valid, [1] * count, lengths, results, None, 1, "")
    spread, _, counted, metrics = pair_slopes(step, beta * values.detach(), beta, smoothing)
    slopes = torch.cat(spread)
    assert torch.equal(counted, whole.repeat_interleave(2))
    if not whole.any():
        assert not metrics and not slopes.any()
        return
    losses[whole].mean().backward()
    assert values.grad is not None
    # As the objective reduces it: the policy gradient under `sequence_sum`.
    weights = loss_weights(torch.ones(len(valid)), counted, "sequence_sum").double()
    assert torch.allclose(-weights * slopes, values.grad, rtol=1e-6, atol=1e-12)
    assert metrics["preference/loss"] == pytest.approx(float(losses[whole].mean().detach()), rel=1e-12)
    for name, side in (("chosen", values[0::2]), ("rejected", values[1::2])):
        assert metrics[f"preference/{name}"] == pytest.approx(float(beta * side[whole].detach().mean()), abs=1e-9)
    assert metrics["preference/accuracy"] == pytest.approx(float((margin[whole] > 0).double().mean()))
