"""What the recipe's `telemetry` has a rank write besides metrics.jsonl and its trace: sinks, profiles, memory snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from megarl.recipe import Recipe
from megarl.telemetry.clock import PhaseClock
from megarl.telemetry.out_of_memory import snapshot_on_out_of_memory
from megarl.telemetry.profile import StepProfiler
from megarl.telemetry.samples import remove_samples_after
from megarl.telemetry.sink import Row
from megarl.telemetry.sink_relay import Sinks, open_sinks


class Records:
    """Those of one rank; sinks are rank 0's."""

    def __init__(self, sinks: Sinks | None, profiler: StepProfiler) -> None:
        self._sinks, self._profiler = sinks, profiler

    def step(self, number: int) -> AbstractContextManager[None]:
        """The body is this step; it is profiled if it is to be."""
        return self._profiler.step(number)

    def figures(self) -> dict[str, int]:
        """What sinks failed to take since the last step."""
        return {} if self._sinks is None else self._sinks.figures()

    def write(self, number: int, line: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """Write the profile of the step that has ended; rank 0 hands its line of metrics.jsonl and its samples to the
        sinks."""
        if self._sinks is not None:
            self._sinks.write(number, line, rows)
        self._profiler.write()


@contextmanager
def recorded(recipe: Recipe, run: Path, rank: int, done: int, clock: PhaseClock, platform: Any) -> Iterator[Records]:
    """The records of a rank that goes on behind step `done`; leaving this closes them. `platform`:
    megarl.platform.current."""
    if rank == 0:
        remove_samples_after(run, done)
    with ExitStack() as stack:
        if recipe.telemetry.memory_snapshot:
            stack.enter_context(snapshot_on_out_of_memory(run, rank, platform))
        sinks = stack.enter_context(open_sinks(recipe, run, done)) if rank == 0 else None
        yield Records(sinks, StepProfiler(recipe.telemetry.profile, run, rank, clock, platform))
