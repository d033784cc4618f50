"""Pack sequences into micro-batches under a cap, so that the slowest data-parallel rank is as fast as possible.

`cost.run_times` gives a rank's time. All ranks run the same number of micro-batches and may have different numbers of
sequences. For a given number of micro-batches the search first gives sequences to ranks and then splits each rank's
sequences over its micro-batches. If the cap is too tight for this, the search packs all micro-batches first and gives whole
micro-batches to ranks. The search rates several numbers of micro-batches and takes the fastest plan.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from megarl.models.layout import Layout
from megarl.schedule.cost import Cost, bubble_weight, in_step, ranks_in_step, run_times
from megarl.schedule.schedule import Schedule, ceil

Ranks = list[list[list[int]]]  # samples as [data-parallel rank][micro-batch][sequence]

# A large batch rates its choices on a sample, every n-th sequence on every n-th rank, with at least these numbers.
_TRIAL_SEQUENCES, _TRIAL_RANKS = 256, 8
# Under a pipeline, the numbers of micro-batches to rate grow by this ratio.
_COUNT_RATIO = 1.2
# The times that ranks with grouped long sequences may aim at, as ratios to the bound, which assumes that sequences can be
# split anywhere; and the share of the time by which such ranks may exceed it.
_GROUPED_SLACKS, _GROUPED_OVERFLOW = (1.0, 1.03, 1.1), 0.02
# A plan this close to the bound ends the search.
_CLOSE = 1.002


@dataclass(frozen=True)
class SequenceCosts:
    """The `slots` of a micro-batch that each sample of a batch takes, and the sample's time in token-equivalents."""

    slots: Sequence[int]
    costs: Sequence[float]


@dataclass(frozen=True)
class RankModel:
    """A lower bound of the time of a rank with `count` micro-batches, which assumes that sequences can be split anywhere.

    The rank waits `weight` (`cost.bubble_weight`) times for the micro-batch with its longest sequence.
    """

    count: int
    weight: float
    per_micro_batch: float

    @classmethod
    def of(cls, count: int, layout: Layout, cost: Cost) -> RankModel:
        return cls(count, bubble_weight(layout), cost.per_micro_batch)

    @property
    def overhead(self) -> float:
        """The part of the time that does not depend on the number of tokens."""
        return (self.count + self.weight) * self.per_micro_batch

    def even_room(self, time: float) -> float:
        """Return the cost of the sequences that fit into `time` if all micro-batches have the same cost."""
        return (time - self.overhead) / (1 + self.weight / self.count)

    def room(self, time: float, longest: float) -> float:
        """Return the cost of the sequences that fit into `time` if the longest sequence costs `longest`."""
        return min(self.even_room(time), time - self.overhead - self.weight * longest)


def least_time(before: Sequence[float], data: int, model: RankModel) -> float:
    """Return the time of the slowest of `data` ranks if sequences could be split anywhere, to a part in 2000.

    `before[i]` is the cost of the i longest sequences together. Ranks take the sequences longest first. So ranks that wait
    for long sequences share them, and the next rank starts with the shortest possible sequence: no other order has more
    room.
    """
    even = before[-1] / data * (1 + model.weight / model.count) + model.overhead
    low = max(even, before[1] * (1 + model.weight) + model.overhead)
    high = even + low
    if not model.weight:
        return low
    while high > low * 1.0005:
        middle = (low + high) / 2
        low, high = (low, middle) if _covers(before, data, model, middle) else (middle, high)
    return high


def _covers(before: Sequence[float], data: int, model: RankModel, time: float) -> bool:
    """Return whether `data` ranks can run all sequences in `time`."""
    reached = 0.0
    for rank in range(data):
        number = bisect_right(before, reached)
        if number == len(before):
            return True
        room = model.room(time, before[number] - before[number - 1])
        if room == model.even_room(time):  # the same holds for all shorter sequences
            return reached + (data - rank) * room >= before[-1]
        reached += room
    return reached >= before[-1]


@dataclass(frozen=True)
class _Choice:
    """A number of micro-batches per rank. With `slack`, few ranks take all long sequences and aim at this multiple of the
    bound; without `slack`, all ranks share the long sequences."""

    count: int
    slack: float | None


@dataclass(frozen=True)
class _Problem:
    """The sequences of one mini-batch, longest first, with cap, layout and cost."""

    order: Sequence[int]
    work: SequenceCosts
    cap: int
    layout: Layout
    cost: Cost

    @cached_property
    def before(self) -> list[float]:
        """The cost of the i longest sequences together, by i."""
        return [0.0, *accumulate(self.work.costs[sample] for sample in self.order)]

    @property
    def most(self) -> int:
        """The largest legal number of micro-batches per rank: no micro-batch may be empty."""
        step = self.layout.micro_batch_step
        return len(self.order) // self.layout.data // step * step

    def counts(self) -> Iterator[int]:
        """Yield legal numbers of micro-batches per rank, ascending: all numbers, or a selection under a pipeline."""
        step, slots = self.layout.micro_batch_step, self.work.slots
        num_alone = sum(2 * slots[sample] > self.cap for sample in self.order)  # too long to share a micro-batch
        fewest = max(ceil(sum(slots[sample] for sample in self.order), self.cap), num_alone)
        fewest = count = ceil(ceil(fewest, self.layout.data), step) * step
        ratio = _COUNT_RATIO if self.layout.pipeline > 1 else 1.0
        while count < self.most:
            yield count
            count = max(count + step, int(count * ratio) // step * step)
        if fewest <= self.most:
            yield self.most

    def choices(self) -> list[tuple[float, _Choice]]:
        """Return (target time, choice), shortest time first; without a pipeline, fewest micro-batches come first."""
        # Ranks that run in step do not gain if one rank has the long sequences, because the other ranks wait for it.
        slacks = _GROUPED_SLACKS if self.layout.pipeline > 1 and ranks_in_step(self.layout) == 1 else ()
        choices = [_Choice(count, slack) for count in self.counts() for slack in (None, *slacks)]
        return sorted(((self.time(choice), choice) for choice in choices), key=lambda pair: pair[0])

    def time(self, choice: _Choice) -> float:
        """Return the target time of a choice, in token-equivalents."""
        model = RankModel.of(choice.count, self.layout, self.cost)
        return least_time(self.before, self.layout.data, model) * (choice.slack or 1.0)

    def sampled(self) -> _Problem:
        """Return every n-th sequence and rank of a large problem, or a small problem itself."""
        every = min(self.layout.data // _TRIAL_RANKS, len(self.order) // _TRIAL_SEQUENCES)
        while every > 1 and self.layout.data % every:
            every -= 1
        if every <= 1:
            return self
        layout = replace(self.layout, data=self.layout.data // every)
        return replace(self, order=self.order[every // 2 :: every], layout=layout)


def balance(schedule: Schedule, samples: Sequence[int], work: SequenceCosts, layout: Layout, cost: Cost) -> Ranks:
    """Return the samples of each micro-batch of each data-parallel rank.

    The costliest micro-batch runs first, so that memory runs out in the first pass if at all. Raises ValueError if a virtual
    pipeline needs more micro-batches than there are sequences.
    """
    assert schedule.max_tokens is not None, "a schedule has one of sequences and max_tokens"
    cap = schedule.max_tokens // layout.micro_batch_multiple * layout.micro_batch_multiple
    order = sorted(samples, key=work.slots.__getitem__, reverse=True)
    problem = _Problem(order, work, cap, layout, cost)
    ranks = _first_plan(problem, _rated(problem.sampled()))
    ranks = ranks or _first_plan(problem, [choice for _, choice in problem.choices()])
    if ranks is not None:
        return ranks
    # Only a virtual pipeline comes here: without it, a plan with one sequence per micro-batch always exists.
    share = len(order) // layout.data
    needed = -(-len(_best_fit(order, work.slots, cap)) // layout.data)
    fits = -(-len(order) // (problem.most * layout.data)) * work.slots[order[0]]
    multiple = layout.micro_batch_multiple
    raise ValueError(
        f"phases.{schedule.phase}.micro_batch.max_tokens = {schedule.max_tokens} needs {needed} micro-batches a rank, but "
        f"{share} sequences a rank make at most {problem.most}, a multiple of {layout.micro_batch_step} for the virtual "
        f"pipeline; the nearest value that always fits is {-(-fits // multiple) * multiple}"
    )


def _first_plan(problem: _Problem, choices: list[_Choice]) -> Ranks | None:
    plans = (_attempt(problem, choice, problem.time(choice)) for choice in choices)
    return next((ranks for ranks in plans if ranks is not None), None)


def _rated(problem: _Problem) -> list[_Choice]:
    """Return the choices that have a plan, fastest first; end the search when no other choice can be faster."""
    rated: list[tuple[float, _Choice]] = []
    for time, choice in problem.choices():
        best = min((plan_time for plan_time, _ in rated), default=float("inf"))
        if best <= time * _CLOSE or (len(rated) == 2 and problem.layout.pipeline == 1):
            break
        ranks = _attempt(problem, choice, time)
        if ranks is not None:
            costs = [[sum(problem.work.costs[sample] for sample in held) for held in rank] for rank in ranks]
            times = (run_times(rank, problem.layout, problem.cost)[0] for rank in in_step(costs, problem.layout))
            rated.append((max(times), choice))
    return [choice for _, choice in sorted(rated, key=lambda pair: pair[0])]


def _attempt(problem: _Problem, choice: _Choice, time: float) -> Ranks | None:
    """Return a plan; None if no plan was found under the cap or, with grouped sequences, near the target `time`."""
    work, cap, data, count = problem.work, problem.cap, problem.layout.data, choice.count
    grouped = choice.slack is not None
    samples_of_ranks = _sequences_by_rank(problem, choice, time) or []
    ranks = [_level(samples, work, cap, count) for samples in samples_of_ranks]
    if not ranks or not all(ranks):
        bins = [] if grouped else _best_fit(problem.order, work.slots, cap)
        if grouped or len(bins) > count * data:
            return None
        ranks = _micro_batches_by_rank(_split(bins, work.slots, count * data), work, data)
    for rank in ranks:
        for held in rank:
            held.sort()
        rank.sort(key=lambda held: (-sum(map(work.costs.__getitem__, held)), held[0]))
    return ranks


def _sequences_by_rank(problem: _Problem, choice: _Choice, time: float) -> list[list[int]] | None:
    """Return the sequences of each rank, longest first, at least `choice.count` per rank.

    Each sequence goes to the rank with the most room left within `time`. With grouped sequences, a rank is opened only when
    no open rank has room, until the longest remaining sequence no longer dominates its rank. Under a pipeline a rank waits
    for its longest sequence, so few ranks take all long sequences, and these ranks take fewer other sequences. Return None
    if the slots do not fit, or if grouped ranks would take clearly longer than `time`.
    """
    work, data, model = problem.work, problem.layout.data, RankModel.of(choice.count, problem.layout, problem.cost)
    grouped = choice.slack is not None
    ranks: list[list[int]] = [[] for _ in range(data)]
    free = [problem.cap * choice.count] * data
    opened = [] if grouped else [(-model.even_room(time), rank) for rank in range(data)]  # (-room, rank)
    num_opened = len(opened)
    for sample in problem.order:
        slots, cost = work.slots[sample], work.costs[sample]
        if num_opened < data and (not opened or -opened[0][0] < cost):
            room = model.room(time, cost)
            last = data if room == model.even_room(time) else num_opened + 1
            for rank in range(num_opened, last):
                heapq.heappush(opened, (-room, rank))
            num_opened = last
        while opened and free[opened[0][1]] < slots:
            heapq.heappop(opened)  # this rank takes no further sequence, and keeps its free slots
        if not opened:
            return None
        negative_room, rank = opened[0]
        if grouped and negative_room + cost > _GROUPED_OVERFLOW * time:
            return None
        heapq.heapreplace(opened, (negative_room + cost, rank))
        ranks[rank].append(sample)
        free[rank] -= slots
    # A rank with fewer sequences than micro-batches takes the shortest sequence of the rank with the most sequences.
    donors = [(-len(samples), rank) for rank, samples in enumerate(ranks)]
    heapq.heapify(donors)
    for rank, samples in enumerate(ranks):
        while len(samples) < choice.count:
            donor = donors[0][1]
            sample = ranks[donor].pop()
            heapq.heapreplace(donors, (-len(ranks[donor]), donor))
            if work.slots[sample] > free[rank]:
                return None
            free[rank], free[donor] = free[rank] - work.slots[sample], free[donor] + work.slots[sample]
            insort(samples, sample, key=lambda other: -work.slots[other])
    return ranks


def _micro_batches_by_rank(micro_batches: Sequence[list[int]], work: SequenceCosts, data: int) -> Ranks:
    """Give every rank the same number of micro-batches: the costliest goes first, to the open rank with the least cost."""
    share = len(micro_batches) // data
    ranks: Ranks = [[] for _ in range(data)]
    open_ranks = [(0.0, rank) for rank in range(data)]
    costs = [sum(map(work.costs.__getitem__, held)) for held in micro_batches]
    for number in sorted(range(len(micro_batches)), key=lambda number: (-costs[number], micro_batches[number])):
        spent, rank = heapq.heappop(open_ranks)
        ranks[rank].append(micro_batches[number])
        if len(ranks[rank]) < share:
            heapq.heappush(open_ranks, (spent + costs[number], rank))
    return ranks


def _level(longest_first: Sequence[int], work: SequenceCosts, cap: int, count: int) -> list[list[int]]:
    """Return `count` bins of at most `cap` slots with costs as even as possible; no bins if a sequence found no room.

    Each sequence goes to the cheapest bin that has room (Graham's longest processing time first). If this leaves no room for
    a sequence, best-fit may still find room, because it fills bins instead of levelling them. With at least `count`
    sequences no bin stays empty.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [cap] * count
    cheapest = [(0.0, number) for number in range(count)]
    for sample in longest_first:
        full = []
        while cheapest and room[cheapest[0][1]] < work.slots[sample]:
            full.append(heapq.heappop(cheapest))
        if not cheapest:
            tight = _best_fit(longest_first, work.slots, cap)
            return _split(tight, work.slots, count) if len(tight) <= count else []
        spent, number = cheapest[0]
        heapq.heapreplace(cheapest, (spent + work.costs[sample], number))
        for entry in full:  # a shorter sequence may fit
            heapq.heappush(cheapest, entry)
        bins[number].append(sample)
        room[number] -= work.slots[sample]
    return bins


def _best_fit(longest_first: Sequence[int], slots: Sequence[int], cap: int) -> list[list[int]]:
    """Return few bins of at most `cap` slots: each sequence goes into the fullest bin with room (best-fit decreasing)."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free slots, bin), ascending
    for sample in longest_first:
        at = bisect_left(rooms, (slots[sample], -1))
        if at == len(rooms):
            insort(rooms, (cap - slots[sample], len(bins)))
            bins.append([sample])
        else:
            room, number = rooms.pop(at)
            insort(rooms, (room - slots[sample], number))
            bins[number].append(sample)
    return bins


def _split(bins: list[list[int]], slots: Sequence[int], count: int) -> list[list[int]]:
    """Return `count` bins: move the shortest sequence out of the fullest bin with several sequences, again and again."""
    fullest = [(-sum(slots[sample] for sample in held), number) for number, held in enumerate(bins) if len(held) > 1]
    heapq.heapify(fullest)
    while len(bins) < count:
        filled, number = heapq.heappop(fullest)
        sample = bins[number].pop()
        bins.append([sample])
        if len(bins[number]) > 1:
            heapq.heappush(fullest, (filled + slots[sample], number))
    return bins
