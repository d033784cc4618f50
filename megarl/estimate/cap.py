"""The largest `max_tokens` whose peak fits a device."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.estimate.memory import peak
from megarl.estimate.roles import Role
from megarl.schedule.schedule import in_micro_batch

# Share of a device that nothing may be planned for: what the caching allocator loses to fragmentation, the CUDA context and
# the collectives' buffers (each a few hundred MiB to a few GiB of an 80 GiB device), and the model's own error.
RESERVE = 0.1


def largest_cap(
    roles: Sequence[Role],
    running: Role,
    budget_bytes: int,
    *,
    update: bool,
    longest: int,
    num_sequences: int,
    max_in_flight: int | None,
) -> int | None:
    """The largest `max_tokens` of a phase of `running` whose peak is at most `budget_bytes`; None where not even one
    sequence of `longest` tokens, padded, fits.

    The worst case counts: every slot predicts a token, and as many micro-batches are held as the pipeline ever holds. No
    more than `num_sequences` sequences at full length on one data-parallel rank are asked for. Raises what `peak` raises.
    """

    def fits(cap: int) -> bool:
        memory = peak(
            roles,
            running,
            update=update,
            slots=cap,
            head_tokens=cap,
            longest=longest,
            # A second micro-batch starts while results of the first are still held.
            num_micro_batches=max(2, running.layout.pipeline),
            max_in_flight=max_in_flight,
        )
        return memory.total <= budget_bytes

    low = in_micro_batch(longest, running.layout)
    high = low * num_sequences
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
