"""Which data-parallel rank runs which sequences."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.schedule.bound import RankModel

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
    return _share(ranks, work, free, model.count)


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
            free[rank] -= work.slots[sample]
            own.append(sample)
            if -held - 1 > count:
                heapq.heapreplace(donors, (held + 1, donor))
            else:
                heapq.heappop(donors)
    return ranks


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
