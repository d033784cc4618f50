"""From a schedule and the lengths of one batch to a plan: a pure function of its arguments.

What a plan promises (each is a property in tests/schedule/test_plan.py):
every sample once per epoch; all segments of a rollout in one mini-batch; no micro-batch above `max_tokens`, padding
included; the same number of micro-batches on every data-parallel rank, and one that the pipeline can run; no empty
micro-batch, unless rollouts have several segments, so that their number divides over nothing; the same plan for the same
arguments, whatever was planned before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import NamedTuple

from megarl.models.layout import Layout
from megarl.schedule.balance import Ranks, SequenceCosts, balance
from megarl.schedule.cost import Cost, in_step, run_times
from megarl.schedule.schedule import Schedule, ceil, in_micro_batch, padded, violations


class Shape(NamedTuple):
    """The shape of a micro-batch; its slots are the tokens with alignment padding."""

    sequences: int
    tokens: int
    slots: int

    def __str__(self) -> str:
        return f"{self.sequences} sequences with {self.tokens} tokens in {self.slots} slots"


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of one forward pass of one data-parallel rank.

    `samples` are positions in the batch, ascending under `max_tokens` and in mini-batch order under `sequences`.
    `tokens` is the sum of their lengths; `slots` adds the alignment padding and is what the role executes.

    With shared prompts, `sharing` has the number of consecutive samples for each prompt, which `tokens` counts once. Empty:
    no prompt is shared. A micro-batch without samples runs padding only.
    """

    samples: tuple[int, ...]
    tokens: int
    slots: int
    sharing: tuple[int, ...] = ()

    @property
    def shape(self) -> Shape:
        return Shape(len(self.samples), self.tokens, self.slots)

    def spared(self, prompts: Sequence[int]) -> list[int]:
        """Lengths of the prompts that samples leave out because another sample of the micro-batch has them; `prompts` are
        those of all samples of the batch."""
        first = accumulate(self.sharing, initial=0)
        return [
            int(prompts[self.samples[start]])
            for start, size in zip(first, self.sharing, strict=False)
            for _ in range(size - 1)
        ]

    def rows_behind_prompts(self, lengths: Sequence[int]) -> int:
        """Rows of keys, and of values, that attention appends to copies of shared prompts: each sample's whole sequence.
        `lengths` are those of all samples of the batch."""
        return sum(int(lengths[sample]) for sample in self.samples) if self.sharing else 0


@dataclass(frozen=True)
class MiniBatch:
    """Sequences of one optimizer update (or of a whole forward phase), as [data-parallel rank][micro-batch]."""

    epoch: int
    samples: tuple[int, ...]
    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    phase: str = ""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each data-parallel rank; the same on all."""
        return len(self.micro_batches[0])

    @property
    def order(self) -> tuple[int, ...]:
        """Samples as they run: data-parallel rank by rank, micro-batch by micro-batch."""
        return tuple(sample for rank in self.micro_batches for micro_batch in rank for sample in micro_batch.samples)


@dataclass(frozen=True)
class Plan:
    """What one phase runs for one batch under one layout; a forward phase has exactly one mini-batch."""

    phase: str
    mini_batches: tuple[MiniBatch, ...]
    layout: Layout

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """Of all mini-batches and data-parallel ranks."""
        ranks = (rank for mini_batch in self.mini_batches for rank in mini_batch.micro_batches)
        return tuple(micro_batch for rank in ranks for micro_batch in rank)

    def samples_of(self, data_rank: int) -> set[int]:
        """The samples that a data-parallel rank runs; of an update with several epochs a sample may be several ranks'."""
        of_rank = (mini_batch.micro_batches[data_rank] for mini_batch in self.mini_batches)
        return {sample for micro_batches in of_rank for micro_batch in micro_batches for sample in micro_batch.samples}


def join_plans(plans: Sequence[Plan], positions: Sequence[Sequence[int]]) -> Plan:
    """Return the plan of a forward phase that ran in parts, one after the other. Sample i of part n has position
    `positions[n][i]` in the whole batch."""
    batches = [plan.mini_batches[0] for plan in plans]
    renamed = [
        [
            tuple(replace(micro, samples=tuple(place[sample] for sample in micro.samples)) for micro in rank)
            for rank in batch.micro_batches
        ]
        for batch, place in zip(batches, positions, strict=True)
    ]
    ranks = tuple(tuple(micro for part in parts for micro in part) for parts in zip(*renamed, strict=True))
    samples = tuple(sorted(sample for place in positions for sample in place))
    return replace(plans[0], mini_batches=(replace(batches[0], samples=samples, micro_batches=ranks),))


@dataclass(frozen=True)
class SharedPrompts:
    """Prompts that run once for sequences of a micro-batch: the sequences have the same tokens at the same positions, for
    which a causal model computes the same. Sample i has `lengths[i]` tokens, of which the first `prompts[i]` are a prompt;
    samples with the same `prefixes[i]` have the same one."""

    lengths: Sequence[int]
    prefixes: Sequence[int]
    prompts: Sequence[int]

    def runs(self, samples: Sequence[int]) -> list[list[int]]:
        """Samples by prompt, prompts and samples in the order they come."""
        by_prefix: dict[int, list[int]] = {}
        for sample in samples:
            by_prefix.setdefault(self.prefixes[sample], []).append(sample)
        return list(by_prefix.values())

    def tokens(self, run: Sequence[int]) -> int:
        """Tokens of samples that share a prompt."""
        return sum(map(self.lengths.__getitem__, run)) - self.prompts[run[0]] * (len(run) - 1)

    def cost(self, run: Sequence[int], cost: Cost) -> float:
        """Cost of samples that share a prompt: the prompt counts once."""
        spared = cost.sequence(self.prompts[run[0]]) * (len(run) - 1)
        return sum(cost.sequence(self.lengths[sample]) for sample in run) - spared

    def micro_batch(self, samples: Sequence[int], multiple: int) -> MicroBatch:
        """Sequences with one prompt follow each other, prompts in the order of their first sequence."""
        runs = self.runs(samples)
        tokens, in_order = sum(map(self.tokens, runs)), tuple(sample for run in runs for sample in run)
        return MicroBatch(in_order, tokens, ceil(tokens, multiple) * multiple, tuple(map(len, runs)))


def most_rows_behind_prompts(slots: int, num_sequences: int, longest: int, group_size: int, longest_prompt: int) -> int:
    """Upper bound of `MicroBatch.rows_behind_prompts` for a micro-batch of `slots` tokens and at most `num_sequences`
    sequences of at most `longest` tokens.

    k completions of s tokens in all behind a prompt of p are k p + s rows for p + s tokens. That share grows with k and p
    and falls with s, so that it is largest for a whole group of completions of one token behind the longest prompt.
    """
    rows, tokens = group_size * (longest_prompt + 1), longest_prompt + group_size
    return min(slots * rows // tokens, num_sequences * longest)


def plan_phase(
    schedule: Schedule,
    lengths: Sequence[int],
    layout: Layout,
    seed: int,
    cost: Cost = Cost(),  # noqa: B008 (frozen)
    groups: Sequence[int] | None = None,
    prompts: Sequence[int] | None = None,
    rollouts: Sequence[int] | None = None,
    prefixes: Sequence[int] | None = None,
) -> Plan:
    """Plan one phase for a batch whose sample i has `lengths[i]` tokens, belongs to the group with id `groups[i]` and is a
    segment of rollout `rollouts[i]`: 0, 1, ... with the segments of a rollout side by side; None for one segment each.

    A schedule that shares prompts needs the length `prompts[i]` of each sample's prompt. Samples with the same
    `prefixes[i]` (None: of the same group) have the same prompt.
    More than one mini-batch per epoch draws a new order of the rollouts for each epoch from `seed`, the phase and the
    epoch; a single one keeps batch order. Groups stay whole in a mini-batch where they have equal sizes that fit.
    Raises ValueError for sizes that do not divide, for counts the pipeline cannot run and for a sequence above the cap.
    """
    lengths = [int(length) for length in lengths]
    numbers = range(len(lengths)) if rollouts is None else rollouts
    segments = [tuple(held) for _, held in groupby(range(len(lengths)), key=numbers.__getitem__)]
    assert len(segments) == len(set(numbers)), "the segments of a rollout lie side by side"
    has_segments = len(segments) < len(lengths)
    # What one micro-batch runs whole, by its first sample.
    whole = {unit[0]: unit for unit in segments} if schedule.together > 1 else {s: (s,) for s in range(len(lengths))}
    slots = padded(lengths, layout)
    # A large batch has far fewer lengths than sequences.
    cost_of = {length: cost.sequence(length) for length in set(slots)}
    costs = [cost_of[length] for length in slots]
    work = SequenceCosts(slots, costs)
    if len(whole) < len(lengths):
        units = [whole.get(sample, ()) for sample in range(len(lengths))]
        work = SequenceCosts(
            [sum(slots[s] for s in unit) for unit in units], [sum(costs[s] for s in unit) for unit in units]
        )
    _refuse_impossible(schedule, lengths, work.slots, layout, len(segments))
    shared = None
    if schedule.share_prompts:
        prefixes = groups if prefixes is None else prefixes
        assert prefixes is not None and prompts is not None and layout.context == 1, "as `phase_rules` allow"
        shared = SharedPrompts(lengths, [int(prefix) for prefix in prefixes], [int(prompt) for prompt in prompts])
    by_rollout = None if groups is None else [groups[held[0]] for held in segments]
    mini_batches = []
    for epoch in range(schedule.epochs):
        for drawn in _draw_mini_batches(schedule, len(segments), by_rollout, f"{seed}/{schedule.phase}/{epoch}"):
            samples = tuple(sample for rollout in drawn for sample in segments[rollout])
            firsts = [sample for sample in samples if sample in whole]
            if schedule.sequences is not None:  # in mini-batch order
                ranks = _in_order(schedule.sequences, [whole[first] for first in firsts], layout)
            elif shared is not None and len(firsts) == len(samples):
                ranks = _balance_shared(schedule, samples, shared, layout, cost, has_segments)
            else:
                ranks = _balance(schedule, firsts, work, layout, cost, has_segments)
                ranks = [[[sample for first in held for sample in whole[first]] for held in rank] for rank in ranks]
            micro_batches = tuple(
                tuple(_micro_batch(part, lengths, slots, layout, shared) for part in rank) for rank in ranks
            )
            mini_batches.append(MiniBatch(epoch, samples, micro_batches, schedule.phase))
    return Plan(schedule.phase, tuple(mini_batches), layout)


def _in_order(size: int, units: Sequence[tuple[int, ...]], layout: Layout) -> Ranks:
    """Units of samples in their order, whole, in micro-batches of up to `size` samples."""
    data, step, ranks = layout.data, layout.micro_batch_step, []
    for rank in range(data):
        held: list[list[int]] = []
        for unit in units[rank * len(units) // data : (rank + 1) * len(units) // data]:
            if held and len(held[-1]) + len(unit) <= size:
                held[-1] += unit
            else:
                held.append(list(unit))
        ranks.append(held)
    count = ceil(max(map(len, ranks)), step) * step
    return [[*held, *([] for _ in range(count - len(held)))] for held in ranks]


def _balance(
    schedule: Schedule, units: Sequence[int], work: SequenceCosts, layout: Layout, cost: Cost, may_be_empty: bool
) -> Ranks:
    """`balance`, and where no number of micro-batches is legal and they `may_be_empty`, as few as one unit each needs."""
    try:
        return balance(schedule, units, work, layout, cost)
    except ValueError:
        if not may_be_empty:
            raise
    # Fillers of one token make the units divide, and are left out of the plan.
    step, real = layout.micro_batch_step, len(work.slots)
    missing = ceil(ceil(len(units), layout.data), step) * step * layout.data - len(units)
    filled = SequenceCosts([*work.slots, *[1] * missing], [*work.costs, *[1.0] * missing])
    ranks = balance(schedule, [*units, *range(real, real + missing)], filled, layout, cost)
    return [[[unit for unit in held if unit < real] for held in rank] for rank in ranks]


def _draw_mini_batches(schedule: Schedule, count: int, groups: Sequence[int] | None, seed: str) -> list[tuple[int, ...]]:
    """The rollouts of each mini-batch of one epoch."""
    size = schedule.mini_batch or count
    if size == count:
        return [tuple(range(count))]
    members: dict[int, list[int]] = {}
    for rollout in range(count):
        members.setdefault(rollout if groups is None else int(groups[rollout]), []).append(rollout)
    sizes = {len(held) for held in members.values()}
    units = list(members.values()) if len(sizes) == 1 and size % max(sizes) == 0 else [[number] for number in range(count)]
    random.Random(seed).shuffle(units)
    order = [rollout for unit in units for rollout in unit]
    return [tuple(order[start : start + size]) for start in range(0, count, size)]


def _micro_batch(
    samples: Sequence[int], lengths: Sequence[int], slots: Sequence[int], layout: Layout, shared: SharedPrompts | None
) -> MicroBatch:
    if not samples:
        return MicroBatch((), 0, in_micro_batch(1, layout))
    multiple, filled = layout.micro_batch_multiple, sum(map(slots.__getitem__, samples))
    if shared is not None:
        return shared.micro_batch(samples, multiple)
    return MicroBatch(tuple(samples), sum(map(lengths.__getitem__, samples)), ceil(filled, multiple) * multiple)


def _balance_shared(
    schedule: Schedule, samples: Sequence[int], shared: SharedPrompts, layout: Layout, cost: Cost, may_be_empty: bool
) -> Ranks:
    """Samples of each micro-batch of each data-parallel rank, groups whole as far as cap and number of micro-batches allow.

    Groups are split into ever smaller parts until there is a plan; the last attempt has parts of one sequence, which has a
    plan whenever there is one without sharing. Raises what `balance` raises then.
    """
    groups = shared.runs(samples)
    largest = max(map(len, groups))
    # Enough parts for each rank and each stage of its pipeline, if there are so many sequences.
    wanted = min(layout.data * max(layout.micro_batch_step, layout.pipeline), len(samples))
    for size in range(largest, 0, -1):
        parts = [part for group in groups for part in _parts(group, size, shared, schedule.max_tokens, layout)]
        if len(parts) < wanted:
            continue
        work = SequenceCosts([shared.tokens(part) for part in parts], [shared.cost(part, cost) for part in parts])
        try:
            ranks = _balance(schedule, range(len(parts)), work, layout, cost, may_be_empty and size == 1)
        except ValueError:
            if size == 1:
                raise
            continue
        return [[[sample for part in held for sample in parts[part]] for held in rank] for rank in ranks]
    raise AssertionError("parts of one sequence are as many as there are sequences")


def _parts(group: Sequence[int], size: int, shared: SharedPrompts, cap: int | None, layout: Layout) -> list[list[int]]:
    """A group in parts of at most `size` sequences, each of which fits a micro-batch."""
    assert cap is not None, "a schedule that counts sequences is not balanced"
    room = cap // layout.micro_batch_multiple * layout.micro_batch_multiple
    parts: list[list[int]] = []
    for sample in group:
        if parts and len(parts[-1]) < size and shared.tokens([*parts[-1], sample]) <= room:
            parts[-1].append(sample)
        else:
            parts.append([sample])
    return parts


def _refuse_impossible(
    schedule: Schedule, lengths: Sequence[int], slots: Sequence[int], layout: Layout, num_rollouts: int
) -> None:
    """`slots` are of what runs whole, by its first sample."""
    if not lengths:
        raise ValueError(f"phase {schedule.phase}: the batch is empty")
    shortest, largest = min(lengths), max(range(len(lengths)), key=lambda sample: (slots[sample], lengths[sample]))
    if shortest < 1:
        raise ValueError(f"phase {schedule.phase}: sample {lengths.index(shortest)} has {shortest} tokens")
    multiple, cap = layout.micro_batch_multiple, schedule.max_tokens
    longest, needed = lengths[largest], ceil(slots[largest], multiple) * multiple
    if cap is not None and needed > cap:
        rest = "padding" if schedule.together == 1 else "padding and the other segments of its rollout"
        padding = f" ({needed} with {rest})" if needed > longest else ""
        raise ValueError(
            f"phases.{schedule.phase}.micro_batch.max_tokens = {cap}, but sample {largest} has {longest} "
            f"tokens{padding}; the nearest legal value is {needed}"
        )
    # With one token a sequence: only packing shows whether these lengths need more micro-batches than a rank has sequences.
    faults = violations(replace(schedule, together=1), num_rollouts, layout, max_sequence_tokens=1)
    if faults:
        raise ValueError("; ".join(map(str, faults)))


@dataclass(frozen=True)
class Quality:
    """The metrics of a plan; shares are between 0 and 1.

    `num_micro_batches` is of each data-parallel rank, summed over mini-batches. `useful_share` is tokens / slots.
    `imbalance` compares the costliest data-parallel rank with the mean, 1.0 being even; over several mini-batches, the
    sum of the highest with the sum of the means. `bubble_share` is the part of the ranks' time in which pipeline stages
    wait while it fills and drains. `efficiency` is the cost of the real tokens over what the ranks could have done in the
    time of the slowest one: padding, imbalance, bubble and the fixed cost of micro-batches are what it lacks to 1.
    """

    num_micro_batches: int
    tokens: int
    slots: int
    max_slots: int
    useful_share: float
    imbalance: float
    bubble_share: float
    efficiency: float


def quality(plan: Plan, lengths: Sequence[int], cost: Cost, prompts: Sequence[int] | None = None) -> Quality:
    """The metrics of `plan` for its batch of `lengths`, and of `prompts` where it shares them."""
    costs = [cost.sequence(slots) for slots in padded([int(length) for length in lengths], plan.layout)]
    layout, every = plan.layout, plan.micro_batches
    useful = highest = mean = slowest = spent = bubble = 0.0
    for mini_batch in plan.mini_batches:
        useful += sum(cost.sequence(int(lengths[sample])) for sample in mini_batch.samples)
        ranks: list[list[float]] = []  # costs as [data-parallel rank][micro-batch]
        for rank in mini_batch.micro_batches:
            ranks.append([])
            for micro_batch in rank:
                spared = 0.0
                if micro_batch.sharing:
                    assert prompts is not None, "a plan that shares prompts is rated with their lengths"
                    spared = sum(map(cost.sequence, micro_batch.spared(prompts)))
                useful -= spared
                ranks[-1].append(sum(costs[sample] for sample in micro_batch.samples) - spared)
        rank_costs = [sum(rank_cost) for rank_cost in ranks]
        times = [run_times(rank_cost, layout, cost) for rank_cost in in_step(ranks, layout)]
        highest, mean = highest + max(rank_costs), mean + sum(rank_costs) / layout.data
        slowest += max(time for time, _ in times)
        spent, bubble = spent + sum(time for time, _ in times), bubble + sum(idle for _, idle in times)
    tokens, slots = sum(micro_batch.tokens for micro_batch in every), sum(micro_batch.slots for micro_batch in every)
    return Quality(
        num_micro_batches=sum(mini_batch.num_micro_batches for mini_batch in plan.mini_batches),
        tokens=tokens,
        slots=slots,
        max_slots=max(micro_batch.slots for micro_batch in every),
        useful_share=tokens / slots,
        imbalance=highest / mean,
        bubble_share=bubble / spent,
        efficiency=useful / (layout.data * slowest),
    )
