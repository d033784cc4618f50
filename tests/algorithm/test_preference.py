"""The slopes of pairs give the gradient of the pairs' mean loss, whatever pairs are masked."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid

from megarl.algorithm.estimate import StepRewards, estimate, pair_slopes
from megarl.algorithm.loss import loss_weights
from megarl.recipe.algorithm_section import AlgorithmSection, DpoSection


def step_of(valid, logprobs, reference=()):
    """Of sequences with these log-probabilities of their tokens, in pairs."""
    count, lengths = len(valid), torch.tensor([len(tokens) for tokens in logprobs])
    results = {"logprobs": logprobs, "reference_logprobs": reference}
    rewards, groups = torch.zeros(count), torch.arange(count) // 2
    return StepRewards(rewards, valid, groups, ~valid, [1] * count, lengths, results, None, 2, "")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30), st.booleans(), st.booleans()), min_size=1, max_size=6),
       st.floats(0.01, 3), st.floats(0, 0.4))  # fmt: skip
def test_the_update_has_the_gradient_of_the_mean_loss(pairs, beta, smoothing):
    values = torch.tensor([value for pair in pairs for value in pair[:2]], dtype=torch.float64, requires_grad=True)
    valid = torch.tensor([flag for pair in pairs for flag in pair[2:]])
    margin = beta * (values[0::2] - values[1::2])
    whole = valid[0::2] & valid[1::2]
    losses = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
    step = step_of(valid, list(values.detach().split(1)))
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
    assert metrics["preference/accuracy"] == pytest.approx(float((margin[whole] > 0).double().mean()))


def test_an_implicit_reward_sums_the_tokens_of_its_sequence():
    logprobs = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]
    reference = [torch.tensor([-2.0, -2.5]), torch.tensor([-1.0])]
    algorithm = AlgorithmSection(advantage="dpo", group_size=2, dpo=DpoSection(beta=0.5))
    metrics = estimate(step_of(torch.ones(2, dtype=torch.bool), logprobs, reference), 0.0, algorithm).metrics
    assert (metrics["preference/chosen"], metrics["preference/rejected"]) == (0.75, -1.0)
