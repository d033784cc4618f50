"""What a layout refuses to run, and what an engine must report: messages with keys, both numbers and a way out."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models.layout import Layout
from megarl.schedule import (
    Executed,
    MiniBatch,
    PlanMismatch,
    Schedule,
    compare,
    plan_phase,
    violations,
    worst_case_micro_batches,
)
from tests.schedule_cases import Case, cases

VIRTUAL = Layout(pipeline=4, virtual_pipeline=2)
PADDED = Layout(tensor=2, context=2, sequence_parallel=True)  # each sequence to a multiple of 8

REFUSED = [
    (Schedule("critic_value", max_tokens=9), [3, 10], Layout(), "max_tokens = 9, but sample 1 has 10 tokens; .* is 10"),
    (Schedule("critic_value", max_tokens=15), [3, 9], PADDED, r"sample 1 has 9 tokens \(16 with padding\); .* is 16"),
    (Schedule("actor_update", sequences=1, mini_batch=3), [1] * 8, Layout(), "mini_batch = 3 must divide .* 8 .* is [24]"),
    (Schedule("actor_update", sequences=1, mini_batch=4), [1] * 8, Layout(data=3), "= 4 must be .* size 3; .* is 3"),
    (Schedule("critic_value", sequences=1), [1] * 5, Layout(data=2), "a batch of 5 rollouts must be .* size 2; .* is [46]"),
    (Schedule("critic_value", sequences=1), [1, 0], Layout(), "sample 1 has 0 tokens"),
    (Schedule("critic_value", sequences=1), [], Layout(), "empty"),
    (Schedule("critic_value", sequences=3), [1] * 8, VIRTUAL, "sequences = 3 divides 8 .* 3 micro-.*, .* by its 4 .* is 2"),
    (Schedule("critic_value", max_tokens=9), [1] * 3, VIRTUAL, "each of 1 .* ranks 3, .* by its 4 stages; .* is 4"),
    (Schedule("critic_value", max_tokens=9), [9] * 6, VIRTUAL, "max_tokens = 9 needs 6 .* at most 4.* always fits is 18"),
]


@pytest.mark.parametrize(("schedule", "lengths", "layout", "text"), REFUSED)
def test_an_impossible_plan_is_refused_with_its_numbers(
    schedule: Schedule, lengths: list[int], layout: Layout, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        plan_phase(schedule, lengths, layout, 0)


@pytest.mark.parametrize(
    ("max_tokens", "longest", "layout", "text"),
    [
        (9, 10, Layout(), "max_tokens = 9 is below the longest sequence of 10 tokens; .* is 10"),
        (15, 9, PADDED, r"longest sequence of 9 tokens, padded to 16; .* is 16"),
        (9, 9, VIRTUAL, "max_tokens = 9 can need more than 4 micro-batches for 6 sequences a rank, .* is 18"),
    ],
)
def test_a_cap_is_refused_before_any_batch(max_tokens: int, longest: int, layout: Layout, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        raise ValueError(*map(str, violations(Schedule("critic_value", max_tokens=max_tokens), 6, layout, longest)))


def test_several_violations_are_said_at_once() -> None:
    found = violations(Schedule("actor_update", 1, None, 5), 8, Layout(data=2), 9)
    assert [fault.field for fault in found] == ["mini_batch"]


@settings(max_examples=500)
@given(st.booleans().flatmap(lambda capped: cases(capped)))
def test_the_nearest_legal_value_is_legal(case: Case) -> None:
    """Taking the advice about a count or a cap settles that complaint."""
    share = len(case.lengths) // case.layout.data
    narrow = replace(case.schedule, mini_batch=None, epochs=1)
    if narrow.max_tokens is not None:
        narrow = replace(narrow, max_tokens=max(1, case.longest // 2))
    if share < case.layout.micro_batch_step:
        return
    found = violations(narrow, len(case.lengths), case.layout, case.longest)
    for _ in range(2):  # a cap that holds the longest sequence may still need too many micro-batches
        if found and found[0].nearest:
            legal = int(found[0].nearest)
            narrow = replace(narrow, sequences=narrow.sequences and legal, max_tokens=narrow.max_tokens and legal)
            found = violations(narrow, len(case.lengths), case.layout, case.longest)
    if found:
        counts = [-(-share // number) for number in range(1, share + 1)]
        assert narrow.sequences and all(count % case.layout.pipeline for count in counts)


@pytest.mark.parametrize(("sequences", "max_tokens"), [(None, None), (1, 1)])
def test_a_schedule_has_exactly_one_rule(sequences: int | None, max_tokens: int | None) -> None:
    with pytest.raises(AssertionError, match=r"phases\.critic_value"):
        Schedule("critic_value", sequences, max_tokens)


def executed(mini_batch: MiniBatch, rank: int) -> Executed:
    return tuple(micro_batch.shape for micro_batch in mini_batch.micro_batches[rank])


@pytest.mark.parametrize(
    ("schedule", "layout", "count"),
    [
        (Schedule("critic_value", sequences=4), Layout(data=2), 3),
        (Schedule("critic_value", max_tokens=29), Layout(data=2), 6),  # 2 of 10 tokens each, and one more
        (Schedule("critic_value", max_tokens=1000), Layout(data=2), 2),
        (Schedule("critic_value", max_tokens=1000), Layout(data=2, pipeline=4), 10),
        (Schedule("critic_value", max_tokens=1000), Layout(data=2, pipeline=4, virtual_pipeline=2), 8),
        (Schedule("actor_update", max_tokens=1000, mini_batch=10), Layout(data=2, pipeline=4), 5),
    ],
)
def test_the_worst_case_is_what_the_rule_allows(schedule: Schedule, layout: Layout, count: int) -> None:
    assert worst_case_micro_batches(schedule, 20, layout, 10) == count


@given(cases(capped=True), st.randoms())
def test_what_ran_is_compared_micro_batch_by_micro_batch(case: Case, draw: random.Random) -> None:
    if violations(case.schedule, len(case.lengths), case.layout, case.longest):
        return
    mini_batch = case.plan().mini_batches[-1]
    rank = draw.randrange(case.layout.data)
    right = executed(mini_batch, rank)
    compare(mini_batch, rank, right)
    number = draw.randrange(len(right))
    where = f"phase {case.schedule.phase}, data-parallel rank {rank}, micro-batch {number}: planned"
    for name in ("sequences", "tokens", "slots"):
        one_more = getattr(right[number], name) + 1
        wrong = right[number]._replace(**{name: one_more})
        with pytest.raises(PlanMismatch, match=f"{where} .*, executed .*{one_more} {name}"):
            compare(mini_batch, rank, (*right[:number], wrong, *right[number + 1 :]))
    with pytest.raises(PlanMismatch, match=f"rank {rank}: planned {len(right)} micro-batches, executed"):
        compare(mini_batch, rank, right[:-1])
