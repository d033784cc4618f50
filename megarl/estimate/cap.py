"""The largest `max_tokens` whose peak fits a device."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.estimate.memory import peak
from megarl.estimate.roles import Role

# Share of a device that no estimate may plan for: the caching allocator's fragmentation, the CUDA context, the buffers of
# collectives and the 10 % that the memory model may be off.
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
    """The largest `max_tokens` of a phase of `running` whose peak fits into `budget_bytes`; None where not even one
    sequence of `longest` tokens fits.

    The worst case counts: every token of a micro-batch is predicted (head_tokens = slots) and the pipeline is full. More
    than all `num_sequences` sequences of the phase's batch at full length is never asked for.
    """

    def fits(cap: int) -> bool:
        unit = running.layout.micro_batch_multiple
        slots = -(-cap // unit) * unit
        memory = peak(
            roles,
            running,
            update=update,
            slots=slots,
            head_tokens=cap,
            longest=longest,
            # A second one starts while results of the first are still held.
            num_micro_batches=max(2, running.layout.pipeline),
            max_in_flight=max_in_flight,
        )
        return memory.total <= budget_bytes

    low, high = longest, max(longest, longest * num_sequences)
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
