"""However a plan cuts a batch, loss and gradient are the same, and what ran is what was planned."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.megatron.role import Role
from megarl.models.layout import Layout
from megarl.schedule import Schedule, plan_phase
from megarl.schedule.schedule import in_micro_batch
from tests.engine_cases import gradients_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

LENGTHS = [(3 + index % 5, 2 + (index * 7) % 11) for index in range(16)]
TOTALS = [prompt + completion for prompt, completion in LENGTHS]


def _plan(layout, samples=None, **schedule):
    """A mini-batch of all sequences; `samples` names them in another order before they are cut."""
    samples = samples or list(range(len(LENGTHS)))
    lengths = [TOTALS[sample] for sample in samples]
    cut = Schedule("actor_update", mini_batch=len(LENGTHS), **schedule)
    (mini_batch,) = plan_phase(cut, lengths, layout, seed=0).mini_batches
    renamed = tuple(
        tuple(replace(one, samples=tuple(samples[place] for place in one.samples)) for one in rank)
        for rank in mini_batch.micro_batches
    )
    return replace(mini_batch, samples=tuple(samples), micro_batches=renamed)


def _random_plan(layout, number):
    """Other rules, other caps, and sequences in another order."""
    draw = random.Random(number)
    samples = list(range(len(LENGTHS)))
    draw.shuffle(samples)
    if number % 2:
        return _plan(layout, samples, sequences=draw.choice([1, 2, 3, 8]))
    cap = draw.randint(in_micro_batch(max(TOTALS), layout), sum(TOTALS))
    return _plan(layout, samples, max_tokens=cap)


def _run(tmp_path, layout, mini_batches, role="actor"):
    """Of each mini-batch: the loss, the whole gradient of all ranks, and what each rank executed."""
    directory = str(save_tiny_model(tmp_path, "qwen3", tied=True))
    ranks = run_ranks(gradients_of, layout.ranks, directory, layout, role, LENGTHS, mini_batches)
    return [
        (found[0][0], np.concatenate([part for _, part, _ in found]), [executed for _, _, executed in found])
        for found in zip(*ranks, strict=True)
    ]


def _assert_same(found, expected):
    (loss, gradient, _), (expected_loss, expected_gradient, _) = found, expected
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    scale = np.linalg.norm(expected_gradient)
    assert scale > 0.1, "there is something to compare"
    assert np.linalg.norm(gradient - expected_gradient) <= 1e-6 * scale


@pytest.mark.layout
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=2, pipeline=2, sequence_parallel=True),
        Layout(pipeline=2, data=2),
        Layout(pipeline=2, virtual_pipeline=2),
        # One sequence a micro-batch: all tokens that predict a completion may be another context rank's.
        Layout(tensor=2, context=2, sequence_parallel=True),
    ],
    ids=str,
)
def test_random_plans_give_one_loss_and_gradient(tmp_path, layout):
    plans = [_random_plan(layout, number) for number in range(6)]
    assert len({plan.micro_batches for plan in plans}) == 6
    first, *others = _run(tmp_path, layout, plans)
    for found in others:
        _assert_same(found, first)


@pytest.mark.layout
def test_executed_reports_tokens_and_slots(tmp_path):
    layout = Layout(tensor=4, sequence_parallel=True)
    cut = _plan(layout, sequences=3)
    ((_, _, executed),) = _run(tmp_path, layout, [cut])
    starts = range(0, len(TOTALS), 3)
    tokens = tuple(sum(TOTALS[start : start + 3]) for start in starts)
    for one in executed:
        assert [shape.sequences for shape in one] == [len(TOTALS[start : start + 3]) for start in starts]
        assert tuple(shape.tokens for shape in one) == tokens
        assert [shape.slots for shape in one] == [-(-count // 4) * 4 for count in tokens]
        assert any(shape.slots != shape.tokens for shape in one)


def test_transformer_engine_is_told_a_length_that_no_padded_sequence_exceeds() -> None:
    """Under context parallelism a sequence of the recipe's longest length is padded beyond it."""
    told = {}
    for longest in (1001, 1004):
        role = SimpleNamespace(_has_own_attention=False, _max_sequence_tokens=1001)
        bounds = torch.tensor([0, longest], dtype=torch.int32)
        micro: Any = SimpleNamespace(continues=(), bounds=bounds, longest=longest)
        told[longest] = Role._packing(role, micro).max_seqlen_q  # type: ignore[arg-type]
    assert told == {1001: 1001, 1004: 1004}
