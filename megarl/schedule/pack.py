"""Sequences into bins under a cap: the micro-batches of one data-parallel rank, or of all of them."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence


def level(
    longest_first: Sequence[int], slots: Sequence[int], costs: Sequence[float], cap: int, count: int
) -> list[list[int]] | None:
    """`count` bins of at most `cap` slots and of costs as even as they come; None where no packing was found.

    Each sequence goes to the cheapest bin that has room (Graham's longest processing time first); where that ends with a
    sequence and no room, best-fit may still find some, because it fills bins instead of levelling them. No bin stays
    empty as long as there are `count` sequences.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [cap] * count
    cheapest = [(0.0, number) for number in range(count)]
    for sample in longest_first:
        wanted, passed = slots[sample], []
        while cheapest and room[cheapest[0][1]] < wanted:
            passed.append(heapq.heappop(cheapest))
        if not cheapest:
            tight = best_fit(longest_first, slots, cap)
            return split(tight, slots, count) if len(tight) <= count else None
        spent, number = cheapest[0]
        heapq.heapreplace(cheapest, (spent + costs[sample], number))
        for full in passed:  # only for this sequence
            heapq.heappush(cheapest, full)
        bins[number].append(sample)
        room[number] -= wanted
    return bins


def best_fit(longest_first: Sequence[int], slots: Sequence[int], cap: int) -> list[list[int]]:
    """Few bins of at most `cap` slots: each sequence into the fullest bin with room (best-fit decreasing)."""
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


def split(bins: Sequence[Sequence[int]], slots: Sequence[int], count: int) -> list[list[int]]:
    """Up to `count` bins, by moving the shortest sequence out of the fullest bin that holds more than one."""
    halves = [list(held) for held in bins]
    fullest = [(-sum(slots[sample] for sample in held), number) for number, held in enumerate(halves) if len(held) > 1]
    heapq.heapify(fullest)
    while len(halves) < count:
        filled, number = heapq.heappop(fullest)
        sample = halves[number].pop()
        halves.append([sample])
        if len(halves[number]) > 1:
            heapq.heappush(fullest, (filled + slots[sample], number))
    return halves
