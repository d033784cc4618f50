"""One engine seen from rank 0: its actor, its processes, the deadline of each call, and its clock."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import ray

from megarl.cluster.cores import BIND, CHOSEN
from megarl.cluster.ray_cluster import node_share
from megarl.platform import current as device_platform
from megarl.rollout import EngineDied, EngineDirty, EngineSilent, RolloutError
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.engine_report import EngineProcess, clear_away
from megarl.rollout.engine_settings import EngineSettings
from megarl.telemetry.stacks import watched_environment
from megarl.telemetry.trace import EngineReport
from megarl.weight_sync.manifest import SyncError

STOP_S = 10.0
# Calls that an engine takes beside its requests: a sync and a report never wait for a request to end.
OTHER_CALLS = 16


def engine_environment(workers: int, user: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables of an engine's processes, which must be set before Python starts.

    The reasons, measured on CPU:
    - Dynamo compiles for seconds at the first log-probability.
    - vLLM's own binding would pin every engine to the same cores.
    - vLLM packs weights into new memory at each sync; huge pages make that 1.4 times faster (`benchmarks/weight_sync.py`).
    - Two OpenMP threads that spin on one core are ten times slower than one thread. An engine therefore has one thread
      until it is bound to its own cores. There its threads spin for some milliseconds, libgomp's default, which gives vLLM
      alone 1.3 times the rate.

    OpenMP variables of the user's environment stay (`cores.py`); then no process is bound and no thread spins.
    """
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false"}
    if device_platform.kind != "cpu":
        return variables
    chosen = {} if BIND in user else {name: user[name] for name in CHOSEN if name in user}
    variables["GLIBC_TUNABLES"] = user.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    if chosen:
        variables["OMP_WAIT_POLICY"] = user.get("OMP_WAIT_POLICY", "PASSIVE")
    variables |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} | chosen
    if workers == 1:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engine core and worker share one process
    return variables


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raise what an engine raised, and EngineDied if its process is gone."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, (RolloutError, EngineDied, EngineDirty, SyncError)):
            raise error.cause from None  # its message is complete; Ray's frames add nothing
        raise
    except ray.exceptions.RayActorError as error:
        raise EngineDied(f"the actor's process is gone: {error}") from error


class EngineHandle:
    """Starts, calls and ends one engine. Every call has the deadline `timeout_s`. The engine takes up to `max_requests` at a
    time; more would wait inside Ray, where nobody sees them."""

    def __init__(self, settings: EngineSettings, timeout_s: float, max_requests: int) -> None:
        self.settings, self.max_requests = settings, max_requests
        self.name = settings.name
        self.restarts = 0
        self.is_lost = False  # for good: it was restarted too often, and the run goes on without it
        self.process: EngineProcess | None = None
        self._timeout_s = timeout_s
        self._actor: Any = None
        self._round_trip_s, self._offset_s = float("inf"), 0.0  # of the report with the shortest round trip

    def begin_start(self, version: int | None = None) -> Any:
        """Create the actor on its node and let it build its engine; return the reference that `finish_start` waits for.
        `version` was published before. Raises RolloutError if the node is gone."""
        environment = engine_environment(self.settings.layout.workers)
        remote = ray.remote(RolloutEngine).options(
            # Ray does not know the GPUs of trainer ranks. The engine itself takes the GPUs of its place.
            num_cpus=0,
            num_gpus=0,
            resources=node_share(self.settings.place.node),
            max_concurrency=self.max_requests + OTHER_CALLS,
            max_restarts=0,  # the pool makes a new actor instead: one way back for a dead actor and a dead engine core
            runtime_env={
                "env_vars": environment | watched_environment(f"engine-{self.settings.teacher or self.settings.index}")
            },
        )
        self._actor = remote.remote(self.settings)
        return self.call("start", version)

    def finish_start(self, reference: Any) -> None:
        """Raises RolloutError if vLLM did not start, EngineDied if its process ended."""
        try:
            self.process = self.get(reference, "start")
        except RolloutError as error:
            raise type(error)(f"{self.name}: {error}") from error

    def call(self, method: str, *arguments: Any) -> Any:
        """Begin a call and return its reference, or references. Raises EngineDied if there is no actor any more."""
        if self._actor is None:
            raise EngineDied("it was ended and not started again")
        return getattr(self._actor, method).remote(*arguments)

    def get(self, reference: Any, phase: str, timeout_s: float | None = None, rule: str = "") -> Any:
        """Return the answer of a call. The deadline is `rollout.timeout_s`, or `timeout_s` by a `rule` for the error. Raises
        EngineDied for a dead engine, EngineSilent at the deadline, and otherwise what the engine raised."""
        rule = rule or f"rollout.timeout_s = {self._timeout_s:g}"
        try:
            with _errors():
                return ray.get(reference, timeout=self._timeout_s if timeout_s is None else timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise EngineSilent(f"no answer of {self.name} in phase {phase} within {rule}") from error

    async def answer(self, reference: Any) -> Any:
        """Return the answer of a call in an event loop, without a deadline. Raises EngineDied for a dead engine, otherwise
        what the engine raised."""
        with _errors():
            return await reference

    def report(self) -> EngineReport:
        """Return what the engine did since the last call. Its clock is compared with this one's in the middle of the
        shortest round trip: the error of the offset is at most half of that. Raises EngineDied."""
        sent = time.time()
        report: EngineReport = self.get(self.call("report"), "rollout")
        answered = time.time()
        if answered - sent < self._round_trip_s:
            self._round_trip_s, self._offset_s = answered - sent, report.now - (sent + answered) / 2
        host = "" if self.process is None else self.process.host
        return replace(report, engine=self.settings.index, host=host, offset_s=self._offset_s)

    def kill(self) -> None:
        """End the actor and what it may leave behind: vLLM's children outlive an actor that was killed, and their shared
        memory (160 MB for two tensor ranks) outlives them."""
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)
            self._actor = None
        if self.process is not None:
            if self.settings.place.node == 0:  # rank 0's node
                clear_away(self.process)
            else:
                with contextlib.suppress(RolloutError, ray.exceptions.RayError):  # its node is gone, or does not answer
                    remote = ray.remote(clear_away).options(num_cpus=0, resources=node_share(self.settings.place.node))
                    ray.get(remote.remote(self.process), timeout=STOP_S)
        self.process = None

    def stop(self) -> None:
        """End the engine in good order if it answers, else by force."""
        if self._actor is not None and self.process is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self.call("stop"), timeout=STOP_S)
        self.kill()
