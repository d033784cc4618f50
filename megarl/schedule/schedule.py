"""How one phase cuts its batch, before any batch is known."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The cut of one phase: exactly one of `sequences` and `max_tokens` per micro-batch.

    `mini_batch` counts sequences over all data-parallel ranks; None (a forward phase) takes the whole batch.
    """

    phase: str
    sequences: int | None = None
    max_tokens: int | None = None
    mini_batch: int | None = None
    epochs: int = 1

    def __post_init__(self) -> None:
        if (self.sequences is None) == (self.max_tokens is None):
            raise ValueError(
                f"phases.{self.phase}.micro_batch: exactly one of sequences and max_tokens, "
                f"not sequences={self.sequences} and max_tokens={self.max_tokens}"
            )
        for name in ("sequences", "max_tokens", "mini_batch", "epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"phases.{self.phase}: {name} = {value} must be at least 1")


def worst_case_micro_batches(schedule: Schedule, num_sequences: int, data_parallel: int, max_sequence_tokens: int) -> int:
    """Most micro-batches one data-parallel rank can get for one mini-batch (forward phases: for the batch).

    The worst case is every sequence at `max_sequence_tokens`: shorter ones never need more micro-batches.
    """
    size = schedule.mini_batch or num_sequences
    if schedule.sequences is not None:
        return _ceil(size // data_parallel, schedule.sequences)
    assert schedule.max_tokens is not None, "a schedule has one of sequences and max_tokens"
    per_micro_batch = max(1, schedule.max_tokens // max_sequence_tokens)
    return _ceil(_ceil(size, per_micro_batch), data_parallel)


def bubble_share(num_micro_batches: int, pipeline: int) -> float:
    """Share of a pipeline's time that its stages idle while it fills and drains (1F1B: (p-1)/(m+p-1))."""
    return (pipeline - 1) / (num_micro_batches + pipeline - 1)


def _ceil(count: int, unit: int) -> int:
    return -(-count // unit)
