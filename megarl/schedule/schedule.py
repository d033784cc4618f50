"""How one phase splits its batch, and which layouts can run that, before any batch is known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megarl.models.layout import Layout


@dataclass(frozen=True)
class Schedule:
    """How one phase splits its batch: exactly one of `sequences` and `max_tokens` per micro-batch.

    `max_tokens` is per data-parallel rank and counts alignment padding. `mini_batch` counts rollouts over all data-parallel
    ranks; None (a forward phase) takes the whole batch. With `share_prompts` a prompt runs once for the sequences of a
    micro-batch that begin with it. `together`: a rollout has at most so many segments, which one micro-batch must hold; with
    1 the segments of a rollout may run in different micro-batches.
    """

    phase: str
    sequences: int | None = None
    max_tokens: int | None = None
    mini_batch: int | None = None
    epochs: int = 1
    share_prompts: bool = False
    together: int = 1

    def __post_init__(self) -> None:
        assert (self.sequences is None) != (self.max_tokens is None), f"phases.{self.phase}: one rule, as the recipe has it"

    @property
    def is_update(self) -> bool:
        """Update phases have mini-batches, forward phases have none."""
        return self.mini_batch is not None


def padded(lengths: Sequence[int], layout: Layout) -> list[int]:
    """Slots of sequences inside a micro-batch: their tokens and the padding that context parallelism needs."""
    multiple = layout.sequence_multiple
    return [ceil(length, multiple) * multiple for length in lengths]


def in_micro_batch(tokens: int, layout: Layout, num: int = 1) -> int:
    """Slots of a micro-batch that holds `num` sequences of `tokens`."""
    return ceil(num * padded([tokens], layout)[0], layout.micro_batch_multiple) * layout.micro_batch_multiple


def worst_case_micro_batches(
    schedule: Schedule, num_rollouts: int, layout: Layout, max_sequence_tokens: int, segments: int = 1
) -> int:
    """Most micro-batches that one data-parallel rank can get for one mini-batch (forward phases: for the batch) of rollouts
    with at most `segments` segments.

    Under `sequences` that is their exact number if every rollout has all its segments. Under `max_tokens` it is what
    sequences of `max_sequence_tokens` need and one more, which may balance better; with a pipeline one for each sequence, as
    small ones shorten the bubble.
    """
    share, step = (schedule.mini_batch or num_rollouts) // layout.data * segments, layout.micro_batch_step
    if schedule.sequences is not None:
        return ceil(ceil(share, schedule.sequences), step) * step
    if layout.pipeline > 1:
        return share // step * step
    return min(share, _fewest_for_longest(schedule, share, layout, max_sequence_tokens) + 1)


def _fewest_for_longest(schedule: Schedule, share: int, layout: Layout, longest: int) -> int:
    """Micro-batches of a rank that always suffice: those for sequences that are all of the longest length."""
    assert schedule.max_tokens is not None, "a schedule has one of sequences and max_tokens"
    cap = schedule.max_tokens // layout.micro_batch_multiple * layout.micro_batch_multiple
    per_micro_batch = max(1, cap // (padded([longest], layout)[0] * schedule.together))
    return ceil(ceil(share, per_micro_batch), layout.micro_batch_step) * layout.micro_batch_step


def bubble_share(num_micro_batches: int, pipeline: int, virtual_pipeline: int = 1) -> float:
    """Share of a pipeline's time that its stages idle while it fills and drains, for equal micro-batches.

    (p - 1) / (v * m + p - 1): 1F1B, interleaved with v chunks a stage (Narayanan et al. 2021, arXiv 2104.04473, 2.2).
    """
    return (pipeline - 1) / (virtual_pipeline * num_micro_batches + pipeline - 1)


class ScheduleFault(NamedTuple):
    """A number that a layout cannot run, and the nearest that it can. `field` is a key below `phases.<phase>`, or "" for the
    whole batch."""

    phase: str
    field: str
    value: int
    rule: str
    nearest: str = ""

    def __str__(self) -> str:
        key = (
            f"phases.{self.phase}.{self.field} = {self.value}"
            if self.field
            else f"phases.{self.phase}: a batch of {self.value} rollouts"
        )
        return f"{key} {self.rule}" + (f"; the nearest legal value is {self.nearest}" if self.nearest else "")


def violations(schedule: Schedule, num_rollouts: int, layout: Layout, max_sequence_tokens: int) -> list[ScheduleFault]:
    """List what keeps a batch of `num_rollouts` rollouts from being planned, whose segments have up to
    `max_sequence_tokens`.

    An empty list means that `plan_phase` plans every such batch.
    """
    phase, data, step = schedule.phase, layout.data, layout.micro_batch_step
    size, share = schedule.mini_batch or num_rollouts, (schedule.mini_batch or num_rollouts) // data
    field = "mini_batch" if schedule.mini_batch else ""
    runs_by = f"the virtual pipeline runs micro-batches by its {step} stages"
    faults = []
    if num_rollouts % size or size % data or share < step:
        if num_rollouts % size:
            rule = f"must divide the {num_rollouts} rollouts of a step"
        elif size % data:
            rule = f"must be a multiple of the data-parallel size {data}"
        else:
            rule = f"gives each of {data} data-parallel ranks {share}, and {runs_by}"
        legal = [max(step, share) * data, max(step, share + 1) * data]
        if schedule.mini_batch:
            legal = [n for n in _divisors(num_rollouts) if n % data == 0 and n >= data * step] or legal
        faults.append(ScheduleFault(phase, field, size, rule, nearest_legal(legal, size)))
    elif schedule.sequences is not None and schedule.sequences < schedule.together:
        rule = f"is below the {schedule.together} segments of a rollout, whose tokens share one loss"
        faults.append(ScheduleFault(phase, "micro_batch.sequences", schedule.sequences, rule, str(schedule.together)))
    elif schedule.sequences is not None and ceil(share, schedule.sequences) % step:
        legal = [n for n in range(1, share + 1) if ceil(share, n) % step == 0]
        rule = f"divides {share} sequences a rank into {ceil(share, schedule.sequences)} micro-batches, and {runs_by}"
        nearest = nearest_legal(legal, schedule.sequences)
        rule += "" if nearest else "; no number of sequences gives a legal count: use max_tokens"
        faults.append(ScheduleFault(phase, "micro_batch.sequences", schedule.sequences, rule, nearest))
    elif schedule.max_tokens is not None:
        together, most = schedule.together, share // step * step
        cap, needed = schedule.max_tokens, in_micro_batch(max_sequence_tokens, layout, together)
        if cap < needed:
            padding = f", padded to {needed}" if needed > max_sequence_tokens * together else ""
            rule = f"is below the longest sequence of {max_sequence_tokens} tokens{padding}"
            if together > 1:
                rule = f"is below the {together} segments of a rollout, whose tokens share one loss, {needed} tokens in all"
            faults.append(ScheduleFault(phase, "micro_batch.max_tokens", cap, rule, str(needed)))
        elif _fewest_for_longest(schedule, share, layout, max_sequence_tokens) > most:
            rule = f"can need more than {most} micro-batches for {share} sequences a rank, and {runs_by}"
            each = ceil(share, most) * padded([max_sequence_tokens], layout)[0] * together
            faults.append(ScheduleFault(phase, "micro_batch.max_tokens", cap, rule, str(in_micro_batch(each, layout))))
    return faults


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return [*small, *(number // n for n in small)]


def nearest_legal(legal: Iterable[int], value: int) -> str:
    """The legal number nearest to the value, the smaller of two; "" without a legal number."""
    return str(min(legal, key=lambda number: (abs(number - value), number), default=""))


def ceil(count: int, unit: int) -> int:
    """Units that hold `count`."""
    return -(-count // unit)
