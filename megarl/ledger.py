"""What a rank writes down of a run, step by step: figures, evaluations, traces and samples, and what is shown of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from platform import node as host_name
from typing import Any

from megarl.megatron.parallel import gather_to_all
from megarl.platform import current as platform
from megarl.recipe import Recipe
from megarl.rollout.evaluation import Evaluation
from megarl.rollout.pool import EngineReport
from megarl.telemetry import MetricsWriter, ProgressLine, read_metrics
from megarl.telemetry.clock import StepTimes
from megarl.telemetry.engine_trace import EngineTraces
from megarl.telemetry.records import Records
from megarl.telemetry.run_directory import RunDirectory
from megarl.telemetry.step_figures import StepFigures
from megarl.telemetry.totals import run_totals, totals_lines
from megarl.telemetry.trace import TraceWriter, clock_offsets
from megarl.trainer import Pipeline

CLOCK_READINGS = 5


class Ledger:
    """That of one rank; most of it is rank 0's. Opening it drops what a run that goes on will do again."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunDirectory,
        pipeline: Pipeline,
        progress: ProgressLine,
        records: Records,
        measures: StepFigures,
        done: int | None,
    ) -> None:
        """`done` steps are in the checkpoint that the run goes on from, if there is one. Collective."""
        self._recipe, self._run, self._pipeline = recipe, run, pipeline
        self._progress, self._records, self._measures = progress, records, measures
        traced, first = recipe.run.trace != "none", pipeline.rank == 0
        self._trace = _open_trace(run, pipeline.rank) if traced else None
        self._engine_traces = EngineTraces(run.path) if traced else None
        self._metrics = MetricsWriter(run.metrics) if first else None
        self._evaluations = MetricsWriter(run.evaluations) if first and recipe.evaluation is not None else None
        self._start: dict[str, Any] = {}
        if self._metrics is not None:
            self._metrics.truncate_after(done or 0)
        if self._evaluations is not None:
            kept = -1 if done is None else done
            self._evaluations.truncate_after(kept)
            run.forget_evaluation_tables(kept)

    def profiled(self, number: int) -> AbstractContextManager[None]:
        """The body is this step; it is profiled if it is to be."""
        return self._records.step(number)

    def evaluated(self, step: int, found: Evaluation | None) -> dict[str, Any]:
        """Write an evaluation after `step`; its figures, on rank 0. None was found where the run is to leave."""
        if self._evaluations is None or self._recipe.evaluation is None:
            return {}
        if found is None:
            self._progress.note(f"after step {step}: no evaluation, as the run is to leave")
            return {}
        found.write(self._run.evaluation_table(step))
        self._progress.note(f"after step {step}: {found.said(self._recipe.evaluation)}")
        figures = found.figures(self._recipe.evaluation)
        self._evaluations.write(step, figures | {"sync/version": self._pipeline.version})
        return figures

    def started(self, times: StepTimes, figures: dict[str, Any]) -> None:
        """All before the first step, which belongs to none, and its `figures`: they go into the line of the first step."""
        self._start = figures | {"run/start_s": times.seconds}
        if self._trace is not None:
            self._trace.write_part("start", times)

    def step(self, number: int, times: StepTimes, engines: Sequence[EngineReport], figures: dict[str, Any]) -> None:
        """What this step took, and on rank 0 what the engines did in it, and its `figures`. Collective."""
        parts = self._pipeline.parts
        everyone = gather_to_all((times.by_span(), platform.take_peak_reserved_bytes()))
        ranks, peaks = [spans for spans, _ in everyone], [peak for _, peak in everyone if peak is not None]
        if self._metrics is not None:
            busy_s = [one.busy_s for one in engines]
            figures = figures | parts.prompts.figures() | self._start
            figures |= self._measures.of(times, ranks, self._pipeline.sizes, busy_s, figures)
            if peaks:
                figures["memory/reserved"] = max(peaks)
            self._start = {}
            if self._engine_traces is not None:
                self._engine_traces.write(number, times.start, engines)
        # The line first: a run that is killed in between repeats the step and drops the line, and loses neither.
        line = {} if self._metrics is None else self._metrics.write(number, figures | self._records.figures())
        self._records.write(number, line, [] if parts.samples is None else parts.samples.rows)
        if self._trace is not None:
            self._trace.write(number, times)
        self._progress.step(number, figures)

    def close(self, times: StepTimes) -> None:
        """Behind the last step: what came after that, and the run's totals."""
        if self._trace is not None:
            self._trace.write_part("end", times)
        if self._metrics is not None:
            print("\n".join(totals_lines(run_totals(read_metrics(self._run.metrics)))), flush=True)
        for written in (self._metrics, self._evaluations, self._trace):
            if written is not None:
                written.close()


def _open_trace(run: RunDirectory, rank: int) -> TraceWriter:
    """This rank's file of the trace, on rank 0's clock. Collective."""
    readings = []
    for _ in range(CLOCK_READINGS):
        gather_to_all(None)
        readings.append(time.time())
    return TraceWriter(run.path, rank, host_name(), clock_offsets(gather_to_all(readings))[rank])
