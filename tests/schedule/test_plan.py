"""Laws of plans, over wide grids of layouts, schedules and batches (hypothesis); what a layout refuses to run, and what an
engine must report: messages with keys, both numbers and a way out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.models.layout import Layout
from megarl.schedule import (
    Cost,
    Executed,
    MicroBatch,
    MiniBatch,
    Plan,
    PlanMismatch,
    Schedule,
    compare,
    plan_phase,
    violations,
    worst_case_micro_batches,
)
from megarl.schedule.phase_plan import most_rows_behind_prompts
from megarl.schedule.schedule import in_micro_batch

MOST_SEGMENTS = 4


@dataclass(frozen=True)
class Case:
    """A batch and what it is planned for. Each rollout has segments of some lengths, a group, and the prompt of its first
    segment; `longest` is what the recipe would promise about the lengths, `most_segments` about their number."""

    schedule: Schedule
    segments: Sequence[Sequence[int]]
    layout: Layout
    seed: int
    longest: int
    cost: Cost
    groups: Sequence[int] | None
    first_prompts: Sequence[int] | None = None
    most_segments: int = 1

    @cached_property
    def rollouts(self) -> list[int]:
        return [rollout for rollout, lengths in enumerate(self.segments) for _ in lengths]

    @cached_property
    def lengths(self) -> list[int]:
        return [length for lengths in self.segments for length in lengths]

    @cached_property
    def prefixes(self) -> list[int]:
        """First segments have the prompts of their groups, later ones their own."""
        groups = self.groups or range(len(self.segments))
        later_prefixes = iter(range(10_000, 20_000))
        return [
            groups[rollout] if number == 0 else next(later_prefixes)
            for rollout, lengths in enumerate(self.segments)
            for number, _ in enumerate(lengths)
        ]

    @cached_property
    def prompts(self) -> list[int] | None:
        """A later segment's prompt is all but its last token."""
        if self.first_prompts is None:
            return None
        return [
            prompt if number == 0 else max(1, length - 1)
            for prompt, lengths in zip(self.first_prompts, self.segments, strict=True)
            for number, length in enumerate(lengths)
        ]

    @property
    def has_segments(self) -> bool:
        return len(self.lengths) > len(self.segments)

    @property
    def size(self) -> int:
        """Rollouts of a mini-batch."""
        return self.schedule.mini_batch or len(self.segments)

    def plan(self, lengths: Sequence[int] | None = None, name_rollouts: bool = True) -> Plan:
        lengths = self.lengths if lengths is None else lengths
        groups = None if self.groups is None else [self.groups[rollout] for rollout in self.rollouts]
        columns = (groups, self.prompts, *((self.rollouts, self.prefixes) if name_rollouts else ()))
        return plan_phase(self.schedule, lengths, self.layout, self.seed, self.cost, *columns)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tensor, pipeline = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4))
    return Layout(
        tensor=tensor, pipeline=pipeline, data=draw(st.integers(1, 5)), sequence_parallel=tensor > 1 and draw(st.booleans()),
        virtual_pipeline=draw(st.integers(1, 3)) if pipeline > 1 else 1, context=draw(st.integers(1, 3)),
    )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn, capped: bool) -> Case:
    """Mostly legal: sizes divide, the cap holds the longest sequence; the pipeline may still refuse the count."""
    layout = draw(layouts())
    update, group_size = draw(st.booleans()), draw(st.integers(1, 3))
    size = layout.data * draw(st.integers(1, 7)) * group_size
    count = size * (draw(st.integers(1, 2)) if update else 1)
    longest = draw(st.integers(1, 80))
    generator = random.Random(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.3, 1.0, 3.0]))  # few long sequences, all alike, mostly long
    lengths = [max(1, round(longest * generator.random() ** (1 / spread))) for _ in range(count)]
    groups = [sample // group_size for sample in range(count)]
    generator.shuffle(groups)
    step = layout.micro_batch_multiple * layout.sequence_multiple
    shortest = [min(length for length, other in zip(lengths, groups, strict=True) if other == group) for group in groups]
    prompts = [random.Random(group).randint(1, most) for group, most in zip(groups, shortest, strict=True)]
    shared = layout.context == 1 and draw(st.booleans())
    schedule = Schedule(
        phase=draw(st.sampled_from(["actor_update", "critic_update"])) if update else "critic_value",
        sequences=None if capped else draw(st.integers(1, 12)),
        max_tokens=longest + step + draw(st.integers(0, 5 * longest)) if capped else None,
        mini_batch=size if update else None,
        epochs=draw(st.integers(1, 2)) if update else 1,
        share_prompts=shared,
    )
    cost = Cost(draw(st.sampled_from([0.0, 1e-3, 0.1])), draw(st.sampled_from([0.0, 1.0, 30.0])))
    known = groups if shared or draw(st.booleans()) else None
    seed, segments = draw(st.integers(0, 2**31)), [[length] for length in lengths]
    return Case(schedule, segments, layout, seed, longest, cost, known, prompts if shared else None)


@st.composite
def segmented(draw: st.DrawFn) -> Case:
    """A case whose rollouts may have several segments, which may have to run together."""
    case = draw(cases(capped=draw(st.booleans())))
    together = draw(st.sampled_from([1, MOST_SEGMENTS]))
    if case.schedule.max_tokens is not None and draw(st.booleans()):  # one sequence of the longest alone
        tight = in_micro_batch(case.longest, case.layout)
        case = replace(case, schedule=replace(case.schedule, max_tokens=tight))
    if together > 1:
        cap, sequences = case.schedule.max_tokens, case.schedule.sequences
        cap = None if cap is None else max(cap, in_micro_batch(case.longest, case.layout, together))
        sequences = None if sequences is None else max(sequences, together)
        case = replace(case, schedule=replace(case.schedule, together=together, max_tokens=cap, sequences=sequences))
    generator, often = random.Random(draw(st.integers(0, 2**32))), draw(st.sampled_from([0.0, 0.1, 0.5]))
    segments = [list(lengths) for lengths in case.segments]
    for held in segments:
        while len(held) < MOST_SEGMENTS and generator.random() < often:
            held.append(generator.randint(1, case.longest))
    return replace(case, segments=segments, most_segments=MOST_SEGMENTS)


def check_plan(case: Case, plan: Plan) -> None:
    """All laws of one plan."""
    assert plan.phase == case.schedule.phase and plan.layout == case.layout
    per_epoch = len(case.segments) // case.size
    assert [mini_batch.epoch for mini_batch in plan.mini_batches] == [
        e for e in range(case.schedule.epochs) for _ in range(per_epoch)
    ]
    for epoch in range(case.schedule.epochs):
        samples = [sample for mini_batch in plan.mini_batches if mini_batch.epoch == epoch for sample in mini_batch.samples]
        assert sorted(samples) == list(range(len(case.lengths))), "every sample once"
    for mini_batch in plan.mini_batches:
        check_order(case, mini_batch)
        check_counts(case, mini_batch)
        for micro_batch in (micro_batch for rank in mini_batch.micro_batches for micro_batch in rank):
            check_micro_batch(case, micro_batch)
        check_groups(case, mini_batch)


def check_whole_rollouts(case: Case, samples: Sequence[int]) -> set[int]:
    """Return the rollouts of samples, which have all segments of them."""
    rollouts = {case.rollouts[sample] for sample in samples}
    assert sum(len(case.segments[rollout]) for rollout in rollouts) == len(samples)
    return rollouts


def check_order(case: Case, mini_batch: MiniBatch) -> None:
    assert len(check_whole_rollouts(case, mini_batch.samples)) == case.size
    if case.size == len(case.segments):
        assert mini_batch.samples == tuple(range(len(case.lengths)))  # a single mini-batch keeps batch order
    ran = tuple(sample for rank in mini_batch.micro_batches for micro_batch in rank for sample in micro_batch.samples)
    assert mini_batch.order == ran and sorted(ran) == sorted(mini_batch.samples)
    if case.schedule.sequences is not None and not case.schedule.share_prompts:
        assert ran == mini_batch.samples


def check_counts(case: Case, mini_batch: MiniBatch) -> None:
    count = mini_batch.num_micro_batches
    sizes = [[len(micro_batch.samples) for micro_batch in rank] for rank in mini_batch.micro_batches]
    assert [len(rank) for rank in sizes] == [count] * case.layout.data
    assert all(map(any, sizes)), "no rank runs padding alone"
    assert case.has_segments or all(map(all, sizes)), "no micro-batch is empty"
    if case.layout.virtual_pipeline > 1:
        assert count % case.layout.pipeline == 0  # what the interleaved schedule runs
    assert count <= worst_case_micro_batches(
        case.schedule, len(case.segments), case.layout, case.longest, case.most_segments
    )
    if case.schedule.sequences is not None:
        assert all(size <= case.schedule.sequences for rank in sizes for size in rank)
        assert case.has_segments or all(size == case.schedule.sequences for rank in sizes for size in rank[:-1])


def check_micro_batch(case: Case, micro_batch: MicroBatch) -> None:
    """Tokens and slots are counted right, and slots stay under the cap."""
    layout = case.layout
    chunks = 2 * layout.context * (layout.tensor if layout.sequence_parallel else 1) if layout.context > 1 else 1
    shares = layout.tensor * layout.context if layout.sequence_parallel else 1
    if not micro_batch.samples:
        assert micro_batch == MicroBatch((), 0, in_micro_batch(1, layout))
        return
    if case.schedule.together > 1:
        check_whole_rollouts(case, micro_batch.samples)
    spared = check_sharing(case, micro_batch)
    assert micro_batch.tokens == sum(case.lengths[sample] for sample in micro_batch.samples) - spared
    filled = sum(case.lengths[sample] + -case.lengths[sample] % chunks for sample in micro_batch.samples)
    filled -= spared
    assert micro_batch.slots == filled + -filled % shares
    if case.schedule.max_tokens is not None:
        assert micro_batch.slots <= case.schedule.max_tokens


def check_sharing(case: Case, micro_batch: MicroBatch) -> int:
    """Samples with one prompt lie side by side and share it. Returns the tokens that this leaves out."""
    if not case.schedule.share_prompts:
        assert micro_batch.sharing == ()
        return 0
    assert case.prompts is not None
    held = [case.prefixes[sample] for sample in micro_batch.samples]
    firsts = [number for number in range(len(held)) if number == 0 or held[number - 1] != held[number]]
    assert len(firsts) == len(set(held))
    assert micro_batch.sharing == tuple(held.count(held[first]) for first in firsts)
    prompts = [case.prompts[sample] for sample in micro_batch.samples]
    spared = sum(prompts) - sum(prompts[first] for first in firsts)
    assert sum(micro_batch.spared(case.prompts)) == spared
    return spared


def check_groups(case: Case, mini_batch: MiniBatch) -> None:
    if case.groups is None:
        return
    group_size = case.groups.count(0)
    if case.size % group_size == 0:
        held = [case.groups[rollout] for rollout in {case.rollouts[sample] for sample in mini_batch.samples}]
        assert all(held.count(group) == group_size for group in held)


def check_case(case: Case) -> None:
    """Legal cases get a lawful plan, the same one each time; cases that no plan can serve are refused."""
    illegal = violations(case.schedule, len(case.segments), case.layout, case.longest)
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
    assert case.plan(as_array) == plan
    if not case.has_segments:
        assert case.plan(name_rollouts=False) == plan


ANY_CASE = st.booleans().flatmap(lambda capped: cases(capped)) | segmented()


@settings(max_examples=1200)
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
        groups = [sample // 8 for sample in range(len(lengths))]
        check_case(Case(schedule, [[length] for length in lengths], layout, 1, 4000, Cost(1e-4), groups))


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
    assert [[micro.tokens for micro in rank] for rank in plan.mini_batches[0].micro_batches] == [[90], [90], [90]]


def test_ranks_take_as_many_sequences_as_balance_needs() -> None:
    """Eight ranks, one long sequence: equal counts would leave its rank with eight, three times the mean."""
    lengths = [700] + [100] * 63
    plan = plan_phase(Schedule("critic_value", max_tokens=1000), lengths, Layout(data=8), 0)
    totals = [sum(micro_batch.tokens for micro_batch in rank) for rank in plan.mini_batches[0].micro_batches]
    assert max(totals) <= 900 and sum(totals) / 8 == 875


def test_epochs_and_phases_have_orders_of_their_own() -> None:
    lengths, layout = [3] * 64, Layout(data=2)
    schedule = Schedule("actor_update", sequences=4, mini_batch=16, epochs=2)
    plan = plan_phase(schedule, lengths, layout, seed=1)
    first, second = (
        [mini_batch.samples for mini_batch in plan.mini_batches if mini_batch.epoch == epoch] for epoch in (0, 1)
    )
    assert first != second
    for other in (
        plan_phase(schedule, lengths, layout, seed=2),
        plan_phase(replace(schedule, phase="x"), lengths, layout, 1),
    ):
        assert [mini_batch.samples for mini_batch in other.mini_batches if mini_batch.epoch == 0] != first


def test_the_order_of_a_seed_never_changes() -> None:
    """A resumed run must draw the orders of the run it continues, also in another process or Python."""
    schedule = Schedule("actor_update", sequences=1, mini_batch=4)
    plan = plan_phase(schedule, [1] * 8, Layout(), seed=1)
    assert [mini_batch.samples for mini_batch in plan.mini_batches] == [(6, 4, 2, 0), (3, 5, 7, 1)]
    paired = plan_phase(schedule, [1] * 8, Layout(), seed=1, groups=[7, 7, 0, 0, 5, 5, 3, 3])
    assert [mini_batch.samples for mini_batch in paired.mini_batches] == PAIRED


PAIRED = [(4, 5, 2, 3), (6, 7, 0, 1)]


@pytest.mark.parametrize("groups", [[0, 0, 0, 1, 2, 2, 3, 3], [0, 0, 0, 0, 0, 0, 0, 0]])
def test_groups_that_cannot_stay_whole_are_drawn_as_samples(groups: list[int]) -> None:
    schedule = Schedule("actor_update", sequences=1, mini_batch=4)
    plan = plan_phase(schedule, [1] * 8, Layout(), 1, groups=groups)
    assert plan == plan_phase(schedule, [1] * 8, Layout(), 1)


@given(
    groups=st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(1, 40), min_size=1, max_size=6)), min_size=1),
    slack=st.tuples(st.integers(0, 3), st.integers(0, 9)),
)
def test_rows_behind_prompts_have_a_bound(groups: list[tuple[int, list[int]]], slack: tuple[int, int]) -> None:
    """Whatever completions, of a token or more, a micro-batch has behind whatever prompts."""
    sizes, lengths = [len(held) for _, held in groups], [prompt + length for prompt, held in groups for length in held]
    slots = sum(prompt + sum(held) for prompt, held in groups)
    rows = MicroBatch(tuple(range(len(lengths))), slots, slots, tuple(sizes)).rows_behind_prompts(lengths)
    assert rows == sum(lengths)
    longest_prompt, (more, longer) = max(prompt for prompt, _ in groups), slack
    limits = (len(lengths) + more, max(lengths) + longer, max(sizes) + more, longest_prompt + longer)
    assert rows <= most_rows_behind_prompts(slots, *limits)
    assert MicroBatch((0,), 3, 3).rows_behind_prompts([3]) == 0


def test_ranks_without_a_sequence_left_run_padding() -> None:
    """Three sequences that each fill a micro-batch, on two ranks."""
    schedule = Schedule("actor_update", max_tokens=10, mini_batch=2)
    (mini_batch,) = plan_phase(schedule, [10, 10, 10], Layout(data=2), 0, rollouts=[0, 0, 1]).mini_batches
    sizes = [[len(micro_batch.samples) for micro_batch in rank] for rank in mini_batch.micro_batches]
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


def test_a_mini_batch_of_a_huge_batch_has_a_nearest_one_at_once() -> None:
    (fault,) = violations(Schedule("actor_update", 1, None, 7), 8 * 10**12, Layout(data=4), 9)
    assert fault.nearest == "8"


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
    faults = violations(narrow, len(case.lengths), case.layout, case.longest)
    for _ in range(2):  # a cap that holds the longest sequence may still need too many micro-batches
        if faults and faults[0].nearest:
            legal = int(faults[0].nearest)
            narrow = replace(narrow, sequences=narrow.sequences and legal, max_tokens=narrow.max_tokens and legal)
            faults = violations(narrow, len(case.lengths), case.layout, case.longest)
    if faults:
        counts = [-(-share // number) for number in range(1, share + 1)]
        assert narrow.sequences and all(count % case.layout.pipeline for count in counts)


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
