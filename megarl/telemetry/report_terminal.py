"""A run at a glance: its reward curve in the terminal and as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megarl.telemetry.report_reading import Run
from megarl.telemetry.totals import run_totals, totals_lines

ENDS = 3
PLOT_HEIGHT = 10
PLOT_WIDTH = 72
EIGHTHS = " ▁▂▃▄▅▆▇█"


def show_curve(run: Run, console: Console) -> Path:
    """Plot the mean reward of a run in the terminal and into `reward.png` in its directory; returns the PNG's path.

    Raises ValueError where no step has a mean reward.
    """
    steps, rewards = run.rewards()
    if not rewards:
        raise ValueError(f"{run.path / 'metrics.jsonl'} has no mean reward yet; a run has one after its first step")
    png = run.path / "reward.png"
    write_png(png, run.name, steps, rewards)
    console.print(f"mean reward of {run.name}", highlight=False, markup=False)
    console.print("\n".join(plot_lines(steps, rewards)), highlight=False, markup=False, soft_wrap=True)
    console.print(summary(rewards), highlight=False, soft_wrap=True)
    totals = totals_lines(run_totals(run.steps)) if run.points("time/step")[0] else []
    for line in (*totals, *run.starts):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"curve: {png}", highlight=False, markup=False, soft_wrap=True)
    return png


def summary(rewards: Sequence[float]) -> str:
    """The means of the first and of the last three steps (of fewer, where the run has fewer)."""
    ends = min(ENDS, len(rewards))
    first, last = sum(rewards[:ends]) / ends, sum(rewards[-ends:]) / ends
    return f"first {ends} steps {first:.3f}, last {ends} steps {last:.3f}, change {last - first:+.3f}"


def plot_lines(steps: Sequence[int], values: Sequence[float]) -> list[str]:
    """Columns of block characters over an axis; steps that do not fit the width are averaged together."""
    num_columns = min(len(values), PLOT_WIDTH)
    edges = [round(i * len(values) / num_columns) for i in range(num_columns + 1)]
    columns = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    wide = max(1, PLOT_WIDTH // num_columns)
    # From zero where nothing is below it, so that heights compare as the rewards do.
    low, high = min(0.0, *columns), max(columns)
    span = (high - low) or 1.0
    heights = [round((column - low) / span * PLOT_HEIGHT * 8) for column in columns]
    lines = []
    for row in reversed(range(PLOT_HEIGHT)):
        cells = "".join(EIGHTHS[max(0, min(8, height - 8 * row))] * wide for height in heights)
        label = high if row == PLOT_HEIGHT - 1 else low if row == 0 else None
        lines.append((f"{label:8.3f} ┤" if label is not None else "         │") + cells.rstrip())
    width = num_columns * wide
    first, last = f"step {steps[0]}", str(steps[-1])
    lines.append("         └" + "─" * width)
    lines.append(" " * 10 + first + last.rjust(max(len(last) + 1, width - len(first))))
    return lines


def write_png(path: Path, title: str, steps: Sequence[int], values: Sequence[float]) -> None:
    """The same curve by matplotlib, drawn without a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes: Any = figure.add_subplot()
    axes.plot(steps, values, marker="o", markersize=3)
    axes.set(title=title, xlabel="step", ylabel="mean reward")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
