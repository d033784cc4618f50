"""What an engine did for its requests: when it had any, and when each came, was begun, gave its first token and ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

# In the place of a sample's number: a greedy completion, which is in no batch.
GREEDY = -1


class RequestTimes(NamedTuple):
    """One completion, in seconds since 1970 of the engine's clock. `begun` is when the scheduler took it up; `version` is
    that of the weights that sampled its last token. 0 for a time that the engine did not keep."""

    name: str
    sample: int
    arrived: float
    begun: float
    first_token: float
    ended: float
    tokens: int
    version: int


@dataclass(frozen=True)
class EngineReport:
    """An engine's time since it was last asked; `now` is its clock, in seconds since 1970, when it answers.

    `busy` has when it had requests in flight, as (start, seconds). `host` and `offset_s`, how far its clock is ahead of rank
    0's, are known to who has asked.
    """

    now: float
    busy: tuple[tuple[float, float], ...] = ()
    requests: tuple[RequestTimes, ...] = ()
    engine: int = 0
    host: str = ""
    offset_s: float = 0.0

    @property
    def busy_s(self) -> float:
        return sum(seconds for _, seconds in self.busy)

    def __add__(self, later: EngineReport) -> EngineReport:
        """This and what the same engine says after it."""
        return replace(later, busy=self.busy + later.busy, requests=self.requests + later.requests)


@dataclass
class RequestLog:
    """Kept in the engine's own process, whose groups begin and end here."""

    now: Callable[[], float] = time.time
    _groups: int = 0  # in flight
    _since: float = 0.0
    _busy: list[tuple[float, float]] = field(default_factory=list)
    _requests: list[RequestTimes] = field(default_factory=list)

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """A group is in flight inside."""
        if self._groups == 0:
            self._since = self.now()
        self._groups += 1
        try:
            yield
        finally:
            self._groups -= 1
            if self._groups == 0:
                self._busy.append((self._since, self.now() - self._since))

    def add(self, sample: int, output: Any, version: int) -> None:
        """A completion, from vLLM's `RequestOutput`; nothing where the engine keeps no times."""
        stats = output.metrics
        if stats is None:
            return
        # The engine core writes down the machine's steady clock, and only the arrival is a time of day (vLLM 0.32).
        ahead = self.now() - time.monotonic()
        times = RequestTimes(
            name=output.request_id,
            sample=sample,
            arrived=stats.arrival_time,
            begun=ahead + stats.scheduled_ts,
            first_token=ahead + stats.first_token_ts,
            ended=ahead + stats.last_token_ts,
            tokens=stats.num_generation_tokens,
            version=version,
        )
        self._requests.append(times)

    def take(self) -> EngineReport:
        """What was since the last call. Requests that are still in flight stay."""
        now = self.now()
        if self._groups:
            self._busy.append((self._since, now - self._since))
            self._since = now
        report = EngineReport(now, tuple(self._busy), tuple(self._requests))
        self._busy, self._requests = [], []
        return report


class ClockOffset:
    """How far another process's clock is ahead of this one's, in seconds: from the answer that came back soonest, right but
    for half of what that took."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._took = float("inf")

    def learn(self, asked: float, answered: float, theirs: float) -> None:
        """It was `theirs` there when it answered, between two times here."""
        if answered - asked < self._took:
            self._took, self.seconds = answered - asked, theirs - (asked + answered) / 2


def silent_statistics() -> Any:
    """vLLM keeps the times of requests only where someone takes its statistics, and gives them to Prometheus at every
    iteration if to nobody else (0.32). A class for `stat_loggers` that takes that place, and does nothing."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class Silent(PrometheusStatLogger):
        def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
            """No registry."""

        def record(self, *arguments: Any, **options: Any) -> None: ...

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None: ...

        def log_engine_initialized(self) -> None: ...

    return Silent
