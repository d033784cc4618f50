"""One vLLM engine in a Ray actor: groups in, completions out, weights in between."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import time
from collections.abc import Coroutine, Sequence
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
from megarl.rollout.batch import GroupFacts, GroupResult
from megarl.rollout.engine_settings import EngineSettings, engine_arguments
from megarl.rollout.requests import GREEDY, EngineReport, RequestLog, silent_statistics
from megarl.telemetry.stacks import mark_from_environment
from megarl.weight_sync.manifest import SyncAborted, SyncError, SyncLate, WeightManifest
from megarl.weight_sync.segment import machine

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

# How soon the death of an engine core is seen by a call that waits for it.
DEATH_POLL_S = 0.25
ERROR_LINE = re.compile(r"\b\w*(Error|Exception)\b: ")
# Of a worker: whether another process failed before it, what happened, and whether that was a deadline.
Failure = tuple[bool, str, bool]


@dataclass(frozen=True, eq=False)
class GroupRequest:
    """One prompt and the sampling seed of each of its completions; `temperature` and `max_new_tokens` where they are not the
    engine's."""

    position: int
    group: int
    prompt_ids: np.ndarray
    seeds: tuple[int, ...]
    temperature: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class EngineProcess:
    """A started engine: its host's name, the same `machine` as those that it shares memory with, its processes (id and start
    time, the actor first), the shared memory files these made, and how many sequences it decodes at once.
    """

    host: str
    machine: str
    pids: tuple[tuple[int, float], ...]
    shared_files: tuple[str, ...]
    max_concurrent: int


def request_seed(run_seed: int, step: int, prompt: int, member: int, turn: int = 0) -> int:
    """The sampling seed of one completion, the turn of an episode: a function of what is sampled, not of when or where."""
    names = [run_seed, step, prompt, member, *([turn] if turn else [])]
    state = np.random.SeedSequence(names).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))  # vLLM takes a signed 64-bit seed


class Group:
    """A group that an engine works on: its completions come with `answer`, whatever becomes of the requests meanwhile."""

    def __init__(self, request: GroupRequest) -> None:
        self.request = request
        self.answer: asyncio.Future[GroupResult] = asyncio.get_running_loop().create_future()
        self.stopped = True
        self._collecting: asyncio.Task[GroupResult] | None = None

    def start(self, collect: Coroutine[Any, Any, GroupResult]) -> None:
        """Wait for the completions."""
        self.stopped = False
        self._collecting = asyncio.create_task(collect)
        self._collecting.add_done_callback(self._hand_over)

    def stop(self) -> None:
        """Take no completions any more, not even those that vLLM has ready."""
        self.stopped = True
        if self._collecting is not None:
            self._collecting.cancel()

    def _hand_over(self, collecting: asyncio.Task[GroupResult]) -> None:
        if collecting is not self._collecting or self.stopped:
            return
        error = collecting.exception()
        if error is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(collecting.result())


class RolloutEngine:
    """An AsyncLLM with the order of its work fixed, so that a fresh engine repeats it bit for bit.

    All requests are queued while generation is paused and the prefix cache is empty; the scheduler then sees the same
    queue in the same state each time. (Async requests that trickle in would give batches, and so roundings, by luck.)
    """

    def __init__(self, settings: EngineSettings) -> None:
        mark_from_environment("actor")
        self._settings = settings
        self._engine: AsyncLLM | None = None
        self._groups: dict[int, Group] = {}  # by position, in the order of their requests
        self._batches = 0
        self._queued = 0  # requests of the batch
        self._version = 0  # the checkpoint's weights
        self._dirty: str | None = None
        self._asleep = False
        self._paused_at: float | None = None  # on the clock of `time.perf_counter`; None while generation may go on
        # Of what begins with a stand and ends with another state: a batch that was let in before a pause would resume after
        # it, and generate under the half-written weights of the sync.
        self._turn = asyncio.Lock()
        self._log = RequestLog()

    async def start(self, version: int | None = None) -> EngineProcess:
        """Build the engine; where a `version` was published already, it has to receive that one before it answers. Raises
        RolloutError with the log's last errors, where vLLM says why it failed."""
        if version is not None:
            self._dirty = f"it was started again and has the checkpoint's, not version {version}"
        # Counts in whole GiB and overrides kv_cache_memory_bytes; it may come from the user's shell.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        variable = self._settings.device_variable
        if variable is not None:
            # Before anything asks the driver. Ray leaves the list as its node has it, as no GPU is asked of it (2.60).
            os.environ[variable] = visible_devices(os.environ.get(variable), self._settings.place.devices)
        self._bind()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        keep_holding_signals()
        statistics = {"stat_loggers": [silent_statistics()]} if self._settings.times_requests else {}
        try:
            arguments = AsyncEngineArgs(**engine_arguments(self._settings, _device_bytes()))
            self._engine = AsyncLLM.from_engine_args(arguments, **statistics)
            await self._engine.update_weight_version(str(self._version))
            if self._settings.layout.workers > 1:
                await self._engine.collective_rpc("megarl_complete")
            if self._settings.record_routing and not _records_itself():
                await self._engine.collective_rpc("megarl_record_routing")
            if self._settings.quantization is not None:
                formats = await self._utility(self._every_worker("megarl_other_formats"))
                refuse_other_formats(self._settings.quantization, formats)
        except RolloutError:
            await self.stop()  # no retry may find its memory taken
            raise
        except Exception as error:  # whatever vLLM raises is handed to rank 0 as one error, with what its log says
            raise RolloutError(f"vLLM did not start: {error}\n{_log_errors()}") from error
        max_concurrent = self._engine.vllm_config.scheduler_config.max_num_seqs * self._settings.layout.data
        pids = _own_processes()
        files = _shared_files([pid for pid, _ in pids])
        return EngineProcess(platform.node(), machine(), pids, files, max_concurrent)

    def _bind(self) -> None:
        """Keep the engine, and all processes that vLLM starts for it, to its cores of this node."""
        load, workers = self._settings.load, self._settings.layout.workers
        if load is None:
            return
        cores = engine_cores(sorted(os.sched_getaffinity(0)), load, self._settings.position)
        if cores:
            bind(cores)
            threads = worker_threads(cores, workers)
            os.environ["OMP_NUM_THREADS"] = str(threads)  # of processes that begin with Python anew
            torch.set_num_threads(threads)  # and of those that are forked

    async def submit(self, requests: Sequence[GroupRequest], goes_on: bool = False) -> None:
        """Queue a batch, drop what is left of an earlier one, and start. Where it `goes_on` with the sequences of the one
        before, what the cache has of them is used: the same in each run, as all before was. Raises EngineDirty, EngineDied.
        """
        async with self._turn:
            if self._dirty is not None:
                raise EngineDirty(f"weights are unknown: {self._dirty}")
            engine = self._alive()
            for group in self._groups.values():
                group.stop()
                group.answer.cancel()
            await self._stand_still("abort", clear_cache=not goes_on)
            self._groups = {request.position: Group(request) for request in requests}
            await self._begin(list(self._groups.values()))
            await self._utility(engine.resume_generation())

    async def result(self, position: int) -> tuple[GroupFacts, GroupResult]:
        """A group's completions, as two objects: facts for rank 0, tokens for whoever fetches them."""
        groups = self._groups
        result = await groups[position].answer
        del groups[position]
        return GroupFacts.of(result), result

    async def report(self) -> EngineReport:
        """When it had requests since the last call, and those that have ended."""
        return self._log.take()

    async def sleep(self) -> None:
        """Give the device's memory to the trainer until the next sync, whose `pause` brings back the memory of weights, and
        whose `receive` that of the cache. vLLM's level 2 keeps buffers and the parameters that no sync sends, and nothing
        else: a sync writes all other weights."""
        async with self._turn:
            self._dirty = "it sleeps, without weights, until the next sync"
            self._asleep = True
            await self._utility(self._alive().sleep(level=2))

    async def pause(self, version: int, in_flight: str) -> dict[str, float]:
        """Bring generation to a stand before a sync, with empty caches; the seconds it took, and how many completions were
        under way, in groups that are not complete. From here on the engine is dirty, until all its workers have verified and
        loaded the version: one that misses a sync must not answer with old weights.

        `in_flight` is the recipe's. Kept requests are frozen: vLLM computes what they have so far again when it resumes, so
        that none attends to keys of old weights. Aborted ones are submitted again by `receive`.
        """
        begun = time.perf_counter()
        async with self._turn:
            if self._paused_at is None:  # a second attempt finds it paused
                self._paused_at = begun
            self._dirty = f"the sync of version {version} did not finish"
            incomplete = [group for group in self._groups.values() if not group.answer.done()]
            if in_flight == "wait" and incomplete:
                # vLLM itself waits for what runs: not for what it has not begun, or put off for want of memory.
                await asyncio.wait([group.answer for group in incomplete])
            if in_flight == "abort":
                for group in incomplete:
                    group.stop()
            await self._stand_still(in_flight)
            if self._asleep:
                await self._utility(self._alive().wake_up(["weights"]))
            completions = sum(len(group.request.seeds) for group in incomplete)
            return {"pause_s": time.perf_counter() - begun, "in_flight": float(completions)}

    async def receive(self, manifest_values: dict[str, Any]) -> dict[str, float]:
        """Take a version while it is streamed, and resume. Raises SyncError where it did not arrive as it was sent,
        SyncAborted where another process is why."""
        async with self._turn:
            engine, manifest = self._alive(), WeightManifest.from_dict(manifest_values)
            begun = time.perf_counter()
            try:
                take = self._every_worker("megarl_take_weights", manifest_values, self._settings.index)
                workers = _reports(await self._utility(take), manifest.version)
                report = {key: max(worker[key] for worker in workers) for key in workers[0]}
                report["received_bytes"] = sum(worker["received_bytes"] for worker in workers)
                await self._utility(engine.update_weight_version(str(manifest.version)))
                if self._asleep:
                    await self._utility(engine.wake_up(["kv_cache"]))
                    self._asleep = False
                    await self._stand_still("abort")  # vLLM generates as soon as it is wide awake, and nothing is queued yet
            except EngineDied:
                raise
            except Exception as error:  # vLLM hands a worker's exception over as text
                self._dirty = f"the sync of version {manifest.version} failed"
                kind = type(error) if isinstance(error, SyncError) else SyncError
                raise kind(_root_cause(error)) from error
            received = time.perf_counter()
            # Before generation goes on, which is what makes its completions those of the new version.
            self._version, self._dirty = manifest.version, None
            await self._begin([group for group in self._groups.values() if group.stopped])
            await self._utility(engine.resume_generation())
            resumed = time.perf_counter()
            assert self._paused_at is not None, "nothing is received but after a pause"
            report |= {"resume_s": resumed - received, "standstill_s": resumed - self._paused_at}
            self._paused_at = None
            return report | {"receive_s": received - begun}

    async def stop(self) -> None:
        """End vLLM's processes; the actor itself is ended by its pool."""
        if self._engine is not None:
            # vLLM waits 5 s for what has heard no SIGTERM, and then ends it by force.
            self._engine.shutdown(timeout=0.0 if holds_signals() else None)
            self._engine = None

    async def _stand_still(self, mode: str, clear_cache: bool = True) -> None:
        """Pause, with empty caches if nothing else is asked for. `pause_generation` would sleep for 20 ms more, so that
        callers have seen all outputs: here they were waited for, or nobody wants them."""
        core: Any = self._alive().engine_core
        await self._utility(core.pause_scheduler_async(mode=mode, clear_cache=clear_cache))

    async def _begin(self, groups: Sequence[Group]) -> None:
        """Queue all requests of some groups, while generation is paused; no others are under way."""
        if not groups:
            return
        self._batches += 1
        self._queued = 0
        queues = [await self._guard(self._queue(group.request)) for group in groups]
        for group, collectors in zip(groups, queues, strict=True):
            group.start(self._collect(group.request, collectors))

    async def _queue(self, request: GroupRequest) -> list[RequestOutputCollector]:
        engine = self._alive()
        prompt = {"type": "token", "prompt_token_ids": [int(token) for token in request.prompt_ids]}
        queues = []
        for member, seed in enumerate(request.seeds):
            name = self._name(request, member)
            sampling = _sampling(self._settings, seed, request.temperature, request.max_new_tokens)
            # vLLM's own choice goes by counts that come by and by, and another batch may round otherwise.
            rank = self._queued % self._settings.layout.data
            queues.append(await engine.add_request(name, prompt, sampling, data_parallel_rank=rank))
            self._queued += 1
        return queues

    async def _collect(self, request: GroupRequest, queues: list[RequestOutputCollector]) -> GroupResult:
        with self._log.in_flight():
            ended = [await self._guard(queue.get()) for queue in queues]
        outputs = [one.outputs[0] for one in ended]
        for member, output in enumerate(outputs):
            _check_output(request, member, output)
        logprobs = [
            [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
            for output in outputs
        ]
        versions = [[int(span.version) for span in output.weight_versions] for output in outputs]
        for member, one in enumerate(ended):
            sample = GREEDY if request.temperature == 0.0 else request.position * len(ended) + member
            self._log.add(sample, one, versions[member][-1])
        result = GroupResult(
            group=request.group,
            prompt_ids=np.asarray(request.prompt_ids, dtype=np.int32),
            token_ids=np.concatenate([np.asarray(output.token_ids, dtype=np.int32) for output in outputs]),
            logprobs=np.concatenate([np.asarray(values, dtype=np.float32) for values in logprobs]),
            lengths=np.array([len(output.token_ids) for output in outputs], dtype=np.int32),
            finish_reasons=tuple(output.finish_reason for output in outputs),
            first_versions=np.array([spans[0] for spans in versions], dtype=np.int64),
            last_versions=np.array([spans[-1] for spans in versions], dtype=np.int64),
            routing=await self._routing(request, outputs) if self._settings.record_routing else None,
        )
        if not np.isfinite(result.logprobs).all():
            token = int(np.flatnonzero(~np.isfinite(result.logprobs))[0])
            # The trainer publishes no weights that are not finite, so it is the engine that is broken.
            raise EngineDied(
                f"it is broken: a log-probability of group {request.group} is {result.logprobs[token]}, under version "
                f"{self._version} of the weights, which was finite when it was sent"
            )
        return result

    async def _routing(self, request: GroupRequest, outputs: Sequence[Any]) -> np.ndarray:
        """Experts that the group's tokens chose, as `GroupResult` has them. Raises RolloutError where some are missing."""
        from megarl.rollout import routing

        answers: Any = None
        if not _records_itself():
            names = [self._name(request, member) for member in range(len(outputs))]
            answers = await self._utility(self._alive().collective_rpc("megarl_take_routing", args=(names,)))
        try:
            if answers is not None:
                recorded = [routing.from_answer(answer) for answer in answers[0]]  # tensor ranks route alike
            else:
                layers = _layers_with_experts(self._settings.model_path)
                recorded = [routing.layers_with_experts(output.routed_experts, layers) for output in outputs]
            lengths = [len(request.prompt_ids) + len(output.token_ids) for output in outputs]
            return np.concatenate([routing.of_sequence(*one) for one in zip(recorded, lengths, strict=True)])
        except ValueError as error:
            raise RolloutError(f"group {request.group}: {error}") from error

    async def _every_worker(self, method: str, *arguments: Any) -> list[Any]:
        """What each worker answers, by its number; `collective_rpc` gives those of the first data-parallel rank alone."""
        core: Any = self._alive().engine_core
        ranks = await core.call_utility_all_async("collective_rpc", method, None, arguments)
        return [answer for rank in ranks for answer in rank]

    def _name(self, request: GroupRequest, member: int) -> str:
        return f"{self._batches}-{request.position}-{member}"

    def _alive(self) -> AsyncLLM:
        if self._engine is None:
            raise EngineDied("the engine was not started or is stopped")
        return self._engine

    async def _utility(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await a utility call to the engine core. vLLM 0.32 never answers one that the core died under, so look."""
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


def refuse_other_formats(quantization: str, formats: Sequence[Sequence[str]]) -> None:
    """Raises RolloutError where a worker keeps quantised weights as no sync brings them: before the first step, not at its
    end. `formats` is what the workers said of theirs (`WeightReceiver.other_formats`)."""
    found = [one for worker in formats for one in worker]
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise RolloutError(
            f"rollout.quantization = {quantization}: the kernel that vLLM has chosen for these devices has a number format "
            f"of its own, which weight syncs do not write: {found[0]}{more}; set it to null, or take other GPUs"
        )


def _device_bytes() -> int | None:
    """Memory of the first device that this process sees, by its driver, so that none of it is taken; None on CPUs."""
    from vllm.platforms import current_platform

    return None if current_platform.is_cpu() else int(current_platform.get_device_total_memory())


def _records_itself() -> bool:
    """Whether vLLM records which experts tokens choose (see `routing.py`)."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


def _layers_with_experts(model_path: str) -> list[int]:
    shape = ModelShape.from_directory(model_path)
    return [layer for layer in range(shape.num_layers) if shape.has_experts(layer)]


def _sampling(
    settings: EngineSettings, seed: int, temperature: float | None = None, max_new_tokens: int | None = None
) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=settings.temperature if temperature is None else temperature,
        top_p=1.0,
        max_tokens=settings.max_new_tokens if max_new_tokens is None else max_new_tokens,
        stop_token_ids=list(settings.stop_token_ids),
        ignore_eos=True,  # the checkpoint's own end tokens count only where they are among the given ones
        seed=seed,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _check_output(request: GroupRequest, member: int, output: Any) -> None:
    name = f"completion {member} of group {request.group}"
    if output.finish_reason not in ("stop", "length"):
        raise EngineDied(f"{name} ended by {output.finish_reason!r}")
    if not output.token_ids or output.logprobs is None or not output.weight_versions:
        raise RolloutError(f"{name} came back without tokens, log-probabilities or weight version")


def _own_processes() -> tuple[tuple[int, float], ...]:
    """Without Python's resource trackers: those end by themselves when the others have, and then remove semaphores and
    shared memory that a killed process could not.
    """
    own = psutil.Process()
    children = [child for child in own.children(recursive=True) if "resource_tracker" not in " ".join(child.cmdline())]
    return tuple((process.pid, process.create_time()) for process in (own, *children))


def _shared_files(pids: Sequence[int]) -> tuple[str, ...]:
    """Named shared memory that the processes map: vLLM's, since an engine that just started took no weights yet."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()]
    names = {line.split(maxsplit=5)[5] for line in lines if " /dev/shm/" in line}
    return tuple(sorted(name for name in names if not name.endswith("(deleted)")))


def _log_errors(lines: int = 8) -> str:
    """The last errors this process and its children wrote; why an engine core died stands only there."""
    found: list[str] = []
    for stream in (1, 2):
        file = Path(os.readlink(f"/proc/self/fd/{stream}"))
        if file.is_file():
            found += [
                line for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if ERROR_LINE.search(line)
            ]
    return "\n".join(found[-lines:])


def _reports(answers: Sequence[dict[str, float] | Failure], version: int) -> list[dict[str, float]]:
    """Figures of workers that took a version. Raises SyncError where one failed, with what was first, or took another one,
    SyncLate where that was a deadline; SyncAborted where all that failed did so because another process had.
    """
    failures = [answer for answer in answers if isinstance(answer, (tuple, list))]
    if failures:
        aborted, reason, late = min(failures)
        raise (SyncAborted if aborted else SyncLate if late else SyncError)(reason)
    figures = [dict(answer) for answer in answers if isinstance(answer, dict)]
    taken = [one.pop("version") for one in figures]
    if not taken or set(taken) != {version}:
        raise SyncError(f"workers took the versions {taken}, not version {version}")
    return figures


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)
