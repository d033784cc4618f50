"""Each layout's process groups are seen inside its place and nowhere else; samples, results and sums move per place."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl import platform
from megarl.models.layout import Layout
from megarl.schedule import Plan, Schedule, plan_phase
from tests.engine_cases import small_batch, start_places
from tests.ranks import run_ranks

pytestmark = pytest.mark.layout
TENSOR_PIPELINE, PIPELINE_DATA = Layout(tensor=2, pipeline=2), Layout(pipeline=2, data=2)
CONTEXT = Layout(tensor=2, context=2, sequence_parallel=True)


def _groups_seen():
    """What megatron-core answers in, between and after the places of two layouts."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    def seen():
        try:
            tensor, data = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group()
            ranks = dist.get_process_group_ranks(tensor), dist.get_process_group_ranks(data)
            return (*ranks, parallel_state.get_pipeline_model_parallel_rank())
        except AssertionError as error:
            return str(error)

    def random_states():
        return {name: state.numpy() for name, state in get_cuda_rng_tracker().get_states().items()}

    places = start_places([TENSOR_PIPELINE, PIPELINE_DATA, Layout(2, 2)])
    actor, critic = places.values()
    answers = [seen()]
    with actor.active():
        answers.append(seen())
        actor_states = random_states()
        with pytest.raises(KeyError), critic.active():
            answers.append(seen())
            critic_states = random_states()
            raise KeyError("an error leaves the place too")
        answers.append(seen())
        np.testing.assert_equal(random_states(), actor_states)
    answers.append(seen())
    assert random_states() == {}
    # Tensor ranks draw different numbers: the tracker is the place's as well.
    differ = any((state != actor_states[name]).any() for name, state in critic_states.items())
    return answers, differ, (actor.tensor_rank, critic.tensor_rank)


def test_megatron_sees_the_groups_of_the_active_place_only():
    for rank, (answers, differ, tensor_ranks) in enumerate(run_ranks(_groups_seen, 4)):
        tensor, stage = [[0, 1], [2, 3]][rank // 2], rank // 2
        of_actor = (tensor, [rank], stage)
        of_critic = ([rank], tensor, stage)
        nothing = "tensor model parallel group is not initialized"
        assert answers == [nothing, of_actor, of_critic, of_actor, nothing]
        assert differ == (tensor_ranks[0] != tensor_ranks[1])


def _moved():
    """Tokens, results and sums through both places of one batch."""
    from megarl.megatron.parallel import distribute_samples, reduce_scalars
    from megarl.megatron.role import share_results

    batch = small_batch(vocab=50)

    class Payload:
        """The engines' answers, as rank 0 of each data-parallel rank fetches them."""

        def fetch(self, samples):
            self.fetched = samples
            return {sample: batch.samples[sample] for sample in samples}

    found = {}
    for layout, place in start_places([TENSOR_PIPELINE, PIPELINE_DATA, CONTEXT]).items():
        plans = [
            plan_phase(Schedule(phase, max_tokens=cap), batch.lengths.tolist(), layout, 0)
            for phase, cap in (("critic_value", 40), ("actor_logprob", 100))
        ]
        payload = Payload()
        samples = distribute_samples(payload, plans, place)
        results = {
            sample: torch.full((int(batch.completion_lengths[sample]),), float(sample))
            for one in plans[0].mini_batches[0].micro_batches[place.data_rank]
            for sample in one.samples
            if place.is_source
        }
        shared = share_results(results, plans[0].mini_batches[0], batch, place)
        own = {"sum": 1.0 + place.data_rank} if place.is_source else {}
        found[layout] = {
            "samples": sorted(samples),
            "wanted": _runs_on(plans, place.data_rank),
            "same tokens": all((samples[sample].prompt_ids == batch.samples[sample].prompt_ids).all() for sample in samples),
            "fetched": hasattr(payload, "fetched"),
            "shared": [part.tolist() for part in shared],
            "sum": reduce_scalars(own, place, "sum")["sum"],
            "max": reduce_scalars(own, place, "max")["sum"],
        }
    return found


def _runs_on(plans: list[Plan], data_rank: int) -> list[int]:
    return sorted(
        {
            sample
            for plan in plans
            for mini_batch in plan.mini_batches
            for one in mini_batch.micro_batches[data_rank]
            for sample in one.samples
        }
    )


def test_samples_results_and_sums_move_within_each_place():
    batch = small_batch(vocab=50)
    expected = [[float(sample)] * int(length) for sample, length in enumerate(batch.completion_lengths)]
    ranks = run_ranks(_moved, 4)
    # The two context ranks run the same sequences: both fetch them, and one answers for both.
    expectations = (
        (TENSOR_PIPELINE, {0}, 1.0, 1.0),
        (PIPELINE_DATA, {0, 1}, 3.0, 2.0),
        (CONTEXT, {0, 2}, 1.0, 1.0),
    )
    for layout, leaders, total, largest in expectations:
        for rank, found in enumerate(one[layout] for one in ranks):
            assert found["samples"] == found["wanted"] and found["same tokens"], (layout, rank)
            assert found["fetched"] == (rank in leaders), (layout, rank)
            assert found["shared"] == expected, (layout, rank)
            assert (found["sum"], found["max"]) == (total, largest), (layout, rank)
    halves = [set(ranks[rank][PIPELINE_DATA]["samples"]) for rank in (0, 1)]
    assert halves[0] != halves[1] and halves[0] | halves[1] == set(range(12))


def _refusals():
    from megarl.megatron.parallel import start_parallel

    platform.current.start_process_group(0, 60.0)
    messages = []
    for layout in (Layout(data=2), Layout(context=3)):
        with pytest.raises(ValueError) as refused:
            start_parallel([layout], seed=1, timeout_s=60.0, local_rank=0)
        messages.append(str(refused.value))
    return messages


def test_a_layout_that_cannot_run_is_refused_by_name():
    (messages,) = run_ranks(_refusals, 1)
    assert messages == [f"trainer.ranks = {ranks}, but 1 ranks were started; start as many" for ranks in (2, 3)]
