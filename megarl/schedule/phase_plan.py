"""From a schedule and the lengths of one batch to a plan: a pure function of its arguments.

What a plan promises (each is a property in tests/schedule/test_plan.py):
every sample once per epoch; no micro-batch above `max_tokens`, padding included; no empty micro-batch; the same number
of micro-batches on every data-parallel rank, and one that the pipeline can run; the same plan for the same arguments,
whatever was planned before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megarl.models.layout import Layout
from megarl.schedule.balance import Ranks, SequenceCosts, balance
from megarl.schedule.cost import Cost, in_step, run_times
from megarl.schedule.schedule import Schedule, ceil, in_micro_batch, padded, violations


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of one forward pass of one data-parallel rank.

    `samples` are positions in the batch, ascending under `max_tokens` and in mini-batch order under `sequences`.
    `tokens` is the sum of their lengths; `slots` adds the alignment padding and is what the role executes.

    With shared prompts, `sharing` has the number of consecutive samples for each prompt, which `tokens` counts once. Empty:
    no prompt is shared.
    """

    samples: tuple[int, ...]
    tokens: int
    slots: int
    sharing: tuple[int, ...] = ()

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

    @property
    def inverse(self) -> tuple[int, ...]:
        """Results in `order` back to sample order: `results[inverse[i]]` belongs to `samples[i]`."""
        position = {sample: number for number, sample in enumerate(self.order)}
        return tuple(position[sample] for sample in self.samples)


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
    """Prompts that run once for the sequences of a group in a micro-batch: the sequences have the same tokens at the same
    positions, for which a causal model computes the same. Sample i has `lengths[i]` tokens, of which the first `prompts[i]`
    are the prompt of group `groups[i]`."""

    lengths: Sequence[int]
    groups: Sequence[int]
    prompts: Sequence[int]

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        lengths: Sequence[int],
        layout: Layout,
        groups: Sequence[int] | None,
        prompts: Sequence[int] | None,
    ) -> SharedPrompts | None:
        """None for a schedule that shares no prompts. Raises ValueError without groups, prompts, or with context ranks."""
        if not schedule.share_prompts:
            return None
        if groups is None or prompts is None or layout.context > 1:
            raise ValueError(
                f"phases.{schedule.phase}.share_prompts needs the groups of a batch, the lengths of its prompts, and a "
                "layout without context parallelism; set it to false"
            )
        return cls(lengths, [int(group) for group in groups], [int(prompt) for prompt in prompts])

    def runs(self, samples: Sequence[int]) -> list[list[int]]:
        """Samples by group, groups and samples in the order they come."""
        by_group: dict[int, list[int]] = {}
        for sample in samples:
            by_group.setdefault(self.groups[sample], []).append(sample)
        return list(by_group.values())

    def tokens(self, run: Sequence[int]) -> int:
        """Tokens of samples that share a prompt."""
        return sum(map(self.lengths.__getitem__, run)) - self.prompts[run[0]] * (len(run) - 1)

    def cost(self, run: Sequence[int], cost: Cost) -> float:
        """Cost of samples that share a prompt: the prompt counts once."""
        spared = cost.sequence(self.prompts[run[0]]) * (len(run) - 1)
        return sum(cost.sequence(self.lengths[sample]) for sample in run) - spared

    def micro_batch(self, samples: Sequence[int], multiple: int) -> MicroBatch:
        """Sequences of one group follow each other, groups in the order of their first sequence."""
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
) -> Plan:
    """Plan one phase for a batch whose sample i has `lengths[i]` tokens and belongs to the group with id `groups[i]`; the
    first `prompts[i]` tokens are the group's prompt, which a schedule that shares prompts needs.

    More than one mini-batch per epoch draws a new order of the samples for each epoch from `seed`, the phase and the
    epoch; a single one keeps batch order. Groups stay whole in a mini-batch where they have equal sizes that fit.
    Raises ValueError for sizes that do not divide, for counts the pipeline cannot run and for a sequence above the cap.
    """
    lengths = [int(length) for length in lengths]
    _refuse_impossible(schedule, lengths, layout)
    multiple, slots = layout.micro_batch_multiple, padded(lengths, layout)
    work = SequenceCosts(slots, [cost.sequence(length) for length in slots])
    shared = SharedPrompts.of(schedule, lengths, layout, groups, prompts)
    mini_batches = []
    for epoch in range(schedule.epochs):
        for samples in _draw_mini_batches(schedule, len(lengths), groups, f"{seed}/{schedule.phase}/{epoch}"):
            if schedule.sequences is not None:  # fixed counts in mini-batch order
                share, size = len(samples) // layout.data, schedule.sequences
                parts = [samples[rank * share : (rank + 1) * share] for rank in range(layout.data)]
                ranks = [[list(part[start : start + size]) for start in range(0, share, size)] for part in parts]
            elif shared is not None:
                ranks = _balance_shared(schedule, samples, shared, layout, cost)
            else:
                ranks = balance(schedule, samples, work, layout, cost)
            if shared is None:
                micro_batches = tuple(tuple(_micro_batch(part, lengths, slots, multiple) for part in rank) for rank in ranks)
            else:
                micro_batches = tuple(tuple(shared.micro_batch(part, multiple) for part in rank) for rank in ranks)
            mini_batches.append(MiniBatch(epoch, samples, micro_batches, schedule.phase))
    return Plan(schedule.phase, tuple(mini_batches), layout)


def _draw_mini_batches(schedule: Schedule, count: int, groups: Sequence[int] | None, seed: str) -> list[tuple[int, ...]]:
    """The samples of each mini-batch of one epoch."""
    size = schedule.mini_batch or count
    if size == count:
        return [tuple(range(count))]
    members: dict[int, list[int]] = {}
    for sample in range(count):
        members.setdefault(sample if groups is None else int(groups[sample]), []).append(sample)
    sizes = {len(held) for held in members.values()}
    units = list(members.values()) if len(sizes) == 1 and size % max(sizes) == 0 else [[sample] for sample in range(count)]
    random.Random(seed).shuffle(units)
    order = [sample for unit in units for sample in unit]
    return [tuple(order[start : start + size]) for start in range(0, count, size)]


def _micro_batch(samples: Sequence[int], lengths: Sequence[int], slots: Sequence[int], multiple: int) -> MicroBatch:
    filled = sum(slots[sample] for sample in samples)
    return MicroBatch(tuple(samples), sum(lengths[sample] for sample in samples), ceil(filled, multiple) * multiple)


def _balance_shared(schedule: Schedule, samples: Sequence[int], shared: SharedPrompts, layout: Layout, cost: Cost) -> Ranks:
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
            ranks = balance(schedule, range(len(parts)), work, layout, cost)
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


def _refuse_impossible(schedule: Schedule, lengths: Sequence[int], layout: Layout) -> None:
    if not lengths:
        raise ValueError(f"phase {schedule.phase}: the batch is empty")
    shortest, longest = min(lengths), max(lengths)
    if shortest < 1:
        raise ValueError(f"phase {schedule.phase}: sample {lengths.index(shortest)} has {shortest} tokens")
    cap, needed = schedule.max_tokens, in_micro_batch(longest, layout)
    if cap is not None and needed > cap:
        padding = f" ({needed} with padding)" if needed > longest else ""
        raise ValueError(
            f"phases.{schedule.phase}.micro_batch.max_tokens = {cap}, but sample {lengths.index(longest)} has {longest} "
            f"tokens{padding}; the nearest legal value is {needed}"
        )
    # With one token a sequence: only packing shows whether these lengths need more micro-batches than a rank has sequences.
    faults = violations(schedule, len(lengths), layout, max_sequence_tokens=1)
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
