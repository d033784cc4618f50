"""Laws of plans, over wide grids of layouts, schedules and batches (hypothesis)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.models.layout import Layout
from megarl.schedule import (
    Cost,
    MicroBatch,
    MiniBatch,
    Plan,
    Schedule,
    plan_phase,
    violations,
    worst_case_micro_batches,
)
from megarl.schedule.phase_plan import most_rows_behind_prompts
from tests.schedule_cases import Case, cases


def check_plan(case: Case, plan: Plan) -> None:
    """All laws of one plan."""
    assert plan.phase == case.schedule.phase and plan.layout == case.layout
    per_epoch = len(case.lengths) // (case.schedule.mini_batch or len(case.lengths))
    assert [one.epoch for one in plan.mini_batches] == [e for e in range(case.schedule.epochs) for _ in range(per_epoch)]
    for epoch in range(case.schedule.epochs):
        samples = [sample for one in plan.mini_batches if one.epoch == epoch for sample in one.samples]
        assert sorted(samples) == list(range(len(case.lengths)))  # every sample once
    for mini_batch in plan.mini_batches:
        check_order(case, mini_batch)
        check_counts(case, mini_batch)
        check_slots(case, mini_batch)
        check_groups(case, mini_batch)


def check_order(case: Case, mini_batch: MiniBatch) -> None:
    size = case.schedule.mini_batch or len(case.lengths)
    assert len(mini_batch.samples) == size
    if size == len(case.lengths):
        assert mini_batch.samples == tuple(range(size))  # a single mini-batch keeps batch order
    ran = tuple(sample for rank in mini_batch.micro_batches for one in rank for sample in one.samples)
    assert mini_batch.order == ran and sorted(ran) == sorted(mini_batch.samples)
    if case.schedule.sequences is not None and not case.schedule.share_prompts:
        assert ran == mini_batch.samples


def check_counts(case: Case, mini_batch: MiniBatch) -> None:
    count = mini_batch.num_micro_batches
    assert [len(rank) for rank in mini_batch.micro_batches] == [count] * case.layout.data
    assert all(one.samples for rank in mini_batch.micro_batches for one in rank)
    if case.layout.virtual_pipeline > 1:
        assert count % case.layout.pipeline == 0  # what the interleaved schedule runs
    assert count <= worst_case_micro_batches(case.schedule, len(case.lengths), case.layout, case.longest)
    sizes = [[len(one.samples) for one in rank] for rank in mini_batch.micro_batches]
    if case.schedule.sequences is not None:
        assert all(size == case.schedule.sequences for rank in sizes for size in rank[:-1])
        assert all(rank[-1] <= case.schedule.sequences for rank in sizes)


def check_slots(case: Case, mini_batch: MiniBatch) -> None:
    """Tokens and slots are counted right, and slots stay under the cap."""
    layout = case.layout
    chunks = 2 * layout.context * (layout.tensor if layout.sequence_parallel else 1) if layout.context > 1 else 1
    shares = layout.tensor * layout.context if layout.sequence_parallel else 1
    for one in (one for rank in mini_batch.micro_batches for one in rank):
        spared = check_sharing(case, one)
        assert one.tokens == sum(case.lengths[sample] for sample in one.samples) - spared
        filled = sum(case.lengths[sample] + -case.lengths[sample] % chunks for sample in one.samples)
        filled -= spared
        assert one.slots == filled + -filled % shares
        if case.schedule.max_tokens is not None:
            assert one.slots <= case.schedule.max_tokens


def check_sharing(case: Case, one: MicroBatch) -> int:
    """The samples of a group lie side by side and share their prompt. Returns the tokens that this leaves out."""
    if not case.schedule.share_prompts:
        assert one.sharing == ()
        return 0
    assert case.groups is not None and case.prompts is not None
    held = [case.groups[sample] for sample in one.samples]
    firsts = [number for number in range(len(held)) if number == 0 or held[number - 1] != held[number]]
    assert len(firsts) == len(set(held))
    assert one.sharing == tuple(held.count(held[first]) for first in firsts)
    prompts = [case.prompts[sample] for sample in one.samples]
    spared = sum(prompts) - sum(prompts[first] for first in firsts)
    assert sum(one.spared(case.prompts)) == spared
    return spared


def check_groups(case: Case, mini_batch: MiniBatch) -> None:
    if case.groups is None:
        return
    group_size = case.groups.count(0)
    if len(mini_batch.samples) % group_size == 0:
        held = [case.groups[sample] for sample in mini_batch.samples]
        assert all(held.count(group) == group_size for group in held)


def check_case(case: Case) -> None:
    """Legal cases get a lawful plan, the same one each time; cases that no plan can serve are refused."""
    illegal = violations(case.schedule, len(case.lengths), case.layout, case.longest)
    before = tuple(case.lengths)
    try:
        plan = case.plan()
    except ValueError:
        assert illegal
        return
    assert tuple(case.lengths) == before
    if illegal:  # its worst case is, these lengths are not
        assert case.schedule.max_tokens is not None and len(illegal) == 1
    check_plan(case, plan)
    random.random()  # Python's own generator is not what orders are drawn from
    as_array: Any = np.array(case.lengths)
    assert replace(case, lengths=as_array).plan() == plan


ANY_CASE = st.booleans().flatmap(lambda capped: cases(capped))


@settings(max_examples=800)
@given(ANY_CASE)
def test_every_law_holds(case: Case) -> None:
    check_case(case)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@settings(max_examples=20_000)
@given(ANY_CASE)
def test_every_law_holds_in_many_cases(case: Case) -> None:
    check_case(case)


def test_a_large_batch_keeps_every_law() -> None:
    """Large enough to choose its count on a thinned copy."""
    generator = random.Random(3)
    lengths = [generator.randint(1, 4000) for _ in range(48 * 64)]
    for layout in (Layout(data=48), Layout(tensor=2, pipeline=4, data=48, sequence_parallel=True, virtual_pipeline=2)):
        schedule = Schedule("actor_update", max_tokens=8192, mini_batch=48 * 32)
        check_case(Case(schedule, lengths, layout, 1, 4000, Cost(1e-4), [sample // 8 for sample in range(len(lengths))]))


@settings(max_examples=300)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(0, 20), st.integers(1, 3))
@example([5, 5, 4, 4, 3, 3, 3], 4, 1)
def test_packing_is_close_to_the_fewest_bins(lengths: list[int], slack: int, data: int) -> None:
    """At most 11/9 of the optimum and one more (Johnson's bound for best-fit decreasing), rounded up to ranks."""
    lengths = lengths * data
    lengths = lengths[:9] if data == 1 else lengths[: 9 // data * data]
    cap = max(lengths) + slack
    plan = plan_phase(Schedule("critic_value", max_tokens=cap), lengths, Layout(data=data), 0, Cost(0.0, 1e6))
    count = plan.mini_batches[0].num_micro_batches
    fewest = fewest_bins(tuple(sorted(lengths, reverse=True)), cap)
    assert -(-fewest // data) <= count <= -(-(11 * fewest // 9 + 1) // data)


def fewest_bins(lengths: tuple[int, ...], cap: int) -> int:
    """By trying every assignment (up to the order of bins)."""
    best = len(lengths)

    def place(index: int, loads: list[int]) -> None:
        nonlocal best
        if len(loads) >= best:
            return
        if index == len(lengths):
            best = len(loads)
            return
        for number in range(len(loads)):
            if loads[number] + lengths[index] <= cap:
                loads[number] += lengths[index]
                place(index + 1, loads)
                loads[number] -= lengths[index]
        place(index + 1, [*loads, lengths[index]])

    place(0, [])
    return best


def test_a_tight_cap_is_packed_over_all_ranks() -> None:
    """By the lightest rank the ranks get 80, 80 and 80 and 28 is left; cut first, three micro-batches of 90 fit."""
    lengths = [50, 40, 50, 40, 30, 30, 28, 1, 1]
    plan = plan_phase(Schedule("critic_value", max_tokens=90), lengths, Layout(data=3), 0)
    assert [[one.tokens for one in rank] for rank in plan.mini_batches[0].micro_batches] == [[90], [90], [90]]


def test_ranks_take_as_many_sequences_as_balance_needs() -> None:
    """Eight ranks, one long sequence: equal counts would leave its rank with eight, three times the mean."""
    lengths = [700] + [100] * 63
    plan = plan_phase(Schedule("critic_value", max_tokens=1000), lengths, Layout(data=8), 0)
    totals = [sum(one.tokens for one in rank) for rank in plan.mini_batches[0].micro_batches]
    assert max(totals) <= 900 and sum(totals) / 8 == 875


def test_epochs_and_phases_have_orders_of_their_own() -> None:
    lengths, layout = [3] * 64, Layout(data=2)
    schedule = Schedule("actor_update", sequences=4, mini_batch=16, epochs=2)
    plan = plan_phase(schedule, lengths, layout, seed=1)
    first, second = ([one.samples for one in plan.mini_batches if one.epoch == epoch] for epoch in (0, 1))
    assert first != second
    for other in (
        plan_phase(schedule, lengths, layout, seed=2),
        plan_phase(replace(schedule, phase="x"), lengths, layout, 1),
    ):
        assert [one.samples for one in other.mini_batches if one.epoch == 0] != first


def test_the_order_of_a_seed_never_changes() -> None:
    """A resumed run must draw the orders of the run it continues, also in another process or Python."""
    schedule = Schedule("actor_update", sequences=1, mini_batch=4)
    plan = plan_phase(schedule, [1] * 8, Layout(), seed=1)
    assert [one.samples for one in plan.mini_batches] == [(6, 4, 2, 0), (3, 5, 7, 1)]
    paired = plan_phase(schedule, [1] * 8, Layout(), seed=1, groups=[7, 7, 0, 0, 5, 5, 3, 3])
    assert [one.samples for one in paired.mini_batches] == PAIRED


PAIRED = [(4, 5, 2, 3), (6, 7, 0, 1)]


@pytest.mark.parametrize("groups", [[0, 0, 0, 1, 2, 2, 3, 3], [0, 0, 0, 0, 0, 0, 0, 0]])
def test_groups_that_cannot_stay_whole_are_drawn_as_samples(groups: list[int]) -> None:
    schedule = Schedule("actor_update", sequences=1, mini_batch=4)
    plan = plan_phase(schedule, [1] * 8, Layout(), 1, groups=groups)
    assert plan == plan_phase(schedule, [1] * 8, Layout(), 1)


@given(
    groups=st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(1, 40), min_size=1, max_size=6)), min_size=1),
    beside=st.tuples(st.integers(0, 3), st.integers(0, 9)),
)
def test_rows_behind_prompts_have_a_bound(groups: list[tuple[int, list[int]]], beside: tuple[int, int]) -> None:
    """Whatever completions, of a token or more, a micro-batch has behind whatever prompts."""
    sizes, lengths = [len(held) for _, held in groups], [prompt + one for prompt, held in groups for one in held]
    slots = sum(prompt + sum(held) for prompt, held in groups)
    rows = MicroBatch(tuple(range(len(lengths))), slots, slots, tuple(sizes)).rows_behind_prompts(lengths)
    assert rows == sum(lengths)
    longest_prompt, (more, longer) = max(prompt for prompt, _ in groups), beside
    limits = (len(lengths) + more, max(lengths) + longer, max(sizes) + more, longest_prompt + longer)
    assert rows <= most_rows_behind_prompts(slots, *limits)
    assert MicroBatch((0,), 3, 3).rows_behind_prompts([3]) == 0
