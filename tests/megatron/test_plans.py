"""However a plan cuts a batch, whoever shares a prompt, and whether parts of the batch come early: loss and gradient are the
same, and what ran is what was planned."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.megatron.batch import pack
from megarl.megatron.early import EarlyPart, Forward, join_parts, results_of
from megarl.megatron.role import Role
from megarl.models.layout import Layout
from megarl.schedule import Executed, MicroBatch, Schedule, compare, plan_phase
from megarl.schedule.schedule import in_micro_batch
from tests.engine_cases import engine, gradients_of, in_groups, objective_of, random_batch, start, total_loss
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
        tuple(replace(micro_batch, samples=tuple(samples[place] for place in micro_batch.samples)) for micro_batch in rank)
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
    directory = str(save_tiny_model(tmp_path, "qwen3", tied=True))
    ranks = run_ranks(gradients_of, layout.ranks, directory, layout, LENGTHS, plans)
    gradients = [np.concatenate([part for _, part in of_plan]) for of_plan in zip(*ranks, strict=True)]
    scale = np.linalg.norm(gradients[0])
    assert scale > 0.1, "there is something to compare"
    for (loss, _), gradient in zip(ranks[0], gradients, strict=True):
        assert loss == pytest.approx(ranks[0][0][0], rel=1e-6)
        assert np.linalg.norm(gradient - gradients[0]) <= 1e-6 * scale


def test_transformer_engine_is_told_a_length_that_no_padded_sequence_exceeds() -> None:
    """Under context parallelism a sequence of the recipe's longest length is padded beyond it."""
    max_seqlens = {}
    for longest in (1001, 1004):
        role = SimpleNamespace(_has_own_attention=False, _max_sequence_tokens=1001)
        bounds = torch.tensor([0, longest], dtype=torch.int32)
        micro: Any = SimpleNamespace(continues=(), bounds=bounds, longest=longest)
        max_seqlens[longest] = Role._packing(role, micro).max_seqlen_q  # type: ignore[arg-type]
    assert max_seqlens == {1001: 1001, 1004: 1004}


SIZE = 4
GROUPED = [(4 + 3 * (index // SIZE), 1 + (index * 7) % 9) for index in range(4 * SIZE)]
GROUP_PROMPTS = [prompt for prompt, _ in GROUPED]


def grouped_batch(vocab):
    """Groups of SIZE completions of one prompt."""
    return in_groups(random_batch(vocab, GROUPED), SIZE)


def plan(batch, layout, share, **cut):
    schedule = Schedule("actor_update", mini_batch=len(GROUPED), share_prompts=share, **cut)
    groups = batch.groups.tolist()
    (mini_batch,) = plan_phase(
        schedule, batch.lengths.tolist(), layout, 0, groups=groups, prompts=GROUP_PROMPTS
    ).mini_batches
    return mini_batch


def run_grouped(directory, layout, role, share, cut):
    """Per-token results of this rank's sequences, the loss of an update and its gradient norm, and the tokens that ran."""
    place = start(layout)
    trained = engine(directory, place, role, lr=1e-2)
    batch = grouped_batch(trained.shape.vocab)
    mini_batch = plan(batch, layout, share, **cut)
    results, executed = trained.forward(batch, mini_batch)
    compare(mini_batch, place.data_rank, executed)
    update = trained.update(batch, mini_batch, objective_of(role, int(batch.completion_lengths.sum())))
    compare(mini_batch, place.data_rank, update.executed)
    numbers = results.get("values" if role == "critic" else "logprobs", {})
    per_sample = {sample: part.numpy() for sample, part in numbers.items()}
    return per_sample, total_loss(update, place), update.grad_norm, sum(shape.tokens for shape in executed)


@pytest.mark.parametrize(
    "family, role, layout, cut",
    [
        ("qwen3", "actor", Layout(tensor=2, pipeline=2, sequence_parallel=True), {"max_tokens": 60}),
        ("gemma3", "actor", Layout(data=2), {"max_tokens": 200}),
        pytest.param("deepseek_v3", "actor", Layout(), {"max_tokens": 90}, marks=pytest.mark.nightly),
        pytest.param("qwen3", "critic", Layout(data=2), {"sequences": 4}, marks=pytest.mark.nightly),
    ],
)
def test_sharing_changes_no_number(tmp_path, family, role, layout, cut):
    directory = str(save_tiny_model(tmp_path, family, tied=True))
    alone, shared = (run_ranks(run_grouped, layout.ranks, directory, layout, role, share, cut) for share in (False, True))
    numbers = [{sample: part for results, *_ in ranks for sample, part in results.items()} for ranks in (alone, shared)]
    assert numbers[0].keys() == numbers[1].keys() == set(range(len(GROUPED)))
    for sample, expected in numbers[0].items():
        np.testing.assert_allclose(numbers[1][sample], expected, atol=2e-5)
    assert shared[0][1] == pytest.approx(alone[0][1], rel=1e-5)
    assert shared[0][2] == pytest.approx(alone[0][2], rel=1e-4)
    ran = [sum(tokens for *_, tokens in ranks[: layout.data]) for ranks in (alone, shared)]
    assert ran[0] == sum(map(sum, GROUPED)) > ran[1]


def test_groups_stay_whole_where_they_fit():
    batch = grouped_batch(50)
    total = sum(map(sum, GROUPED)) - (SIZE - 1) * sum(GROUP_PROMPTS[::SIZE])
    (rank,) = plan(batch, Layout(), True, max_tokens=total).micro_batches
    assert [(micro_batch.sharing, micro_batch.tokens) for micro_batch in rank] == [((SIZE,) * 4, total)]
    small = plan(batch, Layout(), True, max_tokens=max(map(sum, GROUPED))).micro_batches[0]
    assert all(micro_batch.slots <= max(map(sum, GROUPED)) for micro_batch in small)


def test_a_masked_sample_of_a_group_takes_no_prompt_along():
    batch = random_batch(50, [(3, 2), (3, 1)])
    batch.samples[1] = replace(batch.samples[1], prompt_ids=batch.samples[0].prompt_ids)
    prompt = batch.samples[1].prompt_ids
    batch = batch.without([0])
    packed = pack(batch, MicroBatch((0, 1), 6, 6, (2,)), torch.device("cpu"), Layout())
    assert packed.input_ids[0, :3].tolist() == prompt.tolist() and packed.input_ids[0, 3:5].tolist() == [0, 0]


def test_a_group_of_unlike_prompts_is_refused():
    batch = random_batch(50, [(3, 2), (3, 1)])
    with pytest.raises(ValueError, match="share_prompts"):
        pack(batch, MicroBatch((0, 1), 6, 6, (2,)), torch.device("cpu"), Layout())


def executed(micro_batches: tuple[MicroBatch, ...]) -> Executed:
    return tuple(micro_batch.shape for micro_batch in micro_batches)


@given(seed=st.integers(0, 10**6), data=st.integers(1, 3), pipeline=st.integers(1, 2), size=st.integers(1, 4))
def test_parts_in_any_order_give_what_the_whole_batch_gives(seed: int, data: int, pipeline: int, size: int) -> None:
    """Every sample once, in micro-batches with its own tokens; results in the order of the batch; what ran as planned."""
    drawn, num_groups = random.Random(seed), 4 * data
    layout = Layout(pipeline=pipeline, data=data)
    groups = [100 + group for group in range(num_groups) for _ in range(size)]
    lengths = [drawn.randint(2, 30) for _ in groups]
    batch: Any = SimpleNamespace(groups=np.array(groups))
    schedule = Schedule("critic_value", max_tokens=64)
    numbers = list(range(num_groups))
    drawn.shuffle(numbers)
    parts = []
    for first in range(0, num_groups, data):
        chosen = sorted(numbers[first : first + data])
        samples = [group * size + member for group in chosen for member in range(size)]
        plan = plan_phase(schedule, [lengths[sample] for sample in samples], layout, seed=seed)
        ran = executed(plan.mini_batches[0].micro_batches[0])
        results = [torch.full((lengths[sample],), float(sample)) for sample in samples]
        part = EarlyPart(np.array([groups[sample] for sample in samples]), {"critic_value": plan})
        part.ran["critic_value"] = Forward(results, ran)
        parts.append(part)

    whole = join_parts(parts, "critic_value", batch)
    (mini_batch,) = whole.mini_batches
    assert sorted(mini_batch.order) == list(mini_batch.samples) == list(range(len(groups)))
    for micro in whole.micro_batches:
        assert micro.tokens == sum(lengths[sample] for sample in micro.samples) <= micro.slots <= 64
    assert len({len(rank) for rank in mini_batch.micro_batches}) == 1, "ranks would wait for each other"
    forward = results_of(parts, "critic_value", batch)
    assert forward is not None
    assert [(len(result), float(result[0])) for result in forward.results] == list(
        zip(lengths, range(len(groups)), strict=True)
    )
    compare(mini_batch, 0, forward.executed)
    assert results_of(parts, "actor_logprob", batch) is None
