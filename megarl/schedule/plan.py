"""From a schedule and the lengths of one batch to a plan: a pure function of its arguments.

What a plan promises (each is a property in tests/schedule/test_plan.py):
every sample once per epoch; no micro-batch above `max_tokens`, padding included; no empty micro-batch; the same number
of micro-batches on every data-parallel rank, and one that the pipeline can run; the same plan for the same arguments,
whatever was planned before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megarl.models.layout import Layout
from megarl.schedule.balance import SequenceCosts, balance
from megarl.schedule.cost import Cost, in_step, run_times
from megarl.schedule.schedule import Schedule, in_micro_batch, padded, violations
from megarl.schedule.share import Shared, balance_shared


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of one forward pass of one data-parallel rank.

    `samples` are positions in the batch, ascending under `max_tokens` and in mini-batch order under `sequences`.
    `tokens` is their sum of lengths; `slots` adds the alignment padding and is what the engine executes.

    Where prompts are shared, `sharing` says how many samples, one behind the other, have one prompt between them; `tokens`
    counts it once. Empty: each sample brings its own.
    """

    samples: tuple[int, ...]
    tokens: int
    slots: int
    sharing: tuple[int, ...] = ()

    def spared(self, prompts: Sequence[int]) -> list[int]:
        """Lengths of the prompts that samples leave out, as another one of the micro-batch has them: `prompts` are those of
        all samples of the batch."""
        first = accumulate(self.sharing, initial=0)
        return [
            int(prompts[self.samples[start]])
            for start, size in zip(first, self.sharing, strict=False)
            for _ in range(size - 1)
        ]

    def rows_behind_prompts(self, lengths: Sequence[int]) -> int:
        """Rows of keys, and of values, that attention lays behind copies of shared prompts: for each sample its whole
        sequence. `lengths` are those of all samples of the batch."""
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
        return tuple(sample for rank in self.micro_batches for one in rank for sample in one.samples)

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
        return tuple(one for mini_batch in self.mini_batches for rank in mini_batch.micro_batches for one in rank)


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
    first `prompts[i]` of its tokens are the group's prompt, which a schedule that shares prompts asks for.

    More than one mini-batch per epoch draws a new order of the samples for each epoch from `seed`, the phase and the
    epoch; a single one keeps batch order. Groups stay whole in a mini-batch where they are alike in size and fit.
    Raises ValueError for sizes that do not divide, for counts the pipeline cannot run and for a sequence above the cap.
    """
    lengths = [int(length) for length in lengths]
    _refuse_impossible(schedule, lengths, layout)
    multiple, slots = layout.micro_batch_multiple, padded(lengths, layout)
    work = SequenceCosts(slots, [cost.sequence(length) for length in slots])
    shared = Shared.of(schedule, lengths, layout, groups, prompts)
    mini_batches = []
    for epoch in range(schedule.epochs):
        for samples in _draw_mini_batches(schedule, len(lengths), groups, f"{seed}/{schedule.phase}/{epoch}"):
            ranks = _cut_by_count(schedule, samples, layout)
            if ranks is None and shared is not None:
                ranks = balance_shared(schedule, samples, shared, layout, cost)
            elif ranks is None:
                ranks = balance(schedule, samples, work, layout, cost)
            if shared is None:
                micro_batches = tuple(tuple(_micro_batch(own, lengths, slots, multiple) for own in rank) for rank in ranks)
            else:
                micro_batches = tuple(tuple(_sharing(own, shared, multiple) for own in rank) for rank in ranks)
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


def _cut_by_count(schedule: Schedule, samples: tuple[int, ...], layout: Layout) -> list[list[list[int]]] | None:
    """Fixed counts in mini-batch order, as [data-parallel rank][micro-batch]; None for a `max_tokens` schedule."""
    if schedule.sequences is None:
        return None
    share, size = len(samples) // layout.data, schedule.sequences
    ranks = [samples[rank * share : (rank + 1) * share] for rank in range(layout.data)]
    return [[list(own[start : start + size]) for start in range(0, share, size)] for own in ranks]


def _micro_batch(samples: Sequence[int], lengths: Sequence[int], slots: Sequence[int], multiple: int) -> MicroBatch:
    filled = sum(map(slots.__getitem__, samples))
    return MicroBatch(tuple(samples), sum(map(lengths.__getitem__, samples)), -(-filled // multiple) * multiple)


def _sharing(samples: Sequence[int], shared: Shared, multiple: int) -> MicroBatch:
    """Sequences of one group side by side, groups in the order of their first one."""
    runs = shared.runs(samples)
    tokens = sum(map(shared.tokens, runs))
    in_order = tuple(sample for run in runs for sample in run)
    return MicroBatch(in_order, tokens, -(-tokens // multiple) * multiple, tuple(map(len, runs)))


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
    # One token a sequence: whether these very lengths need more micro-batches than a rank has sequences shows in packing.
    found = violations(schedule, len(lengths), layout, max_sequence_tokens=1)
    if found:
        raise ValueError("; ".join(map(str, found)))


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
    """The metrics of `plan` for the batch of `lengths`, and of `prompts` where it shares them, that it was made for."""
    costs = [cost.sequence(slots) for slots in padded([int(length) for length in lengths], plan.layout)]
    layout, every = plan.layout, plan.micro_batches
    useful = highest = mean = slowest = spent = bubble = 0.0
    for mini_batch in plan.mini_batches:
        useful += sum(cost.sequence(int(lengths[sample])) for sample in mini_batch.samples)
        cuts = []
        for rank in mini_batch.micro_batches:
            spared = [_spared(one, prompts, cost) for one in rank]
            useful -= sum(spared)
            cut = [sum(costs[sample] for sample in one.samples) - less for one, less in zip(rank, spared, strict=True)]
            cuts.append(cut)
        rank_costs = [sum(cut) for cut in cuts]
        times = [run_times(cut, layout, cost) for cut in in_step(cuts, layout)]
        highest, mean = highest + max(rank_costs), mean + sum(rank_costs) / layout.data
        slowest += max(time for time, _ in times)
        spent, bubble = spent + sum(time for time, _ in times), bubble + sum(idle for _, idle in times)
    tokens, slots = sum(one.tokens for one in every), sum(one.slots for one in every)
    return Quality(
        num_micro_batches=sum(mini_batch.num_micro_batches for mini_batch in plan.mini_batches),
        tokens=tokens,
        slots=slots,
        max_slots=max(one.slots for one in every),
        useful_share=tokens / slots,
        imbalance=highest / mean,
        bubble_share=bubble / spent,
        efficiency=useful / (layout.data * slowest),
    )


def _spared(micro_batch: MicroBatch, prompts: Sequence[int] | None, cost: Cost) -> float:
    """Cost of the prompts that sequences of a micro-batch leave out, as another one has them."""
    if not micro_batch.sharing:
        return 0.0
    assert prompts is not None, "a plan that shares prompts is rated with their lengths"
    return sum(map(cost.sequence, micro_batch.spared(prompts)))
