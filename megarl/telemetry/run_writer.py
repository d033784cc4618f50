"""Write a rank's metrics, evaluations, traces and profiles step by step, and the progress line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from platform import node as host_name
from typing import Any, NamedTuple

import torch

from megarl.platform import current as platform
from megarl.platform.diagnostics import TorchRanges, is_out_of_memory
from megarl.recipe import Recipe
from megarl.recipe.telemetry_section import ProfileSection
from megarl.telemetry.clock import PhaseClock, StepTimes
from megarl.telemetry.disk import write_whole
from megarl.telemetry.metrics_file import MetricsWriter
from megarl.telemetry.progress import ProgressLine
from megarl.telemetry.report_findings import totals
from megarl.telemetry.report_run import read_run
from megarl.telemetry.run_directory import RunDirectory
from megarl.telemetry.sinks import Row, Sinks
from megarl.telemetry.time_metrics import Sizes, TimeMetrics
from megarl.telemetry.trace import EngineReport, TraceWriter, clock_offsets, write_engines

CLOCK_READINGS = 5
Gather = Callable[[Any], list[Any]]  # a value of every rank, on every rank


class EvaluationResult(NamedTuple):
    """An evaluation: its metrics, one line for a person, and a JSON line for each prompt that was answered."""

    metrics: dict[str, float]
    summary: str
    table: str = ""


class Profiler:
    """Profiles the steps of one rank that `section` names; `platform` is megarl.platform.current."""

    def __init__(self, section: ProfileSection | None, run: Path, rank: int, clock: PhaseClock, platform: Any) -> None:
        self._section = section if section is not None and rank in section.ranks else None
        self._clock, self._platform = clock, platform
        self._folder, self._name = run / "profile", f"rank-{rank:05d}.json.gz"
        self._profile: Any = None  # of the last step, not yet written

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the body, step `number`, if the recipe says so, with phases and spans as ranges. Enter between phases."""
        section = self._section
        if section is None or number not in section.steps:
            yield
        elif section.kind == "nsight":
            with self._platform.capture() as ranges, self._clock.showing(ranges):
                yield
        else:
            self._profile = torch.profiler.profile(activities=self._platform.profile_activities)
            with self._profile, self._clock.showing(TorchRanges()):
                yield

    def write(self, number: int) -> None:
        """Write the profile of the last step, if there is one."""
        if self._profile is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._folder / f"step-{number:06d}-{self._name}"))
            self._profile = None


@contextmanager
def snapshot_on_out_of_memory(run: Path, rank: int, platform: Any) -> Iterator[None]:
    """Record the GPU allocator's history within this context. At an out-of-memory error write it to
    `memory/rank-00000.pickle`, and add the path to the error as a note. Nothing on a CPU."""
    platform.record_allocations()
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            path = run / "memory" / f"rank-{rank:05d}.pickle"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if platform.write_allocations(path) is not None:
                    error.add_note(f"what held the memory of rank {rank} is in {path}, for pytorch.org/memory_viz")
            except (OSError, RuntimeError) as failure:  # must not hide the out-of-memory error
                error.add_note(f"no memory snapshot of rank {rank}: {failure}")
        raise


class RunWriter:
    """Writes the files of one rank; rank 0 has most of them. Opening the files drops the steps that a resumed run
    repeats."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunDirectory,
        rank: int,
        done: int | None,
        gather: Gather,
        progress: ProgressLine,
        profiler: Profiler,
        sinks: Sinks,
        measures: TimeMetrics,
    ) -> None:
        """Open the files. `done` is the step of the checkpoint that the run resumes from, None for a new run. Collective."""
        self._recipe, self._run, self._gather = recipe, run, gather
        self._progress, self._sinks, self._measures = progress, sinks, measures
        self.profiler = profiler
        evaluates = any(part is not None and part.evaluation is not None for part in (recipe, recipe.supervised))
        self._trace: TraceWriter | None = None
        if recipe.run.trace != "none":
            readings = []  # of this rank's clock right after common barriers, to write traces on rank 0's clock
            for _ in range(CLOCK_READINGS):
                gather(None)
                readings.append(time.time())
            self._trace = TraceWriter(run.path, rank, host_name(), clock_offsets(gather(readings))[rank])
        self._metrics = MetricsWriter(run.metrics) if rank == 0 else None
        self._evaluations = MetricsWriter(run.evaluations) if rank == 0 and evaluates else None
        self._start: dict[str, Any] = {}
        if self._metrics is not None:
            self._metrics.truncate_after(done or 0)
            run.forget_tables("samples", done or 0)
        if self._evaluations is not None:
            last = -1 if done is None else done
            self._evaluations.truncate_after(last)
            run.forget_tables("evaluations", last)

    def evaluated(self, step: int, version: int, evaluations: Sequence[EvaluationResult | None]) -> dict[str, Any]:
        """Write the evaluations after `step` on rank 0 and return their metrics. One is None if the run is leaving."""
        metrics: dict[str, Any] = {}
        if self._evaluations is None:
            return metrics
        for evaluation in evaluations:
            if evaluation is None:
                self._progress.note(f"after step {step}: no evaluation, as the run is to leave")
                continue
            if evaluation.table:
                write_whole(self._run.evaluation_table(step), evaluation.table)
            self._progress.note(f"after step {step}: {evaluation.summary}")
            metrics |= evaluation.metrics
        if metrics:
            self._evaluations.write(step, metrics | {"sync/version": version})
        return metrics

    def started(self, times: StepTimes, metrics: dict[str, Any]) -> None:
        """Write the trace of the start and keep its metrics for the line of the first step."""
        self._start = metrics | {"run/start_s": times.seconds}
        if self._trace is not None:
            self._trace.write("start", times)

    def step(
        self,
        number: int,
        times: StepTimes,
        engines: Sequence[EngineReport],
        sizes: Sizes,
        metrics: Mapping[str, Any],
        rows: Sequence[Row],
    ) -> None:
        """Write one step; rank 0 adds what the engines did and the sample `rows`. Collective."""
        everyone = self._gather((times.by_span(), platform.take_peak_reserved_bytes()))
        ranks, peaks = [spans for spans, _ in everyone], [peak for _, peak in everyone if peak is not None]
        line: dict[str, Any] = {}
        if self._metrics is not None:
            busy_s = [engine.busy_s for engine in engines]
            metrics = {**metrics, **self._start}
            metrics |= self._measures.of(times, ranks, sizes, busy_s, metrics)
            if peaks:
                metrics["memory/reserved"] = max(peaks)
            self._start = {}
            if self._trace is not None:
                write_engines(self._run.path, number, times.start, engines)
            # Write the line first: a run killed in between drops the line and repeats the step.
            line = self._metrics.write(number, metrics | self._sinks.metrics())
            self._sinks.write(number, line, rows)
        self.profiler.write(number)
        if self._trace is not None:
            self._trace.write(number, times)
        self._progress.step(number, metrics)

    def close(self, times: StepTimes) -> None:
        """Write the trace of the end and print the run's totals."""
        if self._trace is not None:
            self._trace.write("end", times)
        if self._metrics is not None:
            print("\n".join(totals(read_run(self._run.path))), flush=True)
        for file in (self._metrics, self._evaluations, self._trace):
            if file is not None:
                file.close()
