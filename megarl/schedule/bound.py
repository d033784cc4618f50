"""How fast a rank can be at best: from the cost of its sequences and of the longest of them, before they are cut."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.models.layout import Layout
from megarl.schedule.cost import Cost, bubble_weight


@dataclass(frozen=True)
class RankModel:
    """A data-parallel rank with `count` micro-batches, as if sequences could be cut anywhere.

    The pipeline waits for the longest sequence `weight` (cost.bubble_weight) times, and never less than for micro-batches
    that are all alike. The time is a lower bound.
    """

    count: int
    weight: float
    per_micro_batch: float

    @classmethod
    def of(cls, count: int, layout: Layout, cost: Cost) -> RankModel:
        return cls(count, bubble_weight(layout), cost.per_micro_batch)

    @property
    def overhead(self) -> float:
        """Time that the micro-batches take however few tokens they hold."""
        return (self.count + self.weight) * self.per_micro_batch

    def even_room(self, time: float) -> float:
        """Cost of sequences that `time` has room for when all micro-batches are alike."""
        return (time - self.overhead) / (1 + self.weight / self.count)

    def room(self, time: float, longest: float) -> float:
        """Cost of sequences that `time` has room for beside, and with, a longest one of cost `longest`."""
        return min(self.even_room(time), time - self.overhead - self.weight * longest)


def least_time(before: Sequence[float], data: int, model: RankModel) -> float:
    """Time of the slowest of `data` ranks when sequences can be cut anywhere, to a part in 2000.

    `before[i]` is the cost of the i longest sequences together. Ranks take the sequences longest first, so that those
    which wait for long ones share them and the next rank starts as short as can be: no other way has more room.
    """
    total, longest = before[-1], before[1]
    even = total / data * (1 + model.weight / model.count) + model.overhead
    low = max(even, longest * (1 + model.weight) + model.overhead)
    high = even + low
    if not model.weight:
        return low
    while high > low * 1.0005:
        middle = (low + high) / 2
        low, high = (low, middle) if _covers(before, data, model, middle) else (middle, high)
    return high


def _covers(before: Sequence[float], data: int, model: RankModel, time: float) -> bool:
    """Whether `data` ranks take all sequences in `time`."""
    reached = 0.0
    for rank in range(data):
        number = bisect_right(before, reached)
        if number == len(before):
            return True
        room = model.room(time, before[number] - before[number - 1])
        if room == model.even_room(time):  # so it is for all shorter ones
            return reached + (data - rank) * room >= before[-1]
        reached += room
    return reached >= before[-1]
