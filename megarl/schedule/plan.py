"""From a schedule and the lengths of one batch to a plan: a pure function of its arguments.

What a plan promises (each is a property in tests/test_schedule_plan.py):
every sample once per epoch; no micro-batch above `max_tokens`; no empty micro-batch; the same number of micro-batches on
every data-parallel rank; the same plan for the same arguments, whatever was planned before.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.schedule.schedule import Schedule


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of one forward pass of one data-parallel rank; `samples` are positions in the batch, ascending
    under `max_tokens` and in mini-batch order under `sequences`; `tokens` is their sum of lengths."""

    samples: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class MiniBatch:
    """Sequences of one optimizer update (or of a whole forward phase), cut as [data-parallel rank][micro-batch]."""

    epoch: int
    samples: tuple[int, ...]
    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    phase: str = ""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each data-parallel rank; the same on all."""
        return len(self.micro_batches[0])


@dataclass(frozen=True)
class Plan:
    """What one phase runs for one batch; a forward phase has exactly one mini-batch."""

    phase: str
    mini_batches: tuple[MiniBatch, ...]


def plan_phase(schedule: Schedule, lengths: Sequence[int], data_parallel: int, seed: int) -> Plan:
    """Plan one phase for a batch whose sample i has `lengths[i]` tokens.

    More than one mini-batch per epoch draws a new order of the samples for each epoch from `seed`, the phase and the
    epoch; a single one keeps batch order. Raises ValueError for sizes that do not divide and for a sequence above the cap.
    """
    _refuse_impossible(schedule, lengths, data_parallel)
    size = schedule.mini_batch or len(lengths)
    mini_batches = []
    for epoch in range(schedule.epochs):
        order = list(range(len(lengths)))
        if size < len(lengths):
            random.Random(f"{seed}/{schedule.phase}/{epoch}").shuffle(order)
        for start in range(0, len(order), size):
            samples = tuple(order[start : start + size])
            micro_batches = _cut(schedule, samples, lengths, data_parallel)
            mini_batches.append(MiniBatch(epoch, samples, micro_batches, schedule.phase))
    return Plan(schedule.phase, tuple(mini_batches))


def _refuse_impossible(schedule: Schedule, lengths: Sequence[int], data_parallel: int) -> None:
    phase, size = schedule.phase, schedule.mini_batch or len(lengths)
    if not lengths:
        raise ValueError(f"phase {phase}: the batch is empty")
    if data_parallel < 1:
        raise ValueError(f"phase {phase}: data-parallel size {data_parallel} must be at least 1")
    if len(lengths) % size:
        raise ValueError(f"phases.{phase}.mini_batch = {size} does not divide the batch of {len(lengths)} sequences")
    if size % data_parallel:
        raise ValueError(f"phase {phase}: the data-parallel size {data_parallel} does not divide {size} sequences")
    cap = schedule.max_tokens
    for sample, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"phase {phase}: sample {sample} has {length} tokens")
        if cap is not None and length > cap:
            raise ValueError(f"phases.{phase}.micro_batch.max_tokens = {cap}, but sample {sample} has {length} tokens")


def _cut(
    schedule: Schedule, samples: tuple[int, ...], lengths: Sequence[int], data_parallel: int
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Micro-batches of each data-parallel rank."""
    if schedule.sequences is not None:
        share, step = len(samples) // data_parallel, schedule.sequences
        ranks = [samples[rank * share : (rank + 1) * share] for rank in range(data_parallel)]
        return tuple(
            tuple(_micro_batch(own[start : start + step], lengths) for start in range(0, share, step)) for own in ranks
        )
    assert schedule.max_tokens is not None, "a schedule has one of sequences and max_tokens"
    bins = _pack(samples, lengths, schedule.max_tokens, data_parallel)
    return _deal([_micro_batch(tuple(sorted(held)), lengths) for held in bins], data_parallel)


def _micro_batch(samples: tuple[int, ...], lengths: Sequence[int]) -> MicroBatch:
    return MicroBatch(samples, sum(lengths[sample] for sample in samples))


def _pack(samples: Sequence[int], lengths: Sequence[int], cap: int, data_parallel: int) -> list[list[int]]:
    """Bins under the cap: a multiple of `data_parallel`, as few as the packing finds, none empty.

    Tries the smallest count first. Balance comes first (longest into the lightest bin); where that overflows, first-fit
    may still fit, because it fills bins instead of levelling them.
    """
    longest_first = sorted(samples, key=lambda sample: (-lengths[sample], sample))
    total = sum(lengths[sample] for sample in samples)
    alone = sum(2 * lengths[sample] > cap for sample in samples)  # no two of these share a bin
    count = max(-(-total // cap), alone, 1)
    count = -(-count // data_parallel) * data_parallel
    first_fit: list[list[int]] = []
    while True:
        balanced = _lightest_bin(longest_first, lengths, cap, count)
        if balanced is not None:
            return balanced
        first_fit = first_fit or _first_fit(longest_first, lengths, cap)
        if len(first_fit) <= count:
            return _spread(first_fit, lengths, count)
        count += data_parallel


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


def _deal(micro_batches: list[MicroBatch], data_parallel: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """The same number of micro-batches to every rank, heaviest first to the lightest rank that still takes one.

    Heaviest first is also the order they run in: if memory runs out, it does so in the first pass.
    """
    share = len(micro_batches) // data_parallel
    ranks: list[list[MicroBatch]] = [[] for _ in range(data_parallel)]
    open_ranks = [(0, rank) for rank in range(data_parallel)]
    for micro_batch in sorted(micro_batches, key=lambda one: (-one.tokens, one.samples)):
        tokens, rank = heapq.heappop(open_ranks)
        ranks[rank].append(micro_batch)
        if len(ranks[rank]) < share:
            heapq.heappush(open_ranks, (tokens + micro_batch.tokens, rank))
    return tuple(tuple(own) for own in ranks)
