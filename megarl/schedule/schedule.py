"""How one phase cuts its batch, before any batch is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.models.layout import Layout


@dataclass(frozen=True)
class Schedule:
    """The cut of one phase: exactly one of `sequences` and `max_tokens` per micro-batch.

    `max_tokens` is per data-parallel rank and counts alignment padding. `mini_batch` counts sequences over all
    data-parallel ranks; None (a forward phase) takes the whole batch. With `share_prompts` the sequences of a group that
    lie in one micro-batch have their prompt in it once.
    """

    phase: str
    sequences: int | None = None
    max_tokens: int | None = None
    mini_batch: int | None = None
    epochs: int = 1
    share_prompts: bool = False

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


def padded(lengths: Sequence[int], layout: Layout) -> list[int]:
    """Slots of sequences inside a micro-batch: their tokens and the padding that their context-parallel split needs."""
    multiple = layout.sequence_multiple
    return [-(-length // multiple) * multiple for length in lengths]


def worst_case_micro_batches(schedule: Schedule, num_sequences: int, layout: Layout, max_sequence_tokens: int) -> int:
    """Most micro-batches one data-parallel rank can get for one mini-batch (forward phases: for the batch).

    Under `sequences` that is their exact number. Under `max_tokens` it is what sequences of `max_sequence_tokens` need and
    one more, which may balance better; with a pipeline one for each sequence, as small ones shorten the bubble.
    """
    share, step = (schedule.mini_batch or num_sequences) // layout.data, layout.micro_batch_step
    if schedule.sequences is not None:
        return ceil(share, schedule.sequences)
    if layout.pipeline > 1:
        return share // step * step
    return min(share, fewest_for_longest(schedule, share, layout, max_sequence_tokens) + 1)


def fewest_for_longest(schedule: Schedule, share: int, layout: Layout, longest: int) -> int:
    """Micro-batches of a rank that always suffice: those for sequences that are all of the longest length."""
    assert schedule.max_tokens is not None, "a schedule has one of sequences and max_tokens"
    cap = schedule.max_tokens // layout.micro_batch_multiple * layout.micro_batch_multiple
    each = max(1, cap // padded([longest], layout)[0])
    return ceil(ceil(share, each), layout.micro_batch_step) * layout.micro_batch_step


def in_micro_batch(tokens: int, layout: Layout) -> int:
    """Slots of a micro-batch that holds one sequence of `tokens`."""
    return ceil(padded([tokens], layout)[0], layout.micro_batch_multiple) * layout.micro_batch_multiple


def bubble_share(num_micro_batches: int, pipeline: int, virtual_pipeline: int = 1) -> float:
    """Share of a pipeline's time that its stages idle while it fills and drains, micro-batches being alike.

    (p - 1) / (v * m + p - 1): 1F1B, interleaved with v chunks a stage (Narayanan et al. 2021, arXiv 2104.04473, 2.2).
    """
    return (pipeline - 1) / (virtual_pipeline * num_micro_batches + pipeline - 1)


def ceil(count: int, unit: int) -> int:
    """Units that hold `count`."""
    return -(-count // unit)
