"""One vLLM engine in a Ray actor: it takes groups of requests, returns completions, and receives weights in between."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from megarl.cluster.cores import bind, engine_cores, worker_threads
from megarl.cluster.preemption import holds_signals, keep_holding_signals
from megarl.models import ModelShape
from megarl.planner.placement import visible_devices
from megarl.rollout import EngineDied, EngineDirty, RolloutError
from megarl.rollout.engine_report import EngineReport, RequestLog
from megarl.rollout.engine_settings import (
    EngineSettings,
    engine_arguments,
    refuse_other_formats,
    sampling_parameters,
    scoring_parameters,
)
from megarl.rollout.groups import GroupFacts, GroupResult
from megarl.telemetry.stacks import mark_from_environment
from megarl.weight_sync.manifest import AdapterManifest, SyncAborted, SyncError, SyncLate, WeightManifest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import WeightVersionSpan
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

DEATH_POLL_S = 0.25  # how often a waiting call looks whether the engine core died
ERROR_LINE = re.compile(r"\b\w*(Error|Exception)\b: ")
ADAPTER = 1  # vLLM's number of the adapters, the same for all versions
GREEDY = -1  # the sample number of a greedy completion, which is in no batch


@dataclass(frozen=True, eq=False)
class GroupRequest:
    """One prompt and the sampling seed of each of its completions. `temperature` and `max_new_tokens` replace the engine's
    unless they are None."""

    position: int
    group: int
    prompt_ids: np.ndarray
    seeds: tuple[int, ...]
    temperature: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class EngineProcess:
    """A started engine: host name, its processes (id and start time, the actor first), the shared memory files they made,
    and how many sequences it decodes at once."""

    host: str
    pids: tuple[tuple[int, float], ...]
    shared_files: tuple[str, ...]
    max_concurrent: int


class PendingGroup:
    """A group that an engine works on. `result` survives a sync that aborts the requests and submits them again."""

    def __init__(self, request: GroupRequest) -> None:
        self.request = request
        self.result: asyncio.Future[GroupResult] = asyncio.get_running_loop().create_future()
        self.stopped = True
        self._collecting: asyncio.Task[GroupResult] | None = None

    def start(self, collect: Coroutine[Any, Any, GroupResult]) -> None:
        """Wait for the completions in a task."""
        self.stopped = False
        self._collecting = asyncio.create_task(collect)
        self._collecting.add_done_callback(self._set_result)

    def stop(self) -> None:
        """Accept no more completions, not even those that vLLM has ready."""
        self.stopped = True
        if self._collecting is not None:
            self._collecting.cancel()

    def _set_result(self, collecting: asyncio.Task[GroupResult]) -> None:
        if collecting is not self._collecting or self.stopped:
            return
        error = collecting.exception()
        if error is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(collecting.result())


class RolloutEngine:
    """An AsyncLLM that schedules the same work in the same order, so that a fresh engine repeats it bit for bit.

    All requests are queued while generation is paused and the prefix cache is empty; the scheduler then sees the same
    queue in the same state each time. (Requests that arrive one by one would give batches, and so roundings, by chance.)
    """

    def __init__(self, settings: EngineSettings) -> None:
        mark_from_environment("actor")
        self._settings = settings
        self._engine: AsyncLLM | None = None
        self._on_cpu = True
        self._groups: dict[int, PendingGroup] = {}  # by position, in the order of their requests
        self._num_batches = 0
        self._version = 0  # the checkpoint's weights
        self._adapter: LoRARequest | None = None  # of the version, if a sync sends adapters
        self._dirty: str | None = None
        self._asleep = False
        self._paused_at: float | None = None  # on `time.perf_counter`'s clock; None while generation may run
        # Serializes calls that pause generation and end in another state. A batch that began before a pause would otherwise
        # resume after it and generate with the half-written weights of the sync.
        self._exclusive = asyncio.Lock()
        self._log = RequestLog()

    async def start(self, version: int | None = None) -> EngineProcess:
        """Build the engine. If a `version` was published already, the engine must receive it before it answers. Raises
        RolloutError with the last errors in the log."""
        if version is not None:
            self._dirty = f"it was started again and has the checkpoint's weights, not version {version}"
        # vLLM's variable counts whole GiB and overrides kv_cache_memory_bytes; the user's shell may set it.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        variable = self._settings.device_variable
        if variable is not None:
            # Before anything asks the driver. Ray 2.60 leaves the node's list unchanged for an actor without GPUs.
            os.environ[variable] = visible_devices(os.environ.get(variable), self._settings.place.devices)
        load = self._settings.load
        if load is not None and (cores := engine_cores(sorted(os.sched_getaffinity(0)), load, self._settings.position)):
            bind(cores)  # also all processes that vLLM starts
            threads = worker_threads(cores, self._settings.layout.workers)
            os.environ["OMP_NUM_THREADS"] = str(threads)  # for processes that start a new Python
            torch.set_num_threads(threads)  # for processes that are forked
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        keep_holding_signals()
        loggers = {"stat_loggers": [silent_stat_logger()]} if self._settings.times_requests else {}
        try:
            self._on_cpu = current_platform.is_cpu()
            # The driver says it, so that none of the memory is taken.
            device_bytes = None if self._on_cpu else int(current_platform.get_device_total_memory())
            arguments = AsyncEngineArgs(**engine_arguments(self._settings, device_bytes))
            self._engine = AsyncLLM.from_engine_args(arguments, **loggers)
            await self._engine.update_weight_version(str(self._version))
            if self._settings.layout.workers > 1:
                await self._engine.collective_rpc("megarl_complete")
            if self._settings.record_routing and self._on_cpu:
                await self._engine.collective_rpc("megarl_record_routing")
            if self._settings.quantization is not None:
                formats = await self._utility(self._every_worker("megarl_other_formats"))
                refuse_other_formats(self._settings.quantization, formats)
        except RolloutError:
            await self.stop()  # so that a retry does not find its memory taken
            raise
        except Exception as error:  # whatever vLLM raises reaches rank 0 as one error with the log's errors
            raise RolloutError(f"vLLM did not start: {error}\n{_log_errors()}") from error
        max_concurrent = self._engine.vllm_config.scheduler_config.max_num_seqs * self._settings.layout.data
        pids, shared_files = _own_processes()
        return EngineProcess(platform.node(), pids, shared_files, max_concurrent)

    async def submit(self, requests: Sequence[GroupRequest], continues: bool = False) -> None:
        """Drop what is left of the last batch, queue a new one and generate. A batch that `continues` the sequences of the
        last one may use the prefix cache, which holds the same in every run, as all before was the same. Raises EngineDirty,
        EngineDied."""
        async with self._exclusive:
            engine = self._clean()
            for group in self._groups.values():
                group.stop()
                group.result.cancel()
            await self._pause_scheduler("abort", clear_cache=not continues)
            self._groups = {request.position: PendingGroup(request) for request in requests}
            await self._queue(list(self._groups.values()))
            await self._utility(engine.resume_generation())

    async def result(self, position: int) -> tuple[GroupFacts, GroupResult]:
        """Wait for a group's completions and return two objects: facts for rank 0, tokens for the ranks that fetch them."""
        groups = self._groups
        result = await groups[position].result
        del groups[position]
        return GroupFacts.of(result), result

    async def score(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        """Return the log-probabilities, at temperature 1, of all tokens but the first of sequences of one length, from every
        data-parallel rank: [ranks, sequences, tokens - 1]. Every worker takes part. Raises EngineDirty, EngineDied."""
        async with self._exclusive:
            engine = self._clean()
            await self._pause_scheduler("keep", clear_cache=False)  # queue all first, for the same batches each time
            ranks, collectors = self._settings.layout.data, []
            for number, tokens in enumerate([*sequences] * ranks):
                prompt: Any = {"type": "token", "prompt_token_ids": tokens.tolist()}
                # No batch of its own, for which workers would drop the experts that they recorded for the last one.
                name, rank = f"{self._num_batches}-canary{number}-0", number // len(sequences)
                parameters, adapter = scoring_parameters(), self._adapter
                added = engine.add_request(name, prompt, parameters, data_parallel_rank=rank, lora_request=adapter)
                collectors.append(await self._guard(added))
            await self._utility(engine.resume_generation())
            outputs = [await self._guard(collector.get()) for collector in collectors]
        return np.stack([prompt_scores(output) for output in outputs]).reshape(ranks, len(sequences), -1)

    async def report(self) -> EngineReport:
        """Return when the engine was busy since the last call, and the requests that ended."""
        return self._log.take()

    async def sleep(self) -> None:
        """Give the device's memory to the trainer until the next sync: `pause` brings back the memory of the weights,
        `receive` that of the cache. vLLM's level 2 keeps only buffers and the parameters that no sync sends; level 1 keeps
        the weights in the host's memory."""
        async with self._exclusive:
            self._dirty = "it sleeps, without weights, until the next sync"
            self._asleep = True
            await self._utility(self._alive().sleep(level=2 if self._settings.adapter is None else 1))

    async def pause(self, version: int, in_flight: str) -> dict[str, float]:
        """Pause generation and empty the caches before a sync. Returns the seconds it took, and how many completions were in
        flight, in groups that are not complete. From here on the engine is dirty, until all its workers have verified and
        loaded the version: an engine that misses a sync must not answer with old weights.

        `in_flight` is the recipe's. vLLM computes the keys of kept requests again when it resumes, so that none attends to
        keys of old weights. `receive` submits aborted requests again.
        """
        begun = time.perf_counter()
        async with self._exclusive:
            if self._paused_at is None:  # else this is a second attempt
                self._paused_at = begun
            self._dirty = f"the sync of version {version} did not finish"
            incomplete = [group for group in self._groups.values() if not group.result.done()]
            if in_flight == "wait" and incomplete:
                # vLLM's own wait covers running requests only, not waiting or preempted ones.
                await asyncio.wait([group.result for group in incomplete])
            if in_flight == "abort":
                for group in incomplete:
                    group.stop()
            await self._pause_scheduler(in_flight)
            if self._asleep:
                await self._utility(self._alive().wake_up(["weights"]))
            completions = sum(len(group.request.seeds) for group in incomplete)
            return {"pause_s": time.perf_counter() - begun, "in_flight": float(completions)}

    async def receive(self, manifest_values: dict[str, Any]) -> dict[str, float]:
        """Receive a version while it is streamed, and resume generation. Returns metrics of the sync. Raises SyncError for
        weights that did not arrive as they were sent, SyncAborted if another process is the cause."""
        version = WeightManifest.from_dict(manifest_values).version

        async def take() -> dict[str, float]:
            answers = self._every_worker("megarl_take_weights", manifest_values, self._settings.index)
            workers = worker_reports(await self._utility(answers), version)
            report = {key: max(worker[key] for worker in workers) for key in workers[0]}
            return report | {"received_bytes": sum(worker["received_bytes"] for worker in workers)}

        return await self._commit(version, take)

    async def receive_adapter(self, manifest: AdapterManifest) -> dict[str, float]:
        """Let vLLM apply a version's adapters in the place of the last ones, and resume generation. As `receive`."""
        from vllm.lora.request import LoRARequest

        async def take() -> dict[str, float]:
            begun = time.perf_counter()
            manifest.check()
            verified = time.perf_counter()
            with tempfile.TemporaryDirectory() as directory:
                for name, content in manifest.files.items():
                    (Path(directory) / name).write_bytes(content)
                # The name is a part of the key of a cached prefix. Completions that a sync keeps have the same number, so
                # they continue under the new adapters.
                request = LoRARequest(f"version-{manifest.version}", ADAPTER, directory, load_inplace=True)
                if not await self._utility(self._alive().add_lora(request)):
                    raise SyncError(f"vLLM did not take the adapters of version {manifest.version}")
            self._adapter = LoRARequest(request.name, ADAPTER, directory)  # of which each worker has a copy
            applied = time.perf_counter()
            times = {"verify_s": verified - begun, "apply_s": applied - verified, "transfer_s": applied - begun}
            return times | {"received_bytes": float(manifest.num_bytes)}

        return await self._commit(manifest.version, take)

    async def _commit(self, version: int, take: Callable[[], Coroutine[Any, Any, dict[str, float]]]) -> dict[str, float]:
        """Take a version, which `take` verifies, and resume generation. Returns the metrics of `take` and more."""
        async with self._exclusive:
            engine = self._alive()
            begun = time.perf_counter()
            try:
                report = await take()
                await self._utility(engine.update_weight_version(str(version)))
                if self._asleep:
                    await self._utility(engine.wake_up(["kv_cache"]))
                    self._asleep = False
                    await self._pause_scheduler("abort")  # vLLM resumes as soon as it is awake, and nothing is queued yet
            except EngineDied:
                raise
            except Exception as error:  # vLLM passes on a worker's exception as text
                self._dirty = f"the sync of version {version} failed"
                kind = type(error) if isinstance(error, SyncError) else SyncError
                cause: BaseException = error
                while cause.__cause__ is not None:
                    cause = cause.__cause__
                raise kind(str(cause)) from error
            received = time.perf_counter()
            # Set before generation resumes: completions from here on are of the new version.
            self._version, self._dirty = version, None
            await self._queue([group for group in self._groups.values() if group.stopped])
            await self._utility(engine.resume_generation())
            resumed = time.perf_counter()
            assert self._paused_at is not None, "an engine receives only after a pause"
            report |= {"resume_s": resumed - received, "standstill_s": resumed - self._paused_at}
            self._paused_at = None
            return report | {"receive_s": received - begun}

    async def stop(self) -> None:
        """End vLLM's processes; the pool ends the actor itself."""
        if self._engine is not None:
            # Processes that hold SIGTERM back would make vLLM wait 5 s before it kills them.
            self._engine.shutdown(timeout=0.0 if holds_signals() else None)
            self._engine = None

    async def _pause_scheduler(self, mode: str, clear_cache: bool = True) -> None:
        """Pause the scheduler. `pause_generation` would sleep 20 ms more, so that callers have seen all outputs: here all
        outputs were waited for, or nobody wants them."""
        core: Any = self._alive().engine_core
        await self._utility(core.pause_scheduler_async(mode=mode, clear_cache=clear_cache))

    async def _queue(self, groups: Sequence[PendingGroup]) -> None:
        """Queue all requests of some groups as a new batch, while generation is paused and nothing else is in flight."""
        if not groups:
            return
        self._num_batches += 1
        engine = self._alive()
        collectors: list[RequestOutputCollector] = []
        for group in groups:
            request = group.request
            prompt = {"type": "token", "prompt_token_ids": [int(token) for token in request.prompt_ids]}
            for member, seed in enumerate(request.seeds):
                sampling = sampling_parameters(self._settings, seed, request.temperature, request.max_new_tokens)
                # vLLM would choose the rank by load, which varies between runs, and another batch may round differently.
                rank = len(collectors) % self._settings.layout.data
                name = self._request_name(request, member)
                added = engine.add_request(name, prompt, sampling, data_parallel_rank=rank, lora_request=self._adapter)
                collectors.append(await self._guard(added))
        for group in groups:
            size = len(group.request.seeds)
            group.start(self._collect(group.request, collectors[:size]))
            del collectors[:size]

    async def _collect(self, request: GroupRequest, collectors: list[RequestOutputCollector]) -> GroupResult:
        """Wait for a group's completions. Raises EngineDied for an engine that is broken, RolloutError for incomplete
        outputs."""
        with self._log.in_flight():
            finished = [await self._guard(collector.get()) for collector in collectors]
        outputs = [request_output.outputs[0] for request_output in finished]
        for member, output in enumerate(outputs):
            name = f"completion {member} of group {request.group}"
            if output.finish_reason not in ("stop", "length"):
                raise EngineDied(f"{name} ended by {output.finish_reason!r}")
            if not output.token_ids or output.logprobs is None or not output.weight_versions:
                raise RolloutError(f"{name} came back without tokens, log-probabilities or weight version")
        logprobs = [
            [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
            for output in outputs
        ]
        versions = [token_versions(output.weight_versions) for output in outputs]
        for member, request_output in enumerate(finished):
            sample = GREEDY if request.temperature == 0.0 else request.position * len(finished) + member
            self._log.add(sample, request_output, int(versions[member][-1]))
        result = GroupResult(
            group=request.group,
            prompt_ids=np.asarray(request.prompt_ids, dtype=np.int32),
            token_ids=np.concatenate([np.asarray(output.token_ids, dtype=np.int32) for output in outputs]),
            logprobs=np.concatenate([np.asarray(values, dtype=np.float32) for values in logprobs]),
            lengths=np.array([len(output.token_ids) for output in outputs], dtype=np.int32),
            finish_reasons=tuple(output.finish_reason for output in outputs),
            versions=np.concatenate(versions),
            routing=await self._routing(request, outputs) if self._settings.record_routing else None,
        )
        if not np.isfinite(result.logprobs).all():
            token = int(np.flatnonzero(~np.isfinite(result.logprobs))[0])
            # The trainer publishes only finite weights, so the engine is broken.
            raise EngineDied(
                f"it is broken: a log-probability of group {request.group} is {result.logprobs[token]}, under version "
                f"{self._version} of the weights, which was finite when it was sent"
            )
        return result

    async def _routing(self, request: GroupRequest, outputs: Sequence[Any]) -> np.ndarray:
        """Return the experts that the group's tokens chose, in the rows of `GroupResult.routing`. Raises RolloutError for
        missing rows."""
        if self._on_cpu:
            names = [self._request_name(request, member) for member in range(len(outputs))]
            ranks: Any = await self._utility(self._alive().collective_rpc("megarl_take_routing", args=(names,)))
            # Tensor ranks route alike. The number format follows from the size: msgpack has no arrays.
            recorded = [
                np.frombuffer(content, {1: np.uint8, 2: np.int16}[len(content) // int(np.prod(shape))]).reshape(shape)
                for content, shape in ranks[0]
            ]
            layers = None
        else:
            recorded = [output.routed_experts for output in outputs]
            model = ModelShape.from_directory(self._settings.model_path)
            layers = [layer for layer in range(model.num_layers) if model.has_experts(layer)]
        lengths = [len(request.prompt_ids) + len(output.token_ids) for output in outputs]
        try:
            return np.concatenate([routing_rows(*pair, layers) for pair in zip(recorded, lengths, strict=True)])
        except ValueError as error:
            raise RolloutError(f"group {request.group}: {error}") from error

    async def _every_worker(self, method: str, *arguments: Any) -> list[Any]:
        """Return the answer of every worker in order; `collective_rpc` calls those of the first data-parallel rank only."""
        core: Any = self._alive().engine_core
        ranks = await core.call_utility_all_async("collective_rpc", method, None, arguments)
        return [answer for rank in ranks for answer in rank]

    def _request_name(self, request: GroupRequest, member: int) -> str:
        return f"{self._num_batches}-{request.position}-{member}"

    def _clean(self) -> AsyncLLM:
        if self._dirty is not None:
            raise EngineDirty(f"weights are unknown: {self._dirty}")
        return self._alive()

    def _alive(self) -> AsyncLLM:
        if self._engine is None:
            raise EngineDied("the engine was not started or is stopped")
        return self._engine

    async def _utility(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await a utility call to the engine core. vLLM 0.32 never answers if the core dies during the call, so poll."""
        engine = self._alive()
        task = asyncio.create_task(self._guard(call))
        while not (await asyncio.wait({task}, timeout=DEATH_POLL_S))[0]:
            if engine.errored:
                task.cancel()
                raise EngineDied(f"vLLM's engine process is gone\n{_log_errors()}")
        return task.result()

    async def _guard(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await a call to vLLM; a dead engine core becomes EngineDied."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await call
        except EngineDeadError as error:
            raise EngineDied(f"vLLM's engine process is gone\n{_log_errors()}") from error


def request_seed(run_seed: int, step: int, prompt: int, member: int, turn: int = 0) -> int:
    """Return the sampling seed of one completion, or of one turn of an episode. It depends on what is sampled, not on when
    or where."""
    names = [run_seed, step, prompt, member, *([turn] if turn else [])]
    state = np.random.SeedSequence(names).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))  # vLLM takes a signed 64-bit seed


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


def worker_reports(answers: Sequence[dict[str, float] | tuple[bool, str, bool]], version: int) -> list[dict[str, float]]:
    """Return the metrics of workers that loaded a version. A worker that failed answers (whether another process failed
    first, message, whether a deadline passed). Raises SyncError with the first cause, SyncLate if that was a deadline,
    SyncAborted if only other processes were the cause, and SyncError for another version."""
    failures = [answer for answer in answers if isinstance(answer, (tuple, list))]
    if failures:
        aborted, reason, late = min(failures)
        raise (SyncAborted if aborted else SyncLate if late else SyncError)(reason)
    metrics = [dict(answer) for answer in answers if isinstance(answer, dict)]
    versions = [worker.pop("version") for worker in metrics]
    if not versions or set(versions) != {version}:
        raise SyncError(f"workers took the versions {versions}, not version {version}")
    return metrics


def _own_processes() -> tuple[tuple[tuple[int, float], ...], tuple[str, ...]]:
    """Return id and start time of this process and its children, and the shared memory files that they map: vLLM's, as an
    engine that just started has received no weights. Python's resource trackers are left out: they end by themselves after
    the others, and then remove semaphores and shared memory that a killed process could not."""
    actor = psutil.Process()
    children = [child for child in actor.children(recursive=True) if "resource_tracker" not in " ".join(child.cmdline())]
    pids = tuple((process.pid, process.create_time()) for process in (actor, *children))
    lines = [line for pid, _ in pids for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()]
    files = {line.split(maxsplit=5)[5] for line in lines if " /dev/shm/" in line}
    return pids, tuple(sorted(file for file in files if not file.endswith("(deleted)")))


def _log_errors(limit: int = 8) -> str:
    """Return the last errors that this process and its children wrote; only there does vLLM say why an engine core died."""
    errors: list[str] = []
    for stream in (1, 2):
        file = Path(os.readlink(f"/proc/self/fd/{stream}"))
        if file.is_file():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            errors += [line for line in lines if ERROR_LINE.search(line)]
    return "\n".join(errors[-limit:])


def silent_stat_logger() -> Any:
    """Return a class for `stat_loggers` that does nothing. vLLM 0.32 records request times only for a stat logger, and its
    default one sends them to Prometheus at every iteration."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class SilentStatLogger(PrometheusStatLogger):
        def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
            """Create no registry."""

        def record(self, *arguments: Any, **options: Any) -> None: ...

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None: ...

        def log_engine_initialized(self) -> None: ...

    return SilentStatLogger
