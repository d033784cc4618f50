"""Write a rank's metrics, evaluations, traces and samples step by step, and the progress line."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from platform import node as host_name
from typing import Any, Protocol

from megarl.platform import current as platform
from megarl.recipe import Recipe
from megarl.recipe.evaluation_section import EvaluationSection
from megarl.telemetry.clock import StepTimes
from megarl.telemetry.metrics_file import MetricsWriter, read_metrics
from megarl.telemetry.progress import ProgressLine
from megarl.telemetry.records import Records
from megarl.telemetry.run_directory import RunDirectory
from megarl.telemetry.sinks import Row
from megarl.telemetry.time_metrics import Sizes, TimeMetrics, totals_lines
from megarl.telemetry.trace import EngineTimes, EngineTraces, TraceWriter, clock_offsets

CLOCK_READINGS = 5
Gather = Callable[[Any], list[Any]]  # a value of every rank, on every rank


class Evaluation(Protocol):
    """Results on held-out prompts, from `megarl/rollout/evaluation.py`."""

    def metrics(self, section: EvaluationSection) -> dict[str, float]: ...

    def summary(self, section: EvaluationSection) -> str: ...

    def write(self, file: Path) -> None: ...


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
        records: Records,
        measures: TimeMetrics,
    ) -> None:
        """Open the files. `done` is the step of the checkpoint that the run resumes from, None for a new run. Collective."""
        self._recipe, self._run, self._gather = recipe, run, gather
        self._progress, self._records, self._measures = progress, records, measures
        traced, first = recipe.run.trace != "none", rank == 0
        self._trace: TraceWriter | None = None
        if traced:
            readings = []  # of this rank's clock right after common barriers, to write traces on rank 0's clock
            for _ in range(CLOCK_READINGS):
                gather(None)
                readings.append(time.time())
            self._trace = TraceWriter(run.path, rank, host_name(), clock_offsets(gather(readings))[rank])
        self._engine_traces = EngineTraces(run.path) if traced else None
        self._metrics = MetricsWriter(run.metrics) if first else None
        self._evaluations = MetricsWriter(run.evaluations) if first and recipe.evaluation is not None else None
        self._start: dict[str, Any] = {}
        if self._metrics is not None:
            self._metrics.truncate_after(done or 0)
        if self._evaluations is not None:
            last = -1 if done is None else done
            self._evaluations.truncate_after(last)
            run.forget_evaluation_tables(last)

    def profiled(self, number: int) -> AbstractContextManager[None]:
        """Profile the step in the body if the recipe says so."""
        return self._records.step(number)

    def evaluated(self, step: int, version: int, evaluation: Evaluation | None) -> dict[str, Any]:
        """Write an evaluation after `step` on rank 0 and return its metrics. `evaluation` is None if the run is leaving."""
        if self._evaluations is None or self._recipe.evaluation is None:
            return {}
        if evaluation is None:
            self._progress.note(f"after step {step}: no evaluation, as the run is to leave")
            return {}
        evaluation.write(self._run.evaluation_table(step))
        self._progress.note(f"after step {step}: {evaluation.summary(self._recipe.evaluation)}")
        metrics = evaluation.metrics(self._recipe.evaluation)
        self._evaluations.write(step, metrics | {"sync/version": version})
        return metrics

    def started(self, times: StepTimes, metrics: dict[str, Any]) -> None:
        """Write the trace of the start and keep its metrics for the line of the first step."""
        self._start = metrics | {"run/start_s": times.seconds}
        if self._trace is not None:
            self._trace.write_part("start", times)

    def step(
        self,
        number: int,
        times: StepTimes,
        engines: Sequence[EngineTimes],
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
            if self._engine_traces is not None:
                self._engine_traces.write(number, times.start, engines)
            # Write the line first: a run killed in between drops the line and repeats the step.
            line = self._metrics.write(number, metrics | self._records.metrics())
        self._records.write(number, line, rows)
        if self._trace is not None:
            self._trace.write(number, times)
        self._progress.step(number, metrics)

    def close(self, times: StepTimes) -> None:
        """Write the trace of the end and print the run's totals."""
        if self._trace is not None:
            self._trace.write_part("end", times)
        if self._metrics is not None:
            print("\n".join(totals_lines(read_metrics(self._run.metrics))), flush=True)
        for file in (self._metrics, self._evaluations, self._trace):
            if file is not None:
                file.close()
