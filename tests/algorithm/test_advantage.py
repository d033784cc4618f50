"""Advantages against numbers worked out by hand, and the laws that hold for any batch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithm.advantage import gae, group_advantages, token_rewards, whiten


def test_a_masked_reward_changes_nothing_for_its_group():
    groups = torch.tensor([0, 0, 0, 0])
    masked = group_advantages(torch.tensor([1.0, math.nan, 0.0, 1.0]), groups, torch.tensor([True, False, True, True]))
    alone = group_advantages(torch.tensor([1.0, 0.0, 1.0]), groups[:3], torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close(masked[[0, 2, 3]], alone)
    assert masked[1] == 0


def test_a_valid_reward_that_is_not_finite_is_refused_by_name():
    with pytest.raises(ValueError, match=r"samples \[1\]"):
        group_advantages(torch.tensor([0.0, math.nan]), torch.zeros(2), torch.ones(2, dtype=torch.bool))


@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(-3, 3, width=32), st.booleans()), min_size=1, max_size=40),
    st.floats(-5, 5),
    st.floats(0.5, 4),
)
def test_group_advantages_sum_to_zero_and_forget_shift_and_order(rows, shift, scale):
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


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=12), st.floats(0.5, 1))
def test_gae_at_its_two_ends(rows, discount):
    rewards = torch.tensor([r for r, _ in rows], dtype=torch.float64)
    values = torch.tensor([v for _, v in rows], dtype=torch.float64)
    # smoothing 1: returns are the discounted rewards to come, whatever the values; smoothing 0: one step.
    _, (returns,) = gae([rewards], [values], discount, 1.0)
    for t in range(len(rows)):
        to_come = sum(discount**k * float(rewards[t + k]) for k in range(len(rows) - t))
        assert abs(float(returns[t]) - to_come) < 1e-9
    (one_step,), _ = gae([rewards], [values], discount, 0.0)
    following = torch.cat([values[1:], torch.zeros(1, dtype=torch.float64)])
    torch.testing.assert_close(one_step, rewards + discount * following - values)


def test_token_rewards_put_the_score_at_the_end_and_charge_kl_everywhere():
    kl = torch.tensor([1.0, -2.0, 4.0])
    assert token_rewards(10.0, kl, 0.5).tolist() == [-0.5, 1.0, 8.0]
    assert kl.tolist() == [1.0, -2.0, 4.0]


def test_whitening_one_token_or_equal_tokens_stays_finite():
    assert whiten([torch.tensor([3.0])])[0].tolist() == [0.0]
    assert whiten([torch.tensor([3.0, 3.0])])[0].tolist() == [0.0, 0.0]
    assert whiten([]) == []
