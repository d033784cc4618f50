"""Seconds of a rank: each in exactly one named phase, and in it in exactly one named span."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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

    def by_span(self) -> dict[tuple[str, str], float]:
        """Seconds by phase and span, with what lies between phases under ("", "unaccounted"); they sum to the step."""
        return {("", REST): self.seconds - sum(self.phases.values()), **self.spans}

    def totals(self) -> dict[str, float]:
        """Seconds by span, over all phases; they sum to the step."""
        totals: dict[str, float] = {}
        for (_, name), seconds in self.by_span().items():
            totals[name] = totals.get(name, 0.0) + seconds
        return totals


class Ranges(Protocol):
    """Who else shows phases and spans as they run: a profiler. They nest."""

    def open(self, name: str) -> None:
        """One begins."""

    def close(self) -> None:
        """The one that began last ends."""


@dataclass
class _Open:
    name: str
    start: float
    inside: float = 0.0  # seconds of the spans in it


class PhaseClock:
    """Times the phases of a step and the spans in them; what lies between is `unaccounted`, so the parts sum to the wall
    time.

    `on_phase` is called with a phase's name when it starts and with None when it ends, and `on_end` before that, while the
    phase still runs, unless it ends by an exception. Such an exception carries a note naming the rank and the phase.
    `keep_phases` and `keep_spans`: whether each one is kept as an event too. `beat` is called with the phase and the
    innermost span, or None, whenever one of them begins or ends.
    """

    def __init__(
        self,
        rank: int = 0,
        on_phase: Callable[[str | None], None] | None = None,
        now: Callable[[], float] = time.perf_counter,
        keep_phases: bool = False,
        keep_spans: bool = False,
        on_end: Callable[[], None] | None = None,
        beat: Callable[[str | None, str | None], None] | None = None,
    ) -> None:
        self._rank, self._on_beat = rank, beat
        self._on_phase, self._on_end = on_phase, on_end
        self._now = now
        self._deepest = 2**31 if keep_spans else int(keep_phases)  # events of a smaller depth are kept
        self._open: list[_Open] = []
        self._ranges: Ranges | None = None
        self._error: tuple[BaseException, str | None, str | None] | None = None
        self._begin()

    @contextmanager
    def showing(self, ranges: Ranges) -> Iterator[None]:
        """Within this, `ranges` shows phases and spans, too. Between phases."""
        assert not self._open, f"ranges begin inside phase {self.current}"
        self._ranges = ranges
        try:
            yield
        finally:
            self._ranges = None

    @property
    def current(self) -> str | None:
        """The phase that is running; other threads may ask."""
        return next((span.name for span in self._open), None)

    @property
    def inside(self) -> str | None:
        """The innermost span that is open."""
        return self._open[-1].name if len(self._open) > 1 else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as (one more part of) phase `name`. Phases do not nest: a second has one phase."""
        assert not self._open, f"phase {name} starts inside phase {self.current}"
        self._begin_one(name)
        if self._on_phase is not None:
            self._on_phase(name)
        try:
            yield
            if self._on_end is not None:
                self._on_end()
        except BaseException as error:  # whatever ends the phase, SystemExit too, is told where it was, and goes on
            error.add_note(f"in phase {name} on rank {self._rank}")
            self._left(error)
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
        except BaseException as error:  # whatever ends the span, SystemExit too: where it was is kept, and it goes on
            self._left(error)
            raise
        finally:
            if opened:
                self.stop(name)

    def _left(self, error: BaseException) -> None:
        """Keep in which phase and span an error was raised, once: it is asked where all are closed."""
        if self._error is None or self._error[0] is not error:
            self._error = error, self.current, self.inside

    def place_of(self, error: BaseException) -> tuple[str | None, str | None]:
        """The phase and the innermost span in which an error was raised; None for none."""
        return (None, None) if self._error is None or self._error[0] is not error else self._error[1:]

    def start(self, name: str) -> bool:
        """Open a span; False where it is none: outside of phases, and in a wait, whose inside is waiting for the same."""
        if not self._open or self._open[-1].name.startswith(WAIT):
            return False
        self._begin_one(name)
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

    def _begin_one(self, name: str) -> None:
        if self._ranges is not None:
            self._ranges.open(name)
        self._open.append(_Open(name, self._now()))
        self._beat()

    def _beat(self) -> None:
        if self._on_beat is not None:
            self._on_beat(self._open[0].name if self._open else None, self._open[-1].name if len(self._open) > 1 else None)

    def _close(self, end: float) -> float:
        """Count what was opened last, without what was inside; its seconds with that."""
        if self._ranges is not None:
            self._ranges.close()
        key = self._open[0].name, self._open[-1].name if len(self._open) > 1 else REST
        closed = self._open.pop()
        self._beat()
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
