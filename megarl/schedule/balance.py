"""Which data-parallel rank runs which sequences, and in which micro-batches, so that the slowest rank is fast."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.reshard.boxes import Layout
from megarl.schedule.cost import Cost
from megarl.schedule.pack import pack
from megarl.schedule.schedule import Schedule


@dataclass(frozen=True)
class Work:
    """What each sample of a batch takes: `slots` of a micro-batch, and time in token-equivalents."""

    slots: Sequence[int]
    costs: Sequence[float]


def balance(schedule: Schedule, samples: Sequence[int], work: Work, layout: Layout, cost: Cost) -> list[list[list[int]]]:
    """Samples of each micro-batch of each data-parallel rank."""
    assert schedule.max_tokens is not None, "a schedule has one of sequences and max_tokens"
    cap = schedule.max_tokens // layout.micro_batch_multiple * layout.micro_batch_multiple
    bins = pack(samples, work.slots, cap, layout.data * layout.micro_batch_step)
    return _deal([sorted(held) for held in bins], work, layout.data)


def _deal(bins: list[list[int]], work: Work, data: int) -> list[list[list[int]]]:
    """The same number of micro-batches to every rank, costliest first to the lightest rank that still takes one.

    Costliest first is also the order they run in: if memory runs out, it does so in the first pass.
    """
    share = len(bins) // data
    ranks: list[list[list[int]]] = [[] for _ in range(data)]
    open_ranks = [(0.0, rank) for rank in range(data)]
    costs = [sum(work.costs[sample] for sample in held) for held in bins]
    for number in sorted(range(len(bins)), key=lambda number: (-costs[number], bins[number])):
        spent, rank = heapq.heappop(open_ranks)
        ranks[rank].append(bins[number])
        if len(ranks[rank]) < share:
            heapq.heappush(open_ranks, (spent + costs[number], rank))
    return ranks
