"""What an engine did since it was last asked: when it was busy, and the times of its requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class RequestTimes(NamedTuple):
    """The times of one completion, in seconds since 1970 of the engine's clock. `group` is that of the prompt, -1 for a
    greedy completion. `begun` is when the scheduler admitted it; `version` is the weight version that sampled its last
    token. A time that vLLM did not record is 0."""

    name: str
    group: int
    arrived: float
    begun: float
    first_token: float
    ended: float
    tokens: int
    version: int


@dataclass(frozen=True)
class EngineReport:
    """What an engine did since its last report. `now` is its clock at the answer, in seconds since 1970; `busy` holds
    (start, seconds) of each time with requests in flight. `num_preempted` counts how often vLLM took a request's cache away;
    it is 0 if the engine records no times. Rank 0 fills in `engine`, `host` and `offset_s`, by which the
    engine's clock is ahead of rank 0's."""

    now: float
    busy: tuple[tuple[float, float], ...] = ()
    requests: tuple[RequestTimes, ...] = ()
    num_preempted: int = 0
    engine: int = 0
    host: str = ""
    offset_s: float = 0.0

    @property
    def busy_s(self) -> float:
        return sum(seconds for _, seconds in self.busy)


@dataclass
class RequestLog:
    """Collects an engine's next report."""

    now: Callable[[], float] = time.time
    _num_groups: int = 0  # in flight
    _busy_since: float = 0.0
    _busy: list[tuple[float, float]] = field(default_factory=list)
    _requests: list[RequestTimes] = field(default_factory=list)
    _num_preempted: int = 0

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a group as in flight inside the block."""
        if self._num_groups == 0:
            self._busy_since = self.now()
        self._num_groups += 1
        try:
            yield
        finally:
            self._num_groups -= 1
            if self._num_groups == 0:
                self._busy.append((self._busy_since, self.now() - self._busy_since))

    def add(self, group: int, output: Any, version: int) -> None:
        """Record a finished `RequestOutput` of vLLM, if the engine records times."""
        stats = output.metrics
        if stats is None:
            return
        # vLLM 0.32 records the machine's monotonic clock; only the arrival is a time of day.
        ahead = self.now() - time.monotonic()
        times = RequestTimes(
            name=output.request_id,
            group=group,
            arrived=stats.arrival_time,
            begun=ahead + stats.scheduled_ts,
            first_token=ahead + stats.first_token_ts,
            ended=ahead + stats.last_token_ts,
            tokens=stats.num_generation_tokens,
            version=version,
        )
        self._requests.append(times)

    def count_preempted(self, count: int) -> None:
        self._num_preempted += count

    def take(self) -> EngineReport:
        """Return the report since the last call. Requests in flight appear in a later report."""
        now = self.now()
        if self._num_groups:
            self._busy.append((self._busy_since, now - self._busy_since))
            self._busy_since = now
        report = EngineReport(now, tuple(self._busy), tuple(self._requests), self._num_preempted)
        self._busy, self._requests, self._num_preempted = [], [], 0
        return report


def counting_stat_logger(count_preempted: Callable[[int], None]) -> Any:
    """Return a class for `stat_loggers` that only counts preempted requests. vLLM 0.32 records request times only for a stat
    logger, and its default one sends them to Prometheus at every iteration."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class CountingStatLogger(PrometheusStatLogger):
        def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
            """Create no registry."""

        def record(self, scheduler_stats: Any, iteration_stats: Any, *arguments: Any, **options: Any) -> None:
            if iteration_stats is not None:
                count_preempted(iteration_stats.num_preempted_reqs)

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None: ...

        def log_engine_initialized(self) -> None: ...

    return CountingStatLogger
