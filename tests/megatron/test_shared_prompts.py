"""A prompt that runs once for the completions of its group gives each of them the numbers that its own would."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.megatron.batch import pack
from megarl.models.layout import Layout
from megarl.schedule import MicroBatch, Schedule, compare, plan_phase
from tests.engine_cases import engine, in_groups, objective_of, random_batch, start, total_loss
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

SIZE = 4
LENGTHS = [(4 + 3 * (index // SIZE), 1 + (index * 7) % 9) for index in range(4 * SIZE)]
PROMPTS = [prompt for prompt, _ in LENGTHS]


def grouped_batch(vocab):
    """Groups of SIZE completions of one prompt."""
    return in_groups(random_batch(vocab, LENGTHS), SIZE)


def plan(batch, layout, share, **cut):
    schedule = Schedule("actor_update", mini_batch=len(LENGTHS), share_prompts=share, **cut)
    groups = batch.groups.tolist()
    (mini_batch,) = plan_phase(schedule, batch.lengths.tolist(), layout, 0, groups=groups, prompts=PROMPTS).mini_batches
    return mini_batch


def run(directory, layout, role, share, cut):
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
    found = {sample: part.numpy() for sample, part in numbers.items()}
    return found, total_loss(update, place), update.grad_norm, sum(shape.tokens for shape in executed)


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
    alone, shared = (run_ranks(run, layout.ranks, directory, layout, role, share, cut) for share in (False, True))
    numbers = [{sample: part for found, *_ in ranks for sample, part in found.items()} for ranks in (alone, shared)]
    assert numbers[0].keys() == numbers[1].keys() == set(range(len(LENGTHS)))
    for sample, expected in numbers[0].items():
        np.testing.assert_allclose(numbers[1][sample], expected, atol=2e-5)
    assert shared[0][1] == pytest.approx(alone[0][1], rel=1e-5)
    assert shared[0][2] == pytest.approx(alone[0][2], rel=1e-4)
    ran = [sum(tokens for *_, tokens in ranks[: layout.data]) for ranks in (alone, shared)]
    assert ran[0] == sum(map(sum, LENGTHS)) > ran[1]


def test_groups_stay_whole_where_they_fit():
    batch = grouped_batch(50)
    total = sum(map(sum, LENGTHS)) - (SIZE - 1) * sum(PROMPTS[::SIZE])
    (rank,) = plan(batch, Layout(), True, max_tokens=total).micro_batches
    assert [(one.sharing, one.tokens) for one in rank] == [((SIZE,) * 4, total)]
    small = plan(batch, Layout(), True, max_tokens=max(map(sum, LENGTHS))).micro_batches[0]
    assert all(one.slots <= max(map(sum, LENGTHS)) for one in small)


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
