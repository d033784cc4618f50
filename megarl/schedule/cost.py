"""What sequences, micro-batches and pipeline runs cost, in token-equivalents: the time of one token without attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.models.layout import Layout

# An accelerator that does 300 operations in the time it reads one byte (H100, H200, B200 in bf16) needs as long to read
# the weights once as to multiply them with 300 tokens. Launches and sends come on top, overlap of the two takes off.
_PER_MICRO_BATCH = 128.0


@dataclass(frozen=True)
class Cost:
    """Estimated cost of a sequence in token-equivalents: its tokens, and `per_pair` for each pair of tokens that meet.

    `windows` are (tokens, cost of a pair) of layers that see only the last tokens. `per_micro_batch` is what every
    micro-batch costs however few tokens it holds. A model's cost comes from its FLOPs: `megarl.planner.flops.sequence_cost`.
    """

    per_pair: float = 0.0
    per_micro_batch: float = _PER_MICRO_BATCH
    windows: tuple[tuple[int, float], ...] = ()

    def sequence(self, length: int) -> float:
        """Cost of one sequence of `length` tokens."""
        cost = length + self.per_pair * pairs(length)
        return cost + sum(per_pair * pairs(length, window) for window, per_pair in self.windows)


def pairs(length: int, window: int = 0) -> int:
    """Pairs of tokens that meet in causal attention over `length` tokens, each seeing the last `window`; 0 for all."""
    seen = min(window or length, length)  # by the last token; each token before it sees one less, up to the window
    return seen * (seen + 1) // 2 + (length - seen) * seen


def bubble_weight(layout: Layout) -> float:
    """How many times the costliest micro-batch of a pipeline run is waited for, beside its own time.

    Stages alike and micro-batches of costs c: a run takes sum(c) + (p - 1) * max(c) (a proportionate flow shop, Pinedo,
    Scheduling, 6.1). v chunks a stage divide the waiting by v.
    """
    return (layout.pipeline - 1) / layout.virtual_pipeline


def ranks_in_step(layout: Layout) -> int:
    """Data-parallel ranks that one set of experts is spread over: they exchange tokens in every layer, and so run each
    micro-batch together."""
    return max(1, -(-layout.expert_tensor_size * layout.expert // (layout.tensor * layout.context)))


def in_step(costs: Sequence[Sequence[float]], layout: Layout) -> list[list[float]]:
    """`costs` [data-parallel rank][micro-batch] with what a rank waits for: the costliest micro-batch of those that run
    together."""
    size = ranks_in_step(layout)
    groups = [costs[start : start + size] for start in range(0, len(costs), size)]
    return [[max(together) for together in zip(*group, strict=True)] for group in groups for _ in group]


def run_times(costs: Sequence[float], layout: Layout, cost: Cost) -> tuple[float, float]:
    """(time, the bubble in it) of one data-parallel rank whose micro-batches cost `costs`, in token-equivalents.

    Both times are per model: divide by the stages for a device's.
    """
    bubble = bubble_weight(layout) * (max(costs) + cost.per_micro_batch)
    return sum(costs) + len(costs) * cost.per_micro_batch + bubble, bubble
