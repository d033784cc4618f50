"""Time a rank: every second is in exactly one phase, and within the phase in exactly one span."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

UNACCOUNTED = "unaccounted"
# In a span with this prefix a rank only waits; the rest of the name says for whom.
WAIT = "wait_"


class Event(NamedTuple):
    """A finished phase or span. `start` is in seconds from the start of the step; `depth` is 0 for a phase."""

    name: str
    depth: int
    start: float
    seconds: float


class ClockPlace(NamedTuple):
    """Where a rank is: its phase and its innermost span; None between phases and outside of spans."""

    phase: str | None
    span: str | None


@dataclass(frozen=True)
class StepTimes:
    """How one rank spent a step.

    `start` is the rank's wall clock at the start of the step, in seconds since 1970. `spans` holds seconds by (phase, span),
    without the seconds of nested spans; the spans of a phase, with `unaccounted`, sum to the phase. `events` are ordered by
    their ends, and empty unless the clock keeps events.
    """

    start: float
    seconds: float
    phases: dict[str, float]
    spans: dict[tuple[str, str], float]
    events: list[Event]

    def metrics(self) -> dict[str, float]:
        """Return `time/<phase>`, `time/unaccounted` and `time/step`, in seconds."""
        between = self.seconds - sum(self.phases.values())
        return {f"time/{name}": s for name, s in self.phases.items()} | {
            f"time/{UNACCOUNTED}": between,
            "time/step": self.seconds,
        }

    def by_span(self) -> dict[tuple[str, str], float]:
        """Return seconds by (phase, span) that sum to the step; time between phases is under ("", "unaccounted")."""
        return {("", UNACCOUNTED): self.seconds - sum(self.phases.values()), **self.spans}


class Ranges(Protocol):
    """A profiler that shows phases and spans as nested ranges."""

    def open(self, name: str) -> None:
        """Begin a range."""

    def close(self) -> None:
        """End the innermost range."""


@dataclass
class _OpenSpan:
    name: str
    start: float
    nested_s: float = 0.0  # seconds of the spans inside


class PhaseClock:
    """Times the phases of a step and the spans inside them. Other time is `unaccounted`, so that all parts sum to wall time.

    `on_phase` gets a phase's name at the phase's start, and None at the end. `synchronize` waits for the device as the last
    part of a phase, in span `device`, unless the phase raises; then the exception gets a note with rank and phase.
    `keep_phases` and `keep_spans` record events. `beat` gets the phase and the innermost span (or None) whenever either
    changes.
    """

    def __init__(
        self,
        rank: int = 0,
        on_phase: Callable[[str | None], object] = lambda phase: None,
        now: Callable[[], float] = time.perf_counter,
        keep_phases: bool = False,
        keep_spans: bool = False,
        synchronize: Callable[[], None] | None = None,
        beat: Callable[[str | None, str | None], object] = lambda phase, span: None,
    ) -> None:
        self._rank, self._now = rank, now
        self._on_phase, self._synchronize, self._beat = on_phase, synchronize, beat
        self._kept_depth = 2**31 if keep_spans else int(keep_phases)  # keep events of a smaller depth
        self._stack: list[_OpenSpan] = []  # the phase, then the spans inside it
        self._ranges: Ranges | None = None
        self._error: tuple[BaseException, ClockPlace] | None = None
        self._reset(self._now())

    @contextmanager
    def showing(self, ranges: Ranges) -> Iterator[None]:
        """Also show phases and spans in `ranges` within this context. Enter and leave it between phases."""
        assert not self._stack, f"ranges begin inside phase {self.current}"
        self._ranges = ranges
        try:
            yield
        finally:
            self._ranges = None

    @property
    def current(self) -> str | None:
        """The running phase. Other threads may read it."""
        return next((span.name for span in self._stack), None)

    @property
    def inside(self) -> str | None:
        """The innermost open span."""
        return self._stack[-1].name if len(self._stack) > 1 else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the body to phase `name`. Phases do not nest."""
        assert not self._stack, f"phase {name} starts inside phase {self.current}"
        self._push(name)
        self._on_phase(name)
        try:
            yield
            if self._synchronize is not None:
                with self.span("device"):
                    self._synchronize()
        except BaseException as error:  # SystemExit too: note the place and go on raising
            error.add_note(f"in phase {name} on rank {self._rank}")
            self._remember_place(error)
            raise
        finally:
            end = self._now()
            while len(self._stack) > 1:  # an error skipped the stop of these spans
                self._pop(end)
            self._phases[name] = self._phases.get(name, 0.0) + self._pop(end)
            self._on_phase(None)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time of the body to span `name` of the running phase."""
        is_open = self.start(name)
        try:
            yield
        except BaseException as error:  # SystemExit too: note the place and go on raising
            self._remember_place(error)
            raise
        finally:
            if is_open:
                self.stop(name)

    def start(self, name: str) -> bool:
        """Open a span and return True. Outside of phases and inside a wait, open nothing and return False."""
        if not self._stack or self._stack[-1].name.startswith(WAIT):
            return False
        self._push(name)
        return True

    def stop(self, name: str) -> None:
        """Close span `name` if it is the innermost span."""
        if len(self._stack) > 1 and self._stack[-1].name == name:
            self._pop(self._now())

    def place_of(self, error: BaseException) -> ClockPlace:
        """Return where `error` was raised."""
        return ClockPlace(None, None) if self._error is None or self._error[0] is not error else self._error[1]

    def _remember_place(self, error: BaseException) -> None:
        if self._error is None or self._error[0] is not error:
            self._error = error, ClockPlace(self.current, self.inside)

    def take(self) -> StepTimes:
        """End the step: return its times and begin the next step."""
        assert not self._stack, f"taken inside phase {self.current}"
        now = self._now()
        times = StepTimes(self._wall, now - self._since, self._phases, self._spans, self._events)
        self._reset(now)
        return times

    def _reset(self, now: float) -> None:
        self._wall, self._since = time.time(), now
        self._phases: dict[str, float] = {}
        self._spans: dict[tuple[str, str], float] = {}
        self._events: list[Event] = []

    def _push(self, name: str) -> None:
        if self._ranges is not None:
            self._ranges.open(name)
        self._stack.append(_OpenSpan(name, self._now()))
        self._beat(self.current, self.inside)

    def _pop(self, end: float) -> float:
        """Close the innermost span and return its seconds with those of nested spans."""
        if self._ranges is not None:
            self._ranges.close()
        key = self._stack[0].name, self.inside or UNACCOUNTED
        closed = self._stack.pop()
        self._beat(self.current, self.inside)
        seconds, depth = end - closed.start, len(self._stack)
        self._spans[key] = self._spans.get(key, 0.0) + seconds - closed.nested_s
        if self._stack:
            self._stack[-1].nested_s += seconds
        if depth < self._kept_depth:
            self._events.append(Event(closed.name, depth, closed.start - self._since, seconds))
        return seconds


_clock: PhaseClock | None = None


@contextmanager
def recording(clock: PhaseClock) -> Iterator[None]:
    """Send the spans of this process to `clock` within this context."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before


@contextmanager
def span(name: str) -> Iterator[None]:
    """Time the body as span `name` of the running phase, if a clock records. Name a wait `wait_<whom>`."""
    if _clock is None:
        yield
    else:
        with _clock.span(name):
            yield


def start_span(name: str) -> None:
    """Open a span that `stop_span` closes, for callers that cannot wrap the code they time."""
    if _clock is not None:
        _clock.start(name)


def stop_span(name: str) -> None:
    """Close a span that `start_span` opened."""
    if _clock is not None:
        _clock.stop(name)
