"""A phase that runs on parts of a batch plans and gives the same as on the whole batch."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.megatron.early import EarlyPart, Forward, join_parts, results_of
from megarl.models.layout import Layout
from megarl.schedule import Executed, MicroBatch, Schedule, compare, plan_phase


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
