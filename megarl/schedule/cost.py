"""What sequences, micro-batches and pipeline runs cost, in token-equivalents: the time of one token without attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.family import ModelShape
from megarl.reshard.boxes import Layout

# An accelerator that does 300 operations in the time it reads one byte (H100, H200, B200 in bf16) needs as long to read
# the weights once as to multiply them with 300 tokens. Launches and sends come on top, overlap of the two takes off.
_PER_MICRO_BATCH = 128.0


@dataclass(frozen=True)
class Cost:
    """Estimated cost of a sequence in token-equivalents: length * (1 + quadratic * length); attention is the quadratic part.

    `per_micro_batch` is what every micro-batch costs however few tokens it holds, in token-equivalents.
    """

    quadratic: float = 0.0
    per_micro_batch: float = _PER_MICRO_BATCH

    @classmethod
    def of(cls, shape: ModelShape) -> Cost:
        """The cost of a model's layers, from their operations.

        A token passes each matrix of a layer once (2 operations a weight), of its experts those it takes.
        Causal attention of `length` tokens multiplies
        queries with keys and weights with values: 2 * 2 * length^2 / 2 operations a head and head dimension. The head is
        left out: it runs on completion tokens only and adds the same to each of them.
        """
        heads, groups = shape.heads * shape.head_dim, shape.groups * shape.head_dim
        rows = sum(shape.active_rows(layer) for layer in range(shape.num_layers)) / shape.num_layers
        weights = shape.hidden * (2 * heads + 2 * groups + rows)
        return cls(quadratic=heads / weights)

    def sequence(self, length: int) -> float:
        """Cost of one sequence of `length` tokens."""
        return length * (1.0 + self.quadratic * length)


def bubble_weight(layout: Layout) -> float:
    """How many times the costliest micro-batch of a pipeline run is waited for, beside its own time.

    Stages alike and micro-batches of costs c: a run takes sum(c) + (p - 1) * max(c) (a proportionate flow shop, Pinedo,
    Scheduling, 6.1). v chunks a stage divide the waiting by v.
    """
    return (layout.pipeline - 1) / layout.virtual_pipeline


def run_times(costs: Sequence[float], runs: Sequence[int], layout: Layout, cost: Cost) -> tuple[float, float]:
    """(time, the bubble in it) of one data-parallel rank whose micro-batches cost `costs`, in token-equivalents.

    `runs` counts the micro-batches of each pipeline run. Both times are per model: divide by the stages for a device's.
    """
    bubble, start = 0.0, 0
    for count in runs:
        bubble += bubble_weight(layout) * (max(costs[start : start + count]) + cost.per_micro_batch)
        start += count
    return sum(costs) + len(costs) * cost.per_micro_batch + bubble, bubble
