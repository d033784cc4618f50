"""Seconds of a rank, each in exactly one named phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseClock:
    """Times the phases of a step; what lies between them is `unaccounted`, so the parts sum to the wall time.

    `on_phase` is called with a phase's name when it starts and with None when it ends. An exception that
    leaves a phase carries a note naming the rank and the phase.
    """

    def __init__(
        self,
        rank: int = 0,
        on_phase: Callable[[str | None], None] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._rank = rank
        self._on_phase = on_phase
        self._now = now
        self._current: str | None = None
        self._seconds: dict[str, float] = {}
        self._since = now()

    @property
    def current(self) -> str | None:
        """The phase that is running."""
        return self._current

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as (one more part of) phase `name`. Phases do not nest: a second has one phase."""
        assert self._current is None, f"phase {name} starts inside phase {self._current}"
        self._current = name
        if self._on_phase is not None:
            self._on_phase(name)
        start = self._now()
        try:
            yield
        except BaseException as error:
            error.add_note(f"in phase {name} on rank {self._rank}")
            raise
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start
            self._current = None
            if self._on_phase is not None:
                self._on_phase(None)

    def take(self) -> dict[str, float]:
        """Seconds since the last take, as `time/<phase>`, `time/unaccounted` and `time/step`."""
        assert self._current is None, f"taken inside phase {self._current}"
        now = self._now()
        step = now - self._since
        times = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        times["time/unaccounted"] = step - sum(self._seconds.values())
        times["time/step"] = step
        self._seconds, self._since = {}, now
        return times
