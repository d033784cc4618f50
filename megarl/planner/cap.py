"""The largest `max_tokens` whose peak fits a device."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.planner.memory import most_held, peak
from megarl.planner.roles import Role
from megarl.schedule.schedule import Schedule, in_micro_batch
from megarl.schedule.share import most_rows_behind_prompts

# Share of a device that nothing may be planned for: the CUDA context and the collectives' buffers (each a few hundred MiB to
# a few GiB of an 80 GiB device), and the model's own error.
RESERVE = 0.1


def usable_bytes(device_bytes: int) -> int:
    """A device without the reserve."""
    return int(device_bytes * (1 - RESERVE))


def largest_cap(
    roles: Sequence[Role],
    running: Role,
    schedule: Schedule,
    budget_bytes: int,
    *,
    num_sequences: int,
    longest: int,
    longest_prompt: int,
    group_size: int,
) -> int | None:
    """The largest `max_tokens` under which the peak of the schedule's phase, in which `running` works, is at most
    `budget_bytes`: a multiple of what the layout pads micro-batches to. None where not even one sequence of `longest`
    tokens, padded, fits.

    The worst case counts: every slot predicts a token, and as many micro-batches are held as the pipeline ever holds; a
    schedule that shares prompts has groups of `group_size` one-token completions of prompts of `longest_prompt` tokens. No
    more than all sequences of a mini-batch (of the batch of `num_sequences`) at full length on one data-parallel rank are
    asked for. The schedule's own cap counts for nothing. Raises what `peak` raises.
    """

    size = schedule.mini_batch or num_sequences

    def fits(cap: int) -> bool:
        memory = peak(
            roles,
            running,
            update=schedule.mini_batch is not None,
            slots=cap,
            head_tokens=cap,
            longest=longest,
            # A second micro-batch starts while results of the first are still held.
            num_micro_batches=most_held(running.layout),
            copied_rows=most_rows_behind_prompts(cap, size, longest, group_size, longest_prompt)
            if schedule.share_prompts
            else 0,
        )
        return memory.total <= budget_bytes

    low = in_micro_batch(longest, running.layout)
    high = low * size
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low // running.layout.micro_batch_multiple * running.layout.micro_batch_multiple
