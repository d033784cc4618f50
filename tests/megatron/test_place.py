"""Each layout's process groups are seen inside its place and nowhere else; samples, results and sums move per place."""

import numpy as np
import pytest
import torch.distributed as dist

from megarl import platform
from megarl.models.layout import Layout
from tests.engine_cases import start_places
from tests.ranks import run_ranks

pytestmark = pytest.mark.layout
TENSOR_PIPELINE, PIPELINE_DATA = Layout(tensor=2, pipeline=2), Layout(pipeline=2, data=2)


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
