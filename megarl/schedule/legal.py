"""Which schedules a layout can run: the one law that `megarl check` and `plan_phase` share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megarl.models.layout import Layout
from megarl.schedule.schedule import Schedule, ceil, fewest_for_longest, in_micro_batch, padded


class ScheduleFault(NamedTuple):
    """A number that a layout cannot run, and the nearest that it can: `field` is a key below `phases.<phase>`, or "" for the
    batch as a whole."""

    phase: str
    field: str
    value: int
    rule: str
    nearest: str = ""

    def __str__(self) -> str:
        key = (
            f"phases.{self.phase}.{self.field} = {self.value}"
            if self.field
            else f"phases.{self.phase}: a batch of {self.value} sequences"
        )
        return f"{key} {self.rule}" + (f"; the nearest legal value is {self.nearest}" if self.nearest else "")


def violations(schedule: Schedule, num_sequences: int, layout: Layout, max_sequence_tokens: int) -> list[ScheduleFault]:
    """List what keeps a batch of `num_sequences` sequences of up to `max_sequence_tokens` from being planned.

    An empty list means that `plan_phase` plans every such batch.
    """
    phase, data, step = schedule.phase, layout.data, layout.micro_batch_step
    size, share = schedule.mini_batch or num_sequences, (schedule.mini_batch or num_sequences) // data
    field = "mini_batch" if schedule.mini_batch else ""
    runs_by = f"the virtual pipeline runs micro-batches by its {step} stages"
    if schedule.mini_batch:
        legal = [n for n in range(data * step, num_sequences + 1, data) if num_sequences % n == 0]
    else:
        legal = [max(step, share) * data, max(step, share + 1) * data]
    faults = []
    if num_sequences % size:
        rule = f"must divide the {num_sequences} sequences of a step"
        faults.append(ScheduleFault(phase, field, size, rule, _nearest(legal, size)))
    elif size % data:
        rule = f"must be a multiple of the data-parallel size {data}"
        legal = legal or [max(step, share) * data, max(step, share + 1) * data]
        faults.append(ScheduleFault(phase, field, size, rule, _nearest(legal, size)))
    elif share < step:
        rule = f"gives each of {data} data-parallel ranks {share}, and {runs_by}"
        faults.append(ScheduleFault(phase, field, size, rule, _nearest(legal, size)))
    elif schedule.sequences is not None and ceil(share, schedule.sequences) % step:
        legal = [n for n in range(1, share + 1) if ceil(share, n) % step == 0]
        rule = f"divides {share} sequences a rank into {ceil(share, schedule.sequences)} micro-batches, and {runs_by}"
        nearest = _nearest(legal, schedule.sequences)
        rule += "" if nearest else "; no number of sequences gives a legal count: use max_tokens"
        faults.append(ScheduleFault(phase, "micro_batch.sequences", schedule.sequences, rule, nearest))
    elif schedule.max_tokens is not None:
        cap, needed, most = schedule.max_tokens, in_micro_batch(max_sequence_tokens, layout), share // step * step
        if cap < needed:
            padding = f", padded to {needed}" if needed > max_sequence_tokens else ""
            rule = f"is below the longest sequence of {max_sequence_tokens} tokens{padding}"
            faults.append(ScheduleFault(phase, "micro_batch.max_tokens", cap, rule, str(needed)))
        elif fewest_for_longest(schedule, share, layout, max_sequence_tokens) > most:
            rule = f"can need more than {most} micro-batches for {share} sequences a rank, and {runs_by}"
            each = ceil(share, most) * padded([max_sequence_tokens], layout)[0]
            faults.append(ScheduleFault(phase, "micro_batch.max_tokens", cap, rule, str(in_micro_batch(each, layout))))
    return faults + _in_flight_faults(schedule, layout)


def _in_flight_faults(schedule: Schedule, layout: Layout) -> list[ScheduleFault]:
    phase, field, in_flight = schedule.phase, "max_micro_batches_in_flight", schedule.max_micro_batches_in_flight
    if in_flight is None:
        return []
    if layout.virtual_pipeline > 1:
        rule = f"needs virtual_pipeline = 1, not {layout.virtual_pipeline}; remove one of the two"
        return [ScheduleFault(phase, field, in_flight, rule)]
    if in_flight >= layout.pipeline:
        rule = f"has no effect: a pipeline of {layout.pipeline} holds at most {layout.pipeline} micro-batches"
        nearest = str(layout.pipeline - 1) if layout.pipeline > 1 else f"remove phases.{phase}.{field}"
        return [ScheduleFault(phase, field, in_flight, rule, nearest)]
    return []


def _nearest(legal: Sequence[int], value: int) -> str:
    return str(min(legal, key=lambda number: abs(number - value))) if legal else ""
