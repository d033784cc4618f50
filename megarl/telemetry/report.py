"""What `megarl report` does: of one run the curve in the terminal, a picture and a page; of two runs one page."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from megarl.telemetry.report_one_run import FILE, run_page
from megarl.telemetry.report_page import write
from megarl.telemetry.report_reading import read_run
from megarl.telemetry.report_terminal import show_curve
from megarl.telemetry.report_two_runs import compare_page


def report(run_dir: str | Path, output: Path | None = None, console: Console | None = None) -> Path:
    """Write the page of a run and return its path; raises ValueError where the run has made no step yet, or plotly is
    missing (then the curve has been shown)."""
    console = console or Console()
    run = read_run(run_dir)
    show_curve(run, console)
    path = write(output or run.path / FILE, run_page(run))
    console.print(f"page: {path}", highlight=False, markup=False, soft_wrap=True)
    return path


def compare(a: str | Path, b: str | Path, output: Path | None = None, console: Console | None = None) -> Path:
    """Write the page of two runs, into B's directory unless told otherwise, and return its path; raises ValueError as
    `report`."""
    first, second = read_run(a), read_run(b)
    path = write(output or second.path / f"report-vs-{first.name}.html", compare_page(first, second))
    (console or Console()).print(f"page: {path}", highlight=False, markup=False, soft_wrap=True)
    return path
