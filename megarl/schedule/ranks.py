"""Which data-parallel rank runs which sequences."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.schedule.bound import RankModel

# Ranks within this ratio of the mean are even; the costliest looks for a swap with this many of the cheapest.
_EVEN, _PARTNERS = 1.0001, 64
# Grouped ranks may end up this far above the time aimed at, as a share of it.
_OVERFLOW = 0.02


@dataclass(frozen=True)
class Work:
    """What each sample of a batch takes: `slots` of a micro-batch, and time in token-equivalents."""

    slots: Sequence[int]
    costs: Sequence[float]


def deal_sequences(
    longest_first: Sequence[int], work: Work, data: int, cap: int, model: RankModel, time: float, grouped: bool
) -> list[list[int]] | None:
    """Sequences of each of `data` ranks, longest first, at least `model.count` a rank.

    Each sequence goes to the rank with the most room left of what it can take in `time`. With `grouped`, a rank is
    opened only when no open one has room, until the longest sequence left no longer dominates its rank: under a pipeline
    a rank waits for its longest sequence, so few ranks take all the long ones, and less of everything else.
    None where the slots do not fit, and where grouped ranks would take clearly longer than `time`.
    """
    ranks: list[list[int]] = [[] for _ in range(data)]
    free = [cap * model.count] * data
    opened: list[tuple[float, int]] = []  # (-room, rank)
    if not grouped:
        opened = [(-model.even_room(time), rank) for rank in range(data)]
    unopened = len(opened)
    for sample in longest_first:
        slots, cost = work.slots[sample], work.costs[sample]
        if unopened < data and (not opened or -opened[0][0] < cost):
            even = model.room(time, cost) == model.even_room(time)
            last = data if even else unopened + 1
            for rank in range(unopened, last):
                heapq.heappush(opened, (-model.room(time, cost), rank))
            unopened = last
        while opened and free[opened[0][1]] < slots:
            heapq.heappop(opened)  # for good: what stays free is less than the sequences that are left to place are long
        if not opened:
            return None
        room, rank = opened[0]
        if grouped and room + cost > _OVERFLOW * time:
            return None
        heapq.heapreplace(opened, (room + cost, rank))
        ranks[rank].append(sample)
        free[rank] -= slots
    shared = _share(ranks, work, free, model.count)
    if shared is not None and not grouped:
        _even_out(shared, work.costs, work.slots, free)
    return shared


def _share(ranks: list[list[int]], work: Work, free: list[int], count: int) -> list[list[int]] | None:
    """At least `count` sequences on each rank: ranks with fewer take the shortest of the rank that has the most."""
    donors = [(-len(own), rank) for rank, own in enumerate(ranks) if len(own) > count]
    heapq.heapify(donors)
    for rank, own in enumerate(ranks):
        while len(own) < count:
            held, donor = donors[0]
            sample = ranks[donor].pop()
            if work.slots[sample] > free[rank]:
                return None
            free[rank], free[donor] = free[rank] - work.slots[sample], free[donor] + work.slots[sample]
            own.append(sample)
            own.sort(key=work.slots.__getitem__, reverse=True)
            if -held - 1 > count:
                heapq.heapreplace(donors, (held + 1, donor))
            else:
                heapq.heappop(donors)
    return ranks


def _even_out(ranks: list[list[int]], costs: Sequence[float], slots: Sequence[int], free: list[int]) -> None:
    """Swap sequences of the costliest rank for cheaper ones of the cheapest ranks, while that evens them out."""
    spent = sorted((sum(map(costs.__getitem__, own)), rank) for rank, own in enumerate(ranks))
    even = _EVEN * sum(cost for cost, _ in spent) / len(spent)
    for _ in range(2 * len(ranks)):
        most, high = spent[-1]
        if most <= even:
            return
        swaps = (
            (position, low, least, *pair)
            for position, (least, low) in enumerate(spent[:_PARTNERS])
            if (pair := _best_swap(ranks[high], ranks[low], costs, most - least)) is not None
            and slots[pair[0]] - slots[pair[1]] <= free[low]
        )
        swap = next(swaps, None)
        if swap is None:
            return
        position, low, least, away, back = swap
        del spent[-1], spent[position]
        moved = costs[away] - costs[back]
        insort(spent, (most - moved, high))
        insort(spent, (least + moved, low))
        for rank, gone, come in ((high, away, back), (low, back, away)):
            ranks[rank] = sorted({*ranks[rank]} - {gone} | {come}, key=lambda sample: (-slots[sample], sample))
            free[rank] += slots[gone] - slots[come]


def _best_swap(high: list[int], low: list[int], costs: Sequence[float], gap: float) -> tuple[int, int] | None:
    """A sequence of `high` and one of `low`, whose swap leaves the smallest part of `gap`; None where none lessens it."""
    ascending = [costs[sample] for sample in reversed(low)]
    best, found = gap, None
    for sample in high:
        wanted = costs[sample] - gap / 2
        at = bisect_left(ascending, wanted)
        for other in (at - 1, at):
            if 0 <= other < len(low) and abs(2 * (ascending[other] - wanted)) < best:
                best, found = abs(2 * (ascending[other] - wanted)), (sample, low[-1 - other])
    return found


def deal_micro_batches(micro_batches: Sequence[list[int]], work: Work, data: int) -> list[list[list[int]]]:
    """The same number of micro-batches to every rank, costliest first to the rank with the least that still takes one."""
    share = len(micro_batches) // data
    ranks: list[list[list[int]]] = [[] for _ in range(data)]
    open_ranks = [(0.0, rank) for rank in range(data)]
    costs = [sum(work.costs[sample] for sample in held) for held in micro_batches]
    for number in sorted(range(len(micro_batches)), key=lambda number: (-costs[number], micro_batches[number])):
        spent, rank = heapq.heappop(open_ranks)
        ranks[rank].append(micro_batches[number])
        if len(ranks[rank]) < share:
            heapq.heappush(open_ranks, (spent + costs[number], rank))
    return ranks
