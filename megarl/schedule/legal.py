"""Which schedules a layout can run."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.models.layout import Layout
from megarl.schedule.schedule import Schedule, ceil, fewest_for_longest, in_micro_batch, padded


def violations(schedule: Schedule, num_sequences: int, layout: Layout, max_sequence_tokens: int) -> list[str]:
    """What stands against planning every batch of `num_sequences` sequences of up to `max_sequence_tokens`.

    Each line has the dotted key, both numbers and the nearest legal value. No line: plan_phase plans every such batch.
    """
    phase, data, step = schedule.phase, layout.data, layout.micro_batch_step
    size = schedule.mini_batch or num_sequences
    share = size // data
    key = f"phases.{phase}.mini_batch = {size}" if schedule.mini_batch else f"phases.{phase}: a batch of {size} sequences"
    found = []
    if num_sequences % size:
        legal = [n for n in range(data, num_sequences + 1, data) if num_sequences % n == 0]
        found.append(f"{key} does not divide the batch of {num_sequences} sequences{_nearest(legal, size)}")
    if size % data:
        legal = [max(1, share) * data, (share + 1) * data]
        found.append(f"{key} must be a multiple of the data-parallel size {data}{_nearest(legal, size)}")
    elif share < step:
        found.append(
            f"{key} is {share} for each of {data} data-parallel ranks, but the virtual pipeline runs micro-batches by "
            f"{step}{_nearest([data * step], size)}"
        )
    elif schedule.sequences is not None and ceil(share, schedule.sequences) % step:
        legal = [n for n in range(1, share + 1) if ceil(share, n) % step == 0]
        way_out = _nearest(legal, schedule.sequences) or "; no number of sequences gives a legal count: use max_tokens"
        found.append(
            f"phases.{phase}.micro_batch.sequences = {schedule.sequences} cuts {share} sequences a rank into "
            f"{ceil(share, schedule.sequences)} micro-batches, but the virtual pipeline runs them by {step}{way_out}"
        )
    elif schedule.max_tokens is not None:
        found += _cap_violations(schedule, schedule.max_tokens, share, layout, max_sequence_tokens)
    return found


def _cap_violations(schedule: Schedule, cap: int, share: int, layout: Layout, longest: int) -> list[str]:
    key = f"phases.{schedule.phase}.micro_batch.max_tokens = {cap}"
    needed, step = in_micro_batch(longest, layout), layout.micro_batch_step
    if cap < needed:
        padding = f" ({needed} with padding)" if needed > longest else ""
        return [f"{key} is below the longest sequence of {longest} tokens{padding}{_nearest([needed], cap)}"]
    count, most = fewest_for_longest(schedule, share, layout, longest), share // step * step
    if count <= most:
        return []
    legal = in_micro_batch(ceil(share, most) * padded([longest], layout)[0], layout)
    return [
        f"{key} can need {count} micro-batches a rank, but {share} sequences a rank make at most {most}, a multiple of "
        f"{step} for the virtual pipeline{_nearest([legal], cap)}"
    ]


def _nearest(legal: Sequence[int], value: int) -> str:
    return f"; the nearest legal value is {min(legal, key=lambda one: abs(one - value))}" if legal else ""
