"""Sequences into bins under a cap: how many micro-batches, and what is in each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def pack(samples: Sequence[int], lengths: Sequence[int], cap: int, unit: int) -> list[list[int]]:
    """Bins under the cap: a multiple of `unit`, as few as the packing finds, none empty.

    Tries the smallest count first. Balance comes first (longest into the lightest bin); where that overflows, first-fit
    may still fit, because it fills bins instead of levelling them.
    """
    longest_first = sorted(samples, key=lambda sample: (-lengths[sample], sample))
    total = sum(lengths[sample] for sample in samples)
    alone = sum(2 * lengths[sample] > cap for sample in samples)  # no two of these share a bin
    count = max(-(-total // cap), alone, 1)
    count = -(-count // unit) * unit
    first_fit: list[list[int]] = []
    while True:
        balanced = _lightest_bin(longest_first, lengths, cap, count)
        if balanced is not None:
            return balanced
        first_fit = first_fit or _first_fit(longest_first, lengths, cap)
        if len(first_fit) <= count:
            return _spread(first_fit, lengths, count)
        count += unit


def _lightest_bin(longest_first: list[int], lengths: Sequence[int], cap: int, count: int) -> list[list[int]] | None:
    """Each sequence into the lightest of `count` bins (Graham's LPT); None when one would pass the cap.

    With at least `count` sequences no bin stays empty: the first `count` of them find an empty, hence lightest, bin.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for sample in longest_first:
        load, number = heapq.heappop(loads)
        if load + lengths[sample] > cap:
            return None
        bins[number].append(sample)
        heapq.heappush(loads, (load + lengths[sample], number))
    return bins


def _first_fit(longest_first: list[int], lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Each sequence into the first bin with room (first-fit decreasing)."""
    bins: list[list[int]] = []
    loads: list[int] = []
    for sample in longest_first:
        number = next((number for number, load in enumerate(loads) if load + lengths[sample] <= cap), len(bins))
        if number == len(bins):
            bins.append([])
            loads.append(0)
        bins[number].append(sample)
        loads[number] += lengths[sample]
    return bins


def _spread(bins: list[list[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Fill up to `count` bins by moving the shortest sequence out of the heaviest bin that holds more than one."""
    bins = [list(held) for held in bins]
    while len(bins) < count:
        shared = [held for held in bins if len(held) > 1]
        heaviest = max(shared, key=lambda held: sum(lengths[sample] for sample in held))
        bins.append([heaviest.pop()])
    return bins
