"""What an engine tells rank 0: its processes, its last errors, when it was busy, and what vLLM answered, as arrays."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from megarl.telemetry.trace import EngineReport, RequestTimes

if TYPE_CHECKING:
    from vllm.outputs import WeightVersionSpan

ERROR_LINE = re.compile(r"\b\w*(Error|Exception)\b: ")


@dataclass(frozen=True)
class EngineProcess:
    """A started engine: host name, its processes (id and start time, the actor first), the shared memory files they made,
    and how many sequences it decodes at once."""

    host: str
    pids: tuple[tuple[int, float], ...]
    shared_files: tuple[str, ...]
    max_concurrent: int


def clear_away(process: EngineProcess) -> None:
    """Kill an engine's processes except the actor, and remove their shared memory. Runs on the engine's node."""
    for pid, created in process.pids[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child = psutil.Process(pid)
            if child.create_time() == created:  # else the number belongs to another process by now
                child.kill()
    for file in process.shared_files:
        Path(file).unlink(missing_ok=True)


def own_processes() -> tuple[tuple[tuple[int, float], ...], tuple[str, ...]]:
    """Return id and start time of this process and its children, and the shared memory files that they map: vLLM's, as an
    engine that just started has received no weights. Python's resource trackers are left out: they end by themselves after
    the others, and then remove semaphores and shared memory that a killed process could not."""
    actor = psutil.Process()
    children = [child for child in actor.children(recursive=True) if "resource_tracker" not in " ".join(child.cmdline())]
    pids = tuple((process.pid, process.create_time()) for process in (actor, *children))
    lines = [line for pid, _ in pids for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()]
    files = {line.split(maxsplit=5)[5] for line in lines if " /dev/shm/" in line}
    return pids, tuple(sorted(file for file in files if not file.endswith("(deleted)")))


def log_errors() -> str:
    """Return the last errors that this process and its children wrote; only there does vLLM say why an engine core died."""
    errors: list[str] = []
    for stream in (1, 2):
        file = Path(os.readlink(f"/proc/self/fd/{stream}"))
        if file.is_file():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            errors += [line for line in lines if ERROR_LINE.search(line)]
    return "\n".join(errors[-8:])


@dataclass
class RequestLog:
    """Collects an engine's next report."""

    _num_groups: int = 0  # in flight
    _busy_since: float = 0.0
    _busy: list[tuple[float, float]] = field(default_factory=list)
    _requests: list[RequestTimes] = field(default_factory=list)
    _num_preempted: int = 0

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a group as in flight inside the block."""
        if self._num_groups == 0:
            self._busy_since = time.time()
        self._num_groups += 1
        try:
            yield
        finally:
            self._num_groups -= 1
            if self._num_groups == 0:
                self._busy.append((self._busy_since, time.time() - self._busy_since))

    def add(self, group: int, output: Any, version: int) -> None:
        """Record a finished `RequestOutput` of vLLM, if the engine records times."""
        stats = output.metrics
        if stats is None:
            return
        # vLLM 0.32 records the machine's monotonic clock; only the arrival is a time of day.
        ahead = time.time() - time.monotonic()
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
        now = time.time()
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


def token_versions(spans: Sequence[WeightVersionSpan]) -> np.ndarray:
    """Return the weight version of each token, int64 [tokens], from vLLM's spans of tokens."""
    return np.repeat(np.array([int(span.version) for span in spans], np.int64), [span.end - span.start for span in spans])


def prompt_scores(output: Any) -> np.ndarray:
    """Return the log-probabilities of a prompt's tokens but the first, float32, from a `RequestOutput` of vLLM."""
    tokens = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return np.array([entry[token].logprob for token, entry in tokens], np.float32)


def routing_rows(recorded: np.ndarray | None, num_tokens: int, layers: Sequence[int] | None) -> np.ndarray:
    """Return the experts [num_tokens - 1, layers, experts a token] of a sequence: its last token was never fed, or only
    because the engine ran ahead. `layers` selects rows of all layers, as vLLM records them. Raises ValueError if tokens are
    missing."""
    if recorded is None:
        raise ValueError("vLLM recorded no experts")
    if len(recorded) < num_tokens - 1:
        raise ValueError(f"{len(recorded)} of {num_tokens - 1} tokens have recorded experts")
    rows = recorded[: num_tokens - 1]
    return rows if layers is None else rows[:, list(layers)]
