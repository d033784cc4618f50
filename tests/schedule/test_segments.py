"""Laws of plans for batches whose rollouts have several segments; `test_plan.py` has those of one segment each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.models.layout import Layout
from megarl.schedule import MicroBatch, MiniBatch, Plan, Schedule, plan_phase, violations, worst_case_micro_batches
from megarl.schedule.schedule import in_micro_batch, padded
from tests.schedule_cases import Case, cases

MOST = 4
SETTINGS = settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow], deadline=None)


@dataclass(frozen=True)
class Segmented:
    """A batch of `case`, one rollout for each of its sequences, and the lengths of each rollout's segments."""

    case: Case
    segments: Sequence[Sequence[int]]

    @property
    def rollouts(self) -> list[int]:
        return [rollout for rollout, lengths in enumerate(self.segments) for _ in lengths]

    @property
    def lengths(self) -> list[int]:
        return [length for lengths in self.segments for length in lengths]

    @property
    def prefixes(self) -> list[int]:
        """First segments have the prompts of their groups, later ones their own."""
        groups = self.case.groups or range(len(self.segments))
        own = iter(range(10_000, 20_000))
        return [
            groups[rollout] if number == 0 else next(own)
            for rollout, lengths in enumerate(self.segments)
            for number, _ in enumerate(lengths)
        ]

    @property
    def prompts(self) -> list[int] | None:
        """A later segment's prompt is all but its last token."""
        if self.case.prompts is None:
            return None
        return [
            prompt if number == 0 else max(1, length - 1)
            for prompt, lengths in zip(self.case.prompts, self.segments, strict=True)
            for number, length in enumerate(lengths)
        ]

    def plan(self) -> Plan:
        case, groups = self.case, None
        if case.groups is not None:
            groups = [case.groups[rollout] for rollout in self.rollouts]
        columns = groups, self.prompts, self.rollouts, self.prefixes
        return plan_phase(case.schedule, self.lengths, case.layout, case.seed, case.cost, *columns)


@st.composite
def segmented(draw: st.DrawFn) -> Segmented:
    case = draw(cases(capped=draw(st.booleans())))
    together = draw(st.sampled_from([1, MOST]))
    if case.schedule.max_tokens is not None and draw(st.booleans()):  # one sequence of the longest alone
        tight = in_micro_batch(case.longest, case.layout)
        case = replace(case, schedule=replace(case.schedule, max_tokens=tight))
    if together > 1:
        cap, sequences = case.schedule.max_tokens, case.schedule.sequences
        cap = None if cap is None else max(cap, in_micro_batch(case.longest, case.layout, together))
        sequences = None if sequences is None else max(sequences, together)
        case = replace(case, schedule=replace(case.schedule, together=together, max_tokens=cap, sequences=sequences))
    generator, often = random.Random(draw(st.integers(0, 2**32))), draw(st.sampled_from([0.0, 0.1, 0.5]))
    segments = [[length] for length in case.lengths]
    for held in segments:
        while len(held) < MOST and generator.random() < often:
            held.append(generator.randint(1, case.longest))
    return Segmented(case, segments)


@SETTINGS
@given(segmented())
def test_every_law_holds_with_segments(batch: Segmented) -> None:
    case = batch.case
    if violations(case.schedule, len(batch.segments), case.layout, case.longest):
        return
    plan = batch.plan()  # whatever the number of segments: a recipe that was checked never fails here
    size = case.schedule.mini_batch or len(batch.segments)
    for epoch in range(case.schedule.epochs):
        samples = [sample for one in plan.mini_batches if one.epoch == epoch for sample in one.samples]
        assert sorted(samples) == list(range(len(batch.lengths))), "every sequence once"
    for mini_batch in plan.mini_batches:
        held = {batch.rollouts[sample] for sample in mini_batch.samples}
        assert len(held) == size, "a mini-batch counts rollouts"
        assert sum(len(batch.segments[rollout]) for rollout in held) == len(mini_batch.samples), "and has them whole"
        check_micro_batches(batch, mini_batch)
    if len(batch.segments) == len(batch.lengths):
        assert plan == case.plan(), "one segment each: the plan of before"


def check_micro_batches(batch: Segmented, mini_batch: MiniBatch) -> None:
    case, rollouts = batch.case, batch.rollouts
    has_segments = len(rollouts) > len(batch.segments)
    count = mini_batch.num_micro_batches
    assert [len(rank) for rank in mini_batch.micro_batches] == [count] * case.layout.data
    assert count % case.layout.micro_batch_step == 0
    assert count <= worst_case_micro_batches(case.schedule, len(batch.segments), case.layout, case.longest, MOST)
    assert sorted(mini_batch.order) == sorted(mini_batch.samples)
    for rank in mini_batch.micro_batches:
        assert any(one.samples for one in rank), "no rank runs padding alone"
        for one in rank:
            check_micro_batch(batch, one, has_segments)
            if case.schedule.together > 1:
                inside = {rollouts[sample] for sample in one.samples}
                assert sum(len(batch.segments[rollout]) for rollout in inside) == len(one.samples)


def check_micro_batch(batch: Segmented, one: MicroBatch, has_segments: bool) -> None:
    schedule, layout = batch.case.schedule, batch.case.layout
    if not one.samples:
        assert has_segments and one == MicroBatch((), 0, in_micro_batch(1, layout))
        return
    spared = 0
    if schedule.share_prompts:
        runs = list(accumulate(one.sharing, initial=0))
        prefixes = [batch.prefixes[sample] for sample in one.samples]
        assert all(len(set(prefixes[start:stop])) == 1 for start, stop in zip(runs, runs[1:], strict=False))
        assert runs[-1] == len(one.samples) and batch.prompts is not None
        spared = sum(one.spared(batch.prompts))
    lengths = [batch.lengths[sample] for sample in one.samples]
    assert one.tokens == sum(lengths) - spared
    filled, multiple = sum(padded(lengths, layout)) - spared, layout.micro_batch_multiple
    assert one.slots == filled + -filled % multiple
    assert schedule.max_tokens is None or one.slots <= schedule.max_tokens
    assert schedule.sequences is None or len(one.samples) <= schedule.sequences


def test_ranks_without_a_sequence_left_run_padding() -> None:
    """Three sequences that each fill a micro-batch, on two ranks."""
    schedule = Schedule("actor_update", max_tokens=10, mini_batch=2)
    (mini_batch,) = plan_phase(schedule, [10, 10, 10], Layout(data=2), 0, rollouts=[0, 0, 1]).mini_batches
    sizes = [[len(one.samples) for one in rank] for rank in mini_batch.micro_batches]
    assert sorted(sizes) == [[1, 0], [1, 1]]


def test_what_does_not_fit_together_is_refused() -> None:
    schedule = Schedule("actor_update", max_tokens=12, together=2)
    with pytest.raises(ValueError, match="max_tokens = 12, but sample 1 has 9 tokens .18 with .* the other segments"):
        plan_phase(schedule, [9, 9, 9], Layout(), 0, rollouts=[0, 1, 1])


@pytest.mark.parametrize(
    ("cut", "field", "nearest"),
    [({"max_tokens": 29}, "micro_batch.max_tokens", "30"), ({"sequences": 2}, "micro_batch.sequences", "3")],
)
def test_a_recipe_needs_room_for_the_most_segments_that_run_together(cut: dict[str, Any], field: str, nearest: str) -> None:
    (fault,) = violations(Schedule("actor_update", together=3, **cut), 4, Layout(), 10)
    assert (fault.field, fault.nearest) == (field, nearest)
    enough = Schedule("actor_update", together=3, **{field.split(".")[1]: int(nearest)})  # type: ignore[arg-type]
    assert not violations(enough, 4, Layout(), 10)
