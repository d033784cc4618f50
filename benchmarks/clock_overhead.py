"""What does the phase clock cost a step?

    python benchmarks/clock_overhead.py RUN [--json PATH] [--check]

RUN is the directory of a run with run.trace: spans. Its trace says how many spans each rank had in each step. What one costs
is measured here, as processor time of one core, least of ten rounds, with and without keeping it for the trace; as is what
comes once a step: rank 0's time metrics of all ranks' spans, and a rank's line of the trace. Their sum, of the rank with
most spans, is compared with the time of the run's steps. The run itself is not repeated: what is measured is far below the
noise of its steps. The exchange of the ranks' seconds at the end of a step is not in it: that is phase `metrics` of the run.

Target (with --check, exit 1 when it is missed): the clock takes less than 0.5 % of the median step, the trace included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from megarl.telemetry.clock import Event, PhaseClock, StepTimes, recording, span
from megarl.telemetry.time_metrics import Spans, bubble_metrics, idle_metrics
from megarl.telemetry.trace import TraceWriter, read_traces

ROOT = Path(__file__).resolve().parent.parent
TARGET = 0.005
ROUNDS, SPANS = 10, 10_000


def processor_seconds(work: Callable[[], Any], times: int = 1) -> float:
    """Processor time of one call, the least of ten rounds of `times` calls."""
    rounds = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        for _ in range(times):
            work()
        rounds.append((time.process_time() - begun) / times)
    return min(rounds)


def span_seconds(keep: bool) -> float:
    """Processor time of one span; `keep` it for the trace."""

    def many() -> None:
        clock = PhaseClock(keep_phases=keep, keep_spans=keep)
        with recording(clock), clock.phase("actor_update"):
            for _ in range(SPANS):
                with span("forward"):
                    pass

    return processor_seconds(many) / SPANS


def spans_of(step: dict[str, Any]) -> Spans:
    """The seconds by phase and span that a rank hands to rank 0, nested ones counted in both: only their number matters."""
    spans: dict[tuple[str, str], float] = {("", "unaccounted"): 0.0}
    waiting: list[tuple[str, float]] = []
    for name, depth, _, lasted in step["events"]:  # in order of their ends: a phase behind its spans
        if depth:
            waiting.append((name, lasted / 1e6))
            continue
        for inner, seconds in (*waiting, ("unaccounted", lasted / 1e6)):
            spans[name, inner] = spans.get((name, inner), 0.0) + seconds
        waiting = []
    return spans


def metrics_seconds(ranks: list[Spans]) -> float:
    """Processor time of rank 0's metrics of a step."""
    return processor_seconds(lambda: idle_metrics(ranks) | bubble_metrics(ranks), 10)


def trace_seconds(step: dict[str, Any]) -> float:
    """Processor time of a rank's line of the trace."""
    times = StepTimes(step["start"], step["seconds"], {}, {}, [Event(*event) for event in step["events"]])
    with tempfile.TemporaryDirectory() as folder:
        writer = TraceWriter(Path(folder), 0, "here", 0.0)
        try:
            return processor_seconds(lambda: writer.write(1, times), 10)
        finally:
            writer.close()


def measure(run: Path) -> dict[str, Any]:
    """Raises ValueError for a run without the spans of two steps."""
    ranks = [[line for line in lines if "step" in line] for lines in read_traces(run, "rank")]
    if not ranks or any(len(steps) < 2 for steps in ranks):
        raise ValueError(f"{run} has no trace of two steps; give the directory of a run with run.trace: spans")
    steps = [step for steps in ranks for step in steps[1:]]  # the first one warms up
    fullest = max(steps, key=lambda step: len(step["events"]))
    count, step_s = len(fullest["events"]), median(step["seconds"] for step in steps)
    timed, kept_span_s = span_seconds(keep=False), span_seconds(keep=True)
    metrics_s, line = metrics_seconds([spans_of(steps[-1]) for steps in ranks]), trace_seconds(fullest)
    return {
        "ranks": len(ranks),
        "step_s": step_s,
        "spans": count,
        "span_s": timed,
        "kept_span_s": kept_span_s,
        "metrics_s": metrics_s,
        "trace_s": line,
        "share": (count * timed + metrics_s) / step_s,
        "share_with_trace": (count * kept_span_s + metrics_s + line) / step_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    try:
        result = measure(arguments.run)
    except ValueError as error:
        parser.error(str(error))
    table = Table("ranks", "step", "spans a step", "a span", "kept for the trace", "metrics", "line of the trace")
    micro = [f"{result[key] * 1e6:.2f} us" for key in ("span_s", "kept_span_s", "metrics_s", "trace_s")]
    table.add_row(str(result["ranks"]), f"{result['step_s']:.2f} s", str(result["spans"]), *micro)
    Console(width=120).print(table)
    if arguments.json is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        device = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        config = {"run": arguments.run.name, "rounds": ROUNDS, "target": TARGET}
        content = {"commit": commit, "device": device, "config": config, "found": result}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    print(
        f"clock: {result['share']:.3%} of a step, {result['share_with_trace']:.3%} with run.trace: spans "
        f"(target {TARGET:.1%})"
    )
    return 1 if arguments.check and result["share_with_trace"] >= TARGET else 0


if __name__ == "__main__":
    sys.exit(main())
