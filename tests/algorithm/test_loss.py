"""Losses, KL estimators and aggregates against numbers worked out by hand, and gradients against differences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithm.control import adapted
from megarl.algorithm.loss import kl, loss_weights, value_loss

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")
LONGEST = 9


def test_value_loss_by_hand():
    values = torch.tensor([2.0, 2.0, 1.1, 5e3, -5e3], dtype=torch.float64)
    old = torch.ones(5, dtype=torch.float64)
    returns = torch.tensor([3.0, 0.0, 1.0, 1.0, -5e3], dtype=torch.float64)
    loss, clipped = value_loss(values, old, returns, clip=0.5)
    # held values 1.5, 1.5, 1.1, 1.5, 0.5: errors (1 | 2.25), (4 | 2.25), (0.01 | 0.01), (4999^2 | 0.25), (0 | 5000.5^2)
    assert loss.tolist() == pytest.approx([1.125, 2.0, 0.005, 4999.0**2 / 2, 5000.5**2 / 2], rel=1e-9)
    assert clipped.tolist() == [True, False, False, False, True]


def test_kl_estimators_by_hand():
    # Equal, near and far: reference less policy is 0, -1, 1, -15, 15, -30, 30; k3 takes 20 for the last.
    logprobs = torch.tensor([-0.5, 0.0, -1.0, -0.1, -15.1, -0.1, -30.1], dtype=torch.float64)
    reference = torch.tensor([-0.5, -1.0, 0.0, -15.1, -0.1, -30.1, -0.1], dtype=torch.float64)
    found = {estimator: kl(logprobs, reference, estimator).tolist() for estimator in ("k1", "k2", "k3", "absolute")}
    assert found["k1"] == pytest.approx([0.0, 1.0, -1.0, 15.0, -15.0, 30.0, -30.0], abs=1e-9)
    assert found["k2"] == pytest.approx([0.0, 0.5, 0.5, 112.5, 112.5, 450.0, 450.0], abs=1e-9)
    far = [math.exp(-15) + 14, math.exp(15) - 16, math.exp(-30) + 29, math.exp(20) - 21]
    assert found["k3"] == pytest.approx([0.0, math.exp(-1), math.e - 2, *far], rel=1e-9)
    assert found["absolute"] == pytest.approx([0.0, 1.0, 1.0, 15.0, 15.0, 30.0, 30.0], abs=1e-9)
    with pytest.raises(ValueError, match="algorithm.kl.estimator is 'k4'"):
        kl(logprobs, reference, "k4")


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "absolute"])
def test_the_gradient_of_a_kl_term_is_the_difference_quotient(estimator: str) -> None:
    """Of near and far tokens; the kink of `absolute` is left out."""
    reference = torch.tensor([-1.0, -2.0, -0.5, -9.0, -30.0], dtype=torch.float64)
    start = torch.tensor([-1.2, -1.0, -0.6, -0.1, -2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda at: kl(at, reference, estimator), (start,), eps=1e-7, atol=1e-6)


def test_the_gradient_of_the_value_loss_is_the_difference_quotient() -> None:
    """Within the clip, beyond it on either side, and where the clipped value is the worse one."""
    old, returns = torch.zeros(6, dtype=torch.float64), torch.tensor([1.0, 1.0, -1.0, -1.0, 0.1, 0.4], dtype=torch.float64)
    start = torch.tensor([0.1, 0.9, 0.7, -0.6, 0.3, -0.1], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda at: value_loss(at, old, returns, 0.2)[0], (start,), eps=1e-7, atol=1e-6)
    clipped = value_loss(start, old, returns, 0.2)[1]
    assert clipped.any() and not clipped.all()


def test_the_kl_coefficient_follows_the_error_within_a_fifth():
    assert adapted(0.1, measured=0.011, target=0.01, rate=0.5) == pytest.approx(0.1 * 1.05)
    assert adapted(0.1, measured=5.0, target=0.01, rate=0.1) == pytest.approx(0.102)
    assert adapted(0.1, measured=-1.0, target=0.01, rate=0.1) == pytest.approx(0.098)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=16), st.sampled_from(AGGREGATIONS))
def test_an_aggregate_is_the_mean_that_its_name_says(sequences, aggregation):
    """Of valid sequences that have a token; 0 without any."""
    with pytest.raises(ValueError, match="algorithm.aggregation is 'mean'"):
        loss_weights(torch.tensor([1]), torch.tensor([True]), "mean")
    lengths, valid = map(list, zip(*sequences, strict=True))
    generator = torch.Generator().manual_seed(sum(lengths))
    losses = [torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]
    weights = loss_weights(torch.tensor(lengths), torch.tensor(valid), aggregation, LONGEST).tolist()
    found = sum(weight * float(one.sum()) for weight, one in zip(weights, losses, strict=True))
    kept = [one for one, ok in zip(losses, valid, strict=True) if ok and len(one)]
    if not kept:
        assert found == 0.0
        return
    sums = torch.stack([one.sum() for one in kept])
    expected = {
        "token_mean": torch.cat(kept).mean(),
        "sequence_mean": torch.stack([one.mean() for one in kept]).mean(),
        "sequence_sum": sums.mean(),
        "fixed_length": (sums / LONGEST).mean(),
    }[aggregation]
    assert found == pytest.approx(float(expected), rel=1e-6, abs=1e-6)
