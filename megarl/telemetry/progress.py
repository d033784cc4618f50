"""Show a run to its user: the running step and phase, their progress, each step's results, and the time that is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megarl.telemetry.metrics_file import duration, mean_reward

# Metrics in the line of a finished step, after its reward: key, label, format.
STEP_METRICS = (
    ("rollout/completion_length_mean", "length", ".1f"),
    ("actor/policy_loss", "loss", ".4f"),
    ("preference/loss", "preference loss", ".4f"),
    ("actor/teacher_kl", "teacher KL", ".4f"),
    ("actor/grad_norm", "grad norm", ".3f"),
    ("actor/entropy", "entropy", ".3f"),
    ("time/step", "seconds", ".1f"),
    ("tokens/per_s", "tokens/s", ".0f"),
)
RECENT = 10  # steps whose mean time predicts the rest


def step_line(step: int, num_steps: int, metrics: Mapping[str, Any], left: str = "") -> str:
    """Return a finished step as a line of text; `left` is the time until the end of the run."""
    reward = mean_reward(metrics)
    parts = [f"reward {reward:.3f}"] if reward is not None else []
    parts += [f"{label} {metrics[key]:{form}}" for key, label, form in STEP_METRICS if metrics.get(key) is not None]
    parts += [f"left {left}"] if left else []
    return f"step {step:>{len(str(num_steps))}}/{num_steps}  " + "  ".join(parts)


class ProgressLine:
    """Prints a line for each step and, on a terminal, a live line with the running phase.

    A context manager. `enabled=False` prints nothing, for all ranks except 0.
    """

    def __init__(self, num_steps: int, enabled: bool = True, console: Console | None = None) -> None:
        self._num_steps, self._enabled = num_steps, enabled
        self._console = console or Console()
        self._live = Live(console=self._console, transient=True) if enabled and self._console.is_terminal else None
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._num_timed = 0
        self._done, self._phase, self._work = 0, "starting", ""  # of the live line

    def __enter__(self) -> ProgressLine:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def _show(self, refresh: bool = False) -> None:
        if self._live is not None:
            text = f"step {self._done}/{self._num_steps}  {self._phase}  {self._work}"
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=refresh)

    def phase(self, name: str | None) -> None:
        """Show `name` as the running phase; an `on_phase` of PhaseClock."""
        if name is not None:
            self._phase, self._work = name, ""
            self._show(refresh=True)

    def work(self, unit: str, done: float, total: int) -> None:
        """Show the progress of the phase, in the line's next frame; an `on_work` of `watching_work`."""
        self._work = f"{int(done)}/{total} {unit}"
        self._show()

    def resumed(self, done: int) -> None:
        """Count the steps of earlier starts."""
        self._done = done

    def note(self, text: str) -> None:
        """Print and flush a line of text."""
        if self._enabled:
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)
            self._console.file.flush()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print a finished step. The mean time of the last steps predicts the end of the run. The first step of a start
        warms up, so it counts only until the second step."""
        if (seconds := metrics.get("time/step")) is not None:
            self._num_timed += 1
            if self._num_timed == 2:
                self._seconds.clear()
            self._seconds.append(seconds)
        remaining = self._num_steps - step
        left_s = fmean(self._seconds) * remaining if self._seconds and remaining else None
        self.note(step_line(step, self._num_steps, metrics, "" if left_s is None else duration(left_s)))
        self._done = step
        self._show()


# The callback gets the unit, the number of done units and the total. A unit may have parts.
_on_work: Callable[[str, float, int], None] | None = None
_unit, _total, _parts, _done = "", 0, 1, 0


@contextmanager
def watching_work(on_work: Callable[[str, float, int], None]) -> Iterator[None]:
    """Call `on_work` with the progress of this process's work within this context."""
    global _on_work
    before, _on_work = _on_work, on_work
    try:
        yield
    finally:
        _on_work = before


def begin_work(unit: str, total: int, parts: int = 1) -> None:
    """Announce that the running phase has `total` units of work with `parts` parts each."""
    global _unit, _total, _parts, _done
    _unit, _total, _parts, _done = unit, total, parts, 0
    advance_work(0)


def advance_work(parts: int = 1) -> None:
    """Count more parts as done. Do nothing if no work has begun."""
    global _done
    _done += parts
    if _on_work is not None and _done <= _total * _parts:
        _on_work(_unit, _done / _parts, _total)
