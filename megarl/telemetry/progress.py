"""The line a user watches: which step and phase is running, and what the last step gave."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

# What a finished step says, in this order, where the step has it: key, label, format.
FIGURES = (
    ("reward/mean", "reward", ".3f"),
    ("rollout/completion_length_mean", "length", ".1f"),
    ("actor/policy_loss", "loss", ".4f"),
    ("actor/grad_norm", "grad norm", ".3f"),
    ("actor/entropy", "entropy", ".3f"),
    ("time/step", "seconds", ".1f"),
)


def step_line(step: int, num_steps: int, figures: Mapping[str, Any]) -> str:
    """One finished step as a line of text."""
    parts = [f"{label} {figures[key]:{form}}" for key, label, form in FIGURES if figures.get(key) is not None]
    return f"step {step:>{len(str(num_steps))}}/{num_steps}  " + "  ".join(parts)


class ProgressLine:
    """On a terminal a live line with the running phase under one line a step; elsewhere the lines alone.

    A context manager. `enabled=False` (every rank but 0) makes it silent.
    """

    def __init__(self, num_steps: int, enabled: bool = True, console: Console | None = None) -> None:
        self._num_steps = num_steps
        self._enabled = enabled
        self._console = console or Console()
        self._live = enabled and self._console.is_terminal
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("[bold]{task.description}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=num_steps)

    def __enter__(self) -> ProgressLine:
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._bar.stop()

    def phase(self, name: str | None) -> None:
        """Show `name` as the running phase; fits `PhaseClock(on_phase=...)`. None changes nothing."""
        if self._live and name is not None:
            self._bar.update(self._task, description=name, refresh=True)

    def resumed(self, done: int) -> None:
        """Count the steps that an earlier start has done."""
        self._bar.update(self._task, completed=done)

    def step(self, step: int, figures: Mapping[str, Any]) -> None:
        """Print what a finished step gave, flushed for whoever reads a pipe."""
        if not self._enabled:
            return
        self._console.print(step_line(step, self._num_steps, figures), highlight=False, soft_wrap=True)
        self._console.file.flush()
        if self._live:
            self._bar.update(self._task, completed=step)
