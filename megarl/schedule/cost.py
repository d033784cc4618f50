"""Estimate the cost of sequences and micro-batches, in token-equivalents: the time of one token without attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.models.layout import Layout

# An accelerator that does 300 operations in the time of reading one byte (H100, H200, B200 in bf16) reads the weights once
# in the same time in which it multiplies them with 300 tokens. Launches and sends add to this time; overlap reduces it.
_PER_MICRO_BATCH = 128.0


@dataclass(frozen=True)
class Cost:
    """The estimated cost of a sequence in token-equivalents: its tokens, and `per_pair` for each pair in attention.

    `windows` are (tokens, cost of a pair) of layers that see only the last tokens. `per_micro_batch` is the fixed cost of a
    micro-batch. A model's cost comes from its FLOPs: `megarl.planner.flops.sequence_cost`.
    """

    per_pair: float = 0.0
    per_micro_batch: float = _PER_MICRO_BATCH
    windows: tuple[tuple[int, float], ...] = ()

    def sequence(self, length: int) -> float:
        """Return the cost of a sequence of `length` tokens."""
        cost = length + self.per_pair * pairs(length)
        return cost + sum(per_pair * pairs(length, window) for window, per_pair in self.windows)


def pairs(length: int, window: int = 0) -> int:
    """Return the number of token pairs in causal attention over `length` tokens. A token sees the last `window` tokens; 0
    means all."""
    seen = min(window or length, length)  # tokens that the last token sees; the first tokens see 1, 2, ... tokens
    return seen * (seen + 1) // 2 + (length - seen) * seen


def bubble_weight(layout: Layout) -> float:
    """Return how many times a pipeline waits for its costliest micro-batch, in addition to that micro-batch's own time.

    With p equal stages and micro-batches of costs c, the pipeline takes sum(c) + (p - 1) * max(c) (a proportionate flow
    shop, Pinedo, Scheduling, 6.1). v chunks per stage divide the wait by v.
    """
    return (layout.pipeline - 1) / layout.virtual_pipeline


def ranks_in_step(layout: Layout) -> int:
    """Return the number of data-parallel ranks that share one set of experts. Such ranks exchange tokens in every layer, so
    they run each micro-batch together."""
    return max(1, -(-layout.expert_tensor_size * layout.expert // (layout.tensor * layout.context)))


def in_step(costs: Sequence[Sequence[float]], layout: Layout) -> list[list[float]]:
    """Return `costs` [data-parallel rank][micro-batch] with waits: each cost becomes the highest cost of the micro-batches
    that run together."""
    size = ranks_in_step(layout)
    groups = [costs[start : start + size] for start in range(0, len(costs), size)]
    return [[max(together) for together in zip(*group, strict=True)] for group in groups for _ in group]


def run_times(costs: Sequence[float], layout: Layout, cost: Cost) -> tuple[float, float]:
    """Return (time, bubble within the time) of one data-parallel rank with micro-batches of cost `costs`, in
    token-equivalents.

    Both times are for the whole model: divide by the number of stages for the time of a device.
    """
    bubble = bubble_weight(layout) * (max(costs) + cost.per_micro_batch)
    return sum(costs) + len(costs) * cost.per_micro_batch + bubble, bubble
