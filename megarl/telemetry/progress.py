"""What a user watches: which step and phase is running and how far, when the run ends, and what the last step gave."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column

from megarl.telemetry.mean_reward import mean_reward

# What a finished step says behind its reward, in this order, where the step has it: key, label, format.
FIGURES = (
    ("rollout/completion_length_mean", "length", ".1f"),
    ("actor/policy_loss", "loss", ".4f"),
    ("actor/grad_norm", "grad norm", ".3f"),
    ("actor/entropy", "entropy", ".3f"),
    ("time/step", "seconds", ".1f"),
)
RECENT = 10  # steps that say how long the others will take


def step_line(step: int, num_steps: int, figures: Mapping[str, Any], left: str = "") -> str:
    """One finished step as a line of text; `left`: how long the run still takes."""
    reward = mean_reward(figures)
    parts = [f"reward {reward:.3f}"] if reward is not None else []
    parts += [f"{label} {figures[key]:{form}}" for key, label, form in FIGURES if figures.get(key) is not None]
    rate = tokens_per_second(figures)
    parts += [f"tokens/s {rate:.0f}"] if rate is not None else []
    parts += [f"left {left}"] if left else []
    return f"step {step:>{len(str(num_steps))}}/{num_steps}  " + "  ".join(parts)


def tokens_per_second(figures: Mapping[str, Any]) -> float | None:
    """Prompts and completions of a step over its time; None where the step does not say them."""
    tokens = [figures.get(key) for key in ("tokens/prompt", "tokens/completion")]
    seconds = figures.get("time/step")
    return None if None in tokens or not seconds else sum(filter(None, tokens)) / seconds


def duration(seconds: float) -> str:
    """A time to wait, in the two largest units that it has."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes} min" if hours < 24 else f"{seconds / 86400:.1f} d"


class ProgressLine:
    """On a terminal a live line with the running phase under one line a step; elsewhere the lines alone.

    A context manager. `enabled=False` (every rank but 0) makes it silent. `now` is in seconds since 1970.
    """

    def __init__(
        self, num_steps: int, enabled: bool = True, console: Console | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self._num_steps = num_steps
        self._enabled = enabled
        self._console = console or Console()
        self._now = now
        self._live = enabled and self._console.is_terminal
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._steps_timed = 0

        def column(least: int) -> Column:  # where a terminal is narrow the last one gives way
            return Column(no_wrap=True, overflow="ellipsis", min_width=least)

        self._bar = Progress(
            SpinnerColumn(table_column=column(1)),
            TextColumn("step", table_column=column(4)),
            MofNCompleteColumn(table_column=column(2 * len(str(num_steps)) + 1)),
            BarColumn(bar_width=8, table_column=column(8)),
            TextColumn("[bold]{task.description}", table_column=column(17)),
            TextColumn("{task.fields[work]}", table_column=column(19)),
            TextColumn("[dim]{task.fields[last]}", table_column=column(0)),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=num_steps, work="", last="")

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
            self._bar.update(self._task, description=name, work="", refresh=True)

    def work(self, unit: str, done: float, total: int) -> None:
        """Show how far the phase is; fits `work.watching`. It is drawn with the next of the bar's ten frames a second."""
        if self._live:
            self._bar.update(self._task, work=f"{int(done)}/{total} {unit}")

    def resumed(self, done: int) -> None:
        """Count the steps that an earlier start has done."""
        self._bar.update(self._task, completed=done)

    def note(self, text: str) -> None:
        """Print what is not of a step's line."""
        if self._enabled:
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)
            self._console.file.flush()

    def step(self, step: int, figures: Mapping[str, Any]) -> None:
        """Print what a finished step gave, flushed for whoever reads a pipe."""
        if not self._enabled:
            return
        left_s = self._left_s(step, figures.get("time/step"))
        left = "" if left_s is None else duration(left_s)
        self._console.print(step_line(step, self._num_steps, figures, left), highlight=False, soft_wrap=True)
        self._console.file.flush()
        if self._live:
            self._bar.update(self._task, completed=step, last=self._last(left_s, figures))

    def _left_s(self, step: int, seconds: float | None) -> float | None:
        """From the mean of the last steps. The first of a start warms up, and counts only while it is alone."""
        if seconds is not None:
            self._steps_timed += 1
            if self._steps_timed == 2:
                self._seconds.clear()
            self._seconds.append(seconds)
        remaining = self._num_steps - step
        return fmean(self._seconds) * remaining if self._seconds and remaining else None

    def _last(self, left_s: float | None, figures: Mapping[str, Any]) -> str:
        """Expected end, tokens a second and reward, as the live line has them until the next step."""
        parts = []
        if left_s is not None:
            form = "%H:%M" if left_s < 20 * 3600 else "%d %b %H:%M"
            parts.append("ends " + time.strftime(form, time.localtime(self._now() + left_s)))
        rate = tokens_per_second(figures)
        parts += [f"{rate:.0f} tokens/s"] if rate is not None else []
        reward = mean_reward(figures)
        parts += [f"reward {reward:.3f}"] if reward is not None else []
        return ", ".join(parts)
