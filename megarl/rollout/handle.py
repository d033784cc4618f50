"""One engine seen from rank 0: its actor, its processes, its deadlines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import ray

from megarl.cluster.cores import BIND, CHOSEN
from megarl.cluster.ray_cluster import node_share
from megarl.platform import current as device_platform
from megarl.rollout import EngineDied, EngineDirty, EngineSilent, RolloutError
from megarl.rollout.engine import EngineProcess, RolloutEngine
from megarl.rollout.engine_settings import EngineSettings
from megarl.telemetry.stacks import watched_environment
from megarl.weight_sync.manifest import SyncError
from megarl.weight_sync.segment import machine

STOP_S = 10.0


def engine_environment(workers: int, own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of an engine's processes, set before Python starts. Why, by measurement, on CPU: Dynamo compiles for
    seconds at the first log-probability; vLLM's own binding would pin every engine to the same cores; what vLLM packs at
    each sync goes to memory that is new, which large pages give faster (1.4 times, `benchmarks/weight_sync.py`); two OpenMP
    threads that wait in a loop for their turn on one core are ten times slower than one. So an engine has one thread until
    it is bound to cores of its own, where it waits as libgomp does, in a loop for some milliseconds (vLLM alone: 1.3 times
    the rate). What the user has chosen in their `own` environment stays (`cores.py`); nobody is bound then, and no thread
    loops.
    """
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false"}
    if device_platform.kind != "cpu":
        return variables
    chosen = {} if BIND in own else {name: own[name] for name in CHOSEN if name in own}
    variables["GLIBC_TUNABLES"] = own.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    if chosen:
        variables["OMP_WAIT_POLICY"] = own.get("OMP_WAIT_POLICY", "PASSIVE")
    variables |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} | chosen
    if workers == 1:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # lets engine core and worker share one process
    return variables


def clear_away(process: EngineProcess) -> None:
    """On an engine's own node, end its processes but the actor, and remove their shared memory."""
    for pid, created in process.pids[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child = psutil.Process(pid)
            if child.create_time() == created:  # else the number belongs to another process by now
                child.kill()
    for file in process.shared_files:
        Path(file).unlink(missing_ok=True)


class EngineHandle:
    """Starts, calls and ends one engine. Every call has the deadline `timeout_s`."""

    def __init__(self, settings: EngineSettings, timeout_s: float, max_calls: int) -> None:
        self.settings = settings
        self.name = f"rollout engine {settings.index}"
        self.restarts = 0
        self._timeout_s = timeout_s
        self._max_calls = max_calls
        self._actor: Any = None
        self.process: EngineProcess | None = None

    def begin_start(self, version: int | None = None) -> Any:
        """Create the actor on its node and let it build its engine; the reference that `finish_start` waits for. `version`
        was published before it. Raises RolloutError where the node is gone."""
        environment = engine_environment(self.settings.layout.workers)
        remote = ray.remote(RolloutEngine).options(
            # Trainer ranks have most GPUs, of which Ray knows nothing: the engine itself takes those of its place.
            num_cpus=0,
            num_gpus=0,
            resources=node_share(self.settings.place.node),
            max_concurrency=self._max_calls,
            max_restarts=0,  # a new actor is made instead: one way back for a dead actor and a dead engine core
            runtime_env={"env_vars": environment | watched_environment(f"engine-{self.settings.index}")},
        )
        self._actor = remote.remote(self.settings)
        return self.call("start", version)

    def finish_start(self, reference: Any) -> None:
        """Raises RolloutError where vLLM did not start, EngineDied where its process ended."""
        try:
            self.process = self.get(reference, "start")
        except RolloutError as error:
            raise type(error)(f"{self.name}: {error}") from error

    def call(self, method: str, *arguments: Any, num_returns: int = 1) -> Any:
        """Begin a call; its reference (or references). Raises EngineDied where there is no actor any more."""
        if self._actor is None:
            raise EngineDied("it was ended and not started again")
        return getattr(self._actor, method).options(num_returns=num_returns).remote(*arguments)

    def get(self, reference: Any, phase: str) -> Any:
        """The answer of a call. Raises EngineDied for a dead engine, RolloutError at the deadline, and what the engine
        raised otherwise.
        """
        return self._get(reference, phase, self._timeout_s, f"rollout.timeout_s = {self._timeout_s:g}")

    def get_paused(self, reference: Any, in_flight: str, timeout_s: float) -> dict[str, float]:
        """What the engine says when it stands still. As `get`; `timeout_s` is the deadline of a sync, which holds where no
        completions are waited for."""
        if in_flight == "wait":
            rule = f"rollout.timeout_s = {self._timeout_s:g}: weight_sync.in_flight = wait, for what it generates"
            return self._get(reference, "weight_sync", self._timeout_s, rule)
        return self._get(reference, "weight_sync", timeout_s, f"weight_sync.timeout_s = {timeout_s:g}")

    def get_report(self, reference: Any, timeout_s: float, waits: int) -> dict[str, float]:
        """What the engine says about a sync whose last bucket was sent. As `get`, with `waits` times the deadline of a
        sync."""
        return self._get(reference, "weight_sync", waits * timeout_s, f"{waits} times weight_sync.timeout_s = {timeout_s:g}")

    def _get(self, reference: Any, phase: str, timeout_s: float, rule: str) -> Any:
        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise EngineSilent(f"no answer of {self.name} in phase {phase} within {rule}") from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, (RolloutError, EngineDied, EngineDirty, SyncError)):
                raise error.cause from None  # the message says all; Ray's frames around it say nothing
            raise
        except ray.exceptions.RayActorError as error:
            raise EngineDied(f"the actor's process is gone: {error}") from error

    def kill(self) -> None:
        """End the actor and what it may leave behind: vLLM's children outlive an actor that was killed, and their
        shared memory (160 MB where there are two tensor ranks) outlives them.
        """
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)
            self._actor = None
        if self.process is not None:
            if self.process.machine == machine():
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
