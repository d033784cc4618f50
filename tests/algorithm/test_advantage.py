"""Advantages against numbers worked out by hand, and the laws that hold for any batch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithm.advantage import group_advantages, whiten


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


def test_whitening_one_token_or_equal_tokens_stays_finite():
    assert whiten([torch.tensor([3.0])])[0].tolist() == [0.0]
    assert whiten([torch.tensor([3.0, 3.0])])[0].tolist() == [0.0, 0.0]
    assert whiten([]) == []
