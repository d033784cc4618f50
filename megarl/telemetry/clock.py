"""Seconds of a rank: each in exactly one named phase, and in it in exactly one named span."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

REST = "unaccounted"
# In such a span a rank does nothing but wait; what follows says for whom.
WAIT = "wait_"
# A step of a long run holds no more events than this; a micro-batch has about four.
MOST_EVENTS = 20_000


class Event(NamedTuple):
    """One phase or span as it ran. `start` is in seconds from the start of the step, `depth` 0 for a phase."""

    name: str
    depth: int
    start: float
    seconds: float


@dataclass(frozen=True)
class StepTimes:
    """What a rank did in a step.

    `start` is its wall clock, in seconds since 1970, when the step began. `spans` has seconds by phase and span, without
    those of spans inside; those of a phase, with what is left of it as `unaccounted`, sum to the phase, and the phases with
    what is between them to the step. `events` is in order of their ends, and empty unless asked for; `dropped` counts those
    behind the first MOST_EVENTS.
    """

    start: float
    seconds: float
    phases: dict[str, float]
    spans: dict[tuple[str, str], float]
    events: list[Event]
    dropped: int

    def figures(self) -> dict[str, float]:
        """`time/<phase>`, `time/unaccounted` and `time/step`, in seconds."""
        times = {f"time/{name}": seconds for name, seconds in self.phases.items()}
        return times | {f"time/{REST}": self.seconds - sum(self.phases.values()), "time/step": self.seconds}

    def totals(self) -> dict[str, float]:
        """Seconds by span, over all phases; they sum to the step."""
        totals = {REST: self.seconds - sum(self.phases.values())}
        for (_, name), seconds in self.spans.items():
            totals[name] = totals.get(name, 0.0) + seconds
        return totals


@dataclass
class _Open:
    name: str
    start: float
    inside: float = 0.0  # seconds of the spans in it


class PhaseClock:
    """Times the phases of a step and the spans in them; what lies between is `unaccounted`, so the parts sum to the wall
    time.

    `on_phase` is called with a phase's name when it starts and with None when it ends. An exception that leaves a phase
    carries a note naming the rank and the phase. `keep_phases` and `keep_spans`: whether each one is kept as an event too.
    """

    def __init__(
        self,
        rank: int = 0,
        on_phase: Callable[[str | None], None] | None = None,
        now: Callable[[], float] = time.perf_counter,
        keep_phases: bool = False,
        keep_spans: bool = False,
    ) -> None:
        self._rank = rank
        self._on_phase = on_phase
        self._now = now
        self._deepest = 2**31 if keep_spans else int(keep_phases)  # events of a smaller depth are kept
        self._open: list[_Open] = []
        self._begin()

    @property
    def current(self) -> str | None:
        """The phase that is running; other threads may ask."""
        return next((span.name for span in self._open), None)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as (one more part of) phase `name`. Phases do not nest: a second has one phase."""
        assert not self._open, f"phase {name} starts inside phase {self.current}"
        self._open.append(_Open(name, self._now()))
        if self._on_phase is not None:
            self._on_phase(name)
        try:
            yield
        except BaseException as error:
            error.add_note(f"in phase {name} on rank {self._rank}")
            raise
        finally:
            end = self._now()
            while len(self._open) > 1:  # left by an error between a start and its stop
                self._close(end)
            self._phases[name] = self._phases.get(name, 0.0) + self._close(end)
            if self._on_phase is not None:
                self._on_phase(None)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the body as part of span `name` of the phase that runs."""
        opened = self.start(name)
        try:
            yield
        finally:
            if opened:
                self.stop(name)

    def start(self, name: str) -> bool:
        """Open a span; False where it is none: outside of phases, and in a wait, whose inside is waiting for the same."""
        if not self._open or self._open[-1].name.startswith(WAIT):
            return False
        self._open.append(_Open(name, self._now()))
        return True

    def stop(self, name: str) -> None:
        """Close span `name`, which was opened last; nothing where it was not."""
        if len(self._open) > 1 and self._open[-1].name == name:
            self._close(self._now())

    def take(self) -> StepTimes:
        """What was since the last take, which ends a step."""
        assert not self._open, f"taken inside phase {self.current}"
        now = self._now()
        times = StepTimes(
            self._wall, now - self._since, self._phases, self._spans, self._events[:MOST_EVENTS],
            max(0, self._num_events - MOST_EVENTS),
        )  # fmt: skip
        self._begin(now)
        return times

    def _begin(self, now: float | None = None) -> None:
        self._wall, self._since = time.time(), self._now() if now is None else now
        self._phases: dict[str, float] = {}
        self._spans: dict[tuple[str, str], float] = {}
        self._events: list[Event] = []
        self._num_events = 0

    def _close(self, end: float) -> float:
        """Count what was opened last, without what was inside; its seconds with that."""
        key = self._open[0].name, self._open[-1].name if len(self._open) > 1 else REST
        closed = self._open.pop()
        seconds, depth = end - closed.start, len(self._open)
        self._spans[key] = self._spans.get(key, 0.0) + seconds - closed.inside
        if self._open:
            self._open[-1].inside += seconds
        if depth < self._deepest:
            self._num_events += 1
            if self._num_events <= MOST_EVENTS:
                self._events.append(Event(closed.name, depth, closed.start - self._since, seconds))
        return seconds


_clock: PhaseClock | None = None


@contextmanager
def recording(clock: PhaseClock) -> Iterator[None]:
    """Within this, spans of this process are `clock`'s."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before


@contextmanager
def span(name: str) -> Iterator[None]:
    """Time the body as span `name` of the phase that runs, if a clock is recording: `wait_<whom>` where it only waits."""
    if _clock is None:
        yield
        return
    with _clock.span(name):
        yield


def start_span(name: str) -> None:
    """As `span`, for those who cannot wrap what they time."""
    if _clock is not None:
        _clock.start(name)


def stop_span(name: str) -> None:
    """The end of a `start_span`."""
    if _clock is not None:
        _clock.stop(name)
