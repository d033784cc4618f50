"""One vLLM engine in a Ray actor: it takes groups of requests, returns completions, and receives weights in between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import platform
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import ray
import torch

from megarl.cluster.cores import bind, engine_cores, worker_threads
from megarl.cluster.preemption import holds_signals, keep_holding_signals
from megarl.data.sample import Completion
from megarl.planner.placement import visible_devices
from megarl.rollout import EngineDied, EngineDirty, RolloutError
from megarl.rollout.engine_report import (
    EngineProcess,
    RequestLog,
    counting_stat_logger,
    log_errors,
    own_processes,
    prompt_scores,
    routing_rows,
    token_versions,
)
from megarl.rollout.engine_settings import (
    EngineSettings,
    engine_arguments,
    refuse_other_formats,
    sampling_parameters,
    scoring_parameters,
)
from megarl.rollout.groups import GroupFacts, GroupResult, Payload
from megarl.rollout.plugin import UNRECORDED, require_installed
from megarl.telemetry.stacks import mark_from_environment
from megarl.telemetry.trace import EngineReport
from megarl.weight_sync.manifest import AdapterManifest, SyncAborted, SyncError, SyncLate, WeightManifest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

DEATH_POLL_S = 0.25  # how often a waiting call looks whether the engine core died
ADAPTER = 1  # vLLM's number of the adapters, the same for all versions
GREEDY = -1  # in the place of the group of a greedy completion


@dataclass(frozen=True, eq=False)
class GroupRequest:
    """One prompt and the seed of each of its completions (numbers for `vllm_seed`), under a `position` that no other group
    of the engine has. `temperature` and `max_new_tokens` replace the engine's unless they are None. `partials`, if any, are
    what each completion has already; the result holds the whole completions. An evaluation is in no report of the engine."""

    position: int
    group: int
    prompt_ids: np.ndarray
    seeds: tuple[tuple[int, ...], ...]
    temperature: float | None = None
    max_new_tokens: int | None = None
    partials: tuple[Completion, ...] = ()
    is_evaluation: bool = False

    def __post_init__(self) -> None:
        if len(self.partials) not in (0, len(self.seeds)):
            raise ValueError(f"group {self.group}: {len(self.partials)} partials for {len(self.seeds)} completions")


class BatchPart(NamedTuple):
    """A request and the batch with which it is queued: the batch's number among those that the engine gets, its number of
    requests, and `continues` as in `RolloutEngine.submit`."""

    request: GroupRequest
    batch: int
    size: int
    continues: bool


@dataclass(eq=False)
class PendingGroup:
    """A group that an engine works on. `result` survives a sync that aborts its requests, which `partials` continue."""

    request: GroupRequest
    first_rank: int  # the data-parallel rank of member 0; the others follow in turn
    partials: list[Completion]  # by member
    result: asyncio.Future[GroupResult]
    attempt: int = 0  # how often its unfinished members were queued
    collecting: asyncio.Task[None] | None = None  # waits for queued requests; None if none are queued
    is_cut: bool = False  # whether its requests are aborted on purpose

    @property
    def is_queued(self) -> bool:
        return self.collecting is not None and not self.result.done()

    def name(self, member: int) -> str:
        """Return the name of a member's current request."""
        return f"{self.request.position}-{member}-{self.attempt}"

    def unfinished(self) -> list[int]:
        return [member for member, partial in enumerate(self.partials) if not partial.finish_reason]


class RolloutEngine:
    """An AsyncLLM that takes groups of requests at any time.

    A fresh engine repeats bit for bit the groups that an idle engine receives together: they are queued while generation is
    paused and the prefix cache is empty, so the scheduler sees the same. Groups that join others get roundings by chance.
    """

    def __init__(self, settings: EngineSettings) -> None:
        mark_from_environment("actor")
        self._settings = settings
        self._engine: AsyncLLM | None = None
        self._on_cpu = True
        self._groups: dict[int, PendingGroup] = {}  # by position, in the order of their requests
        self._arriving: dict[int, tuple[list[GroupRequest], asyncio.Future[None]]] = {}  # batches that are not whole
        self._num_batches = 0  # that were queued, or refused
        self._batch_ended = asyncio.Condition()
        self._num_queued = 0  # completions since the engine was idle
        self._num_scored = 0
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
        require_installed()
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
        logger_class = counting_stat_logger(self._log.count_preempted) if self._settings.times_requests else None
        loggers = {} if logger_class is None else {"stat_loggers": [logger_class]}
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
            if (quantization := self._settings.planned.quantization) is not None:
                formats = await self._utility(self._every_worker("megarl_other_formats"))
                refuse_other_formats(quantization, formats)
        except RolloutError:
            await self.stop()  # so that a retry does not find its memory taken
            raise
        except Exception as error:  # whatever vLLM raises reaches rank 0 as one error with the log's errors
            raise RolloutError(f"vLLM did not start: {error}\n{log_errors()}") from error
        max_concurrent = self._engine.vllm_config.scheduler_config.max_num_seqs * self._settings.layout.data
        pids, shared_files = own_processes()
        return EngineProcess(platform.node(), pids, shared_files, max_concurrent)

    @ray.method(num_returns=2)
    async def sample(self, pickled_part: bytes) -> tuple[GroupFacts, GroupResult]:
        """Complete the group of a `BatchPart`; `submit` gets its batch once all parts are there, in whichever order they
        came. Raises and returns as `submit` and `result`."""
        part: BatchPart = pickle.loads(pickled_part)
        requests, queued = self._arriving.setdefault(part.batch, ([], asyncio.get_running_loop().create_future()))
        requests.append(part.request)
        if len(requests) == part.size:
            del self._arriving[part.batch]
            try:
                await self.submit(sorted(requests, key=lambda request: request.position), part.continues)
                queued.set_result(None)
            except Exception as error:  # all parts raise it
                queued.set_exception(error)
            async with self._batch_ended:
                self._num_batches += 1
                self._batch_ended.notify_all()
        await queued
        return await self.result(part.request.position)

    async def holds(self, num_batches: int) -> None:
        """Return once so many batches were queued or refused since the start."""
        async with self._batch_ended:
            await self._batch_ended.wait_for(lambda: self._num_batches >= num_batches)

    async def submit(self, requests: Sequence[GroupRequest], continues: bool = False) -> None:
        """Queue groups and generate; groups that are under way go on. On an idle engine the groups are queued while
        generation is paused, with an empty prefix cache unless they continue sequences of the groups before them: the cache
        then holds the same in every run, as all before was the same. A group replaces the group at its position, if any, so
        that a caller may submit again what it gave up. Raises EngineDirty, EngineDied."""
        async with self._exclusive:
            engine = self._clean()
            await self._drop([request.position for request in requests])
            is_idle = all(group.result.done() for group in self._groups.values())
            if is_idle:
                await self._pause_scheduler("abort", clear_cache=not continues)
                self._num_queued = 0
            groups = []
            for request in requests:
                partials = list(request.partials) or [Completion.empty() for _ in request.seeds]
                groups.append(PendingGroup(request, self._num_queued, partials, asyncio.get_running_loop().create_future()))
                self._num_queued += len(request.seeds)
            self._groups |= {group.request.position: group for group in groups}
            await self._queue(groups)
            if is_idle:
                await self._utility(engine.resume_generation())

    @ray.method(num_returns=2)
    async def result(self, position: int) -> tuple[GroupFacts, GroupResult]:
        """Wait for a group's completions and return two objects: facts for rank 0, tokens for the ranks that fetch them.
        Raises RolloutError for a group that was replaced."""
        group = self._groups.get(position)
        if group is not None:
            await asyncio.wait([group.result])
        if group is None or group.result.cancelled():
            raise RolloutError(f"the engine has no group at position {position}; it was replaced, or never submitted")
        self._groups.pop(position, None)
        result = group.result.result()
        return GroupFacts.of(result), result

    async def cut(self, positions: Sequence[int] | None = None) -> dict[int, tuple[Completion, ...]]:
        """Return what each group has sampled so far, finished or not, and continue the unfinished ones. For all groups that
        the engine has, or some."""
        async with self._exclusive:
            groups = [group for position, group in self._groups.items() if positions is None or position in positions]
            await self._cut(groups)
            partials = {group.request.position: tuple(group.partials) for group in groups}
            if self._dirty is None:  # else `receive` continues them
                await self._queue([group for group in groups if not group.result.done()])
            return partials

    async def score(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        """Return the log-probabilities, at temperature 1, of all tokens but the first of sequences of one length, from every
        data-parallel rank: [ranks, sequences, tokens - 1]. Every worker takes part. Raises EngineDirty, EngineDied."""
        ranks = self._settings.layout.data
        return np.stack(await self._scores([*sequences] * ranks)).reshape(ranks, len(sequences), -1)

    async def judge(self, payload: Payload, samples: Sequence[int]) -> list[np.ndarray]:
        """Return the log-probabilities, at temperature 1, of the own tokens of some samples of a batch. Raises as `score`,
        and what `payload.fetch` raises."""
        fetched = await asyncio.to_thread(payload.fetch, samples)
        sequences = [fetched[number] for number in samples]
        scores = await self._scores([np.concatenate([s.prompt_ids, s.completion.token_ids]) for s in sequences])
        pairs = zip(sequences, scores, strict=True)
        return [logprobs[len(sample.prompt_ids) - 1 :][sample.completion.own] for sample, logprobs in pairs]

    async def _scores(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Score sequences, which the data-parallel ranks share in equal parts, one after the other."""
        async with self._exclusive:
            engine = self._clean()
            await self._pause_scheduler("keep", clear_cache=False)  # queue all first, for the same batches each time
            collectors = []
            for number, tokens in enumerate(sequences):
                prompt: Any = {"type": "token", "prompt_token_ids": tokens.tolist()}
                self._num_scored += 1
                name, rank = f"{UNRECORDED}-{self._num_scored}", number * self._settings.layout.data // len(sequences)
                parameters, adapter = scoring_parameters(), self._adapter
                added = engine.add_request(name, prompt, parameters, data_parallel_rank=rank, lora_request=adapter)
                collectors.append(await self._guard(added))
            await self._utility(engine.resume_generation())
            outputs = [await self._guard(collector.get()) for collector in collectors]
        return [prompt_scores(output) for output in outputs]

    async def report(self) -> EngineReport:
        """Return when the engine was busy since the last call, and the requests that ended."""
        return self._log.take()

    async def sleep(self) -> None:
        """Give the device's memory to the trainer until the next sync: `pause` brings back the memory of the weights,
        `receive` that of the cache. vLLM's level 2 keeps only buffers and the parameters that no sync sends; level 1 keeps
        the weights in the host's memory."""
        async with self._exclusive:
            self._dirty = "it sleeps, without weights, until the next sync"
            await self._cut(list(self._groups.values()))
            self._asleep = True
            await self._utility(self._alive().sleep(level=2 if self._settings.adapter is None else 1))

    async def pause(self, version: int, in_flight: str) -> dict[str, float]:
        """Pause generation and empty the caches before a sync. Returns the seconds it took, and how many completions were in
        flight, in groups that are not complete. From here on the engine is dirty, until all its workers have verified and
        loaded the version: an engine that misses a sync must not answer with old weights.

        `in_flight` is the recipe's. vLLM computes the keys of kept requests again when it resumes, so that none attends to
        keys of old weights. `receive` continues aborted requests from the tokens that they had.
        """
        begun = time.perf_counter()
        async with self._exclusive:
            if self._paused_at is None:  # else this is a second attempt
                self._paused_at = begun
            self._dirty = f"the sync of version {version} did not finish"
            incomplete = [group for group in self._groups.values() if not group.result.done()]
            if in_flight == "wait" and (queued := [group.result for group in incomplete if group.is_queued]):
                # vLLM's own wait covers running requests only, not waiting or preempted ones.
                await asyncio.wait(queued)
            if in_flight == "abort":
                await self._cut(incomplete)
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
            await self._queue([group for group in self._groups.values() if not group.result.done() and not group.is_queued])
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
        """Queue the unfinished members of groups that have no requests queued."""
        engine = self._alive()
        for group in groups:
            request = group.request
            limit = self._settings.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
            group.attempt, group.is_cut = group.attempt + 1, False
            collectors: dict[int, RequestOutputCollector] = {}
            for member in group.unfinished():
                partial, seed = group.partials[member], vllm_seed(request.seeds[member])
                prompt = {"type": "token", "prompt_token_ids": [*request.prompt_ids.tolist(), *partial.token_ids.tolist()]}
                if len(partial):  # not the random numbers of its beginning again
                    seed = vllm_seed([seed, len(partial)])
                sampling = sampling_parameters(self._settings, seed, request.temperature, limit - len(partial))
                # vLLM would choose the rank by load, which varies between runs, and another batch may round differently.
                rank, adapter = (group.first_rank + member) % self._settings.layout.data, self._adapter
                added = engine.add_request(
                    group.name(member), prompt, sampling, data_parallel_rank=rank, lora_request=adapter
                )
                collectors[member] = await self._guard(added)
            group.collecting = asyncio.create_task(self._collect(group, collectors))

    async def _cut(self, groups: Sequence[PendingGroup]) -> None:
        """Abort the requests of groups, and wait until their partials hold all that vLLM answered."""
        queued = [group for group in groups if group.is_queued]
        if not queued:
            return
        for group in queued:
            group.is_cut = True
        await self._guard(self._alive().abort([group.name(member) for group in queued for member in group.unfinished()]))
        await asyncio.wait([group.collecting for group in queued if group.collecting is not None])
        for group in queued:
            group.collecting = None

    async def _drop(self, positions: Sequence[int]) -> None:
        """Abort and forget groups."""
        dropped = [self._groups.pop(position) for position in positions if position in self._groups]
        await self._cut(dropped)
        for group in dropped:
            group.result.cancel()

    async def _collect(self, group: PendingGroup, collectors: dict[int, RequestOutputCollector]) -> None:
        """Wait for the requests of a group, and set its result, or an error, unless it was cut."""
        try:
            with self._log.in_flight() if not group.request.is_evaluation else contextlib.nullcontext():
                outputs = {member: await self._guard(collector.get()) for member, collector in collectors.items()}
            await self._extend(group, outputs)
            if not group.unfinished():
                request = group.request
                group.result.set_result(GroupResult.of(request.group, request.prompt_ids, group.partials))
        except Exception as error:  # `result` raises it
            group.result.set_exception(error)

    async def _extend(self, group: PendingGroup, outputs: dict[int, Any]) -> None:
        """Append what vLLM answered to a group's partials. Raises EngineDied for an engine that is broken, RolloutError for
        incomplete outputs."""
        request, finished = group.request, []
        for member, request_output in outputs.items():
            output = request_output.outputs[0]
            name = f"completion {member} of group {request.group}"
            is_cut = group.is_cut and output.finish_reason == "abort"
            if not is_cut and output.finish_reason not in ("stop", "length"):
                raise EngineDied(f"{name} ended by {output.finish_reason!r}")
            if is_cut and not output.token_ids:
                continue
            if not output.token_ids or output.logprobs is None or not output.weight_versions:
                raise RolloutError(f"{name} came back without tokens, log-probabilities or weight version")
            pairs = zip(output.token_ids, output.logprobs, strict=True)
            sampled = Completion(
                token_ids=np.asarray(output.token_ids, dtype=np.int32),
                logprobs=np.array([step[token].logprob for token, step in pairs], dtype=np.float32),
                versions=token_versions(output.weight_versions),
                finish_reason="" if is_cut else output.finish_reason,
            )
            if not np.isfinite(sampled.logprobs).all():
                token = int(np.flatnonzero(~np.isfinite(sampled.logprobs))[0])
                # The trainer publishes only finite weights, so the engine is broken.
                raise EngineDied(
                    f"it is broken: a log-probability of group {request.group} is {sampled.logprobs[token]}, under version "
                    f"{self._version} of the weights, which was finite when it was sent"
                )
            group.partials[member] = group.partials[member] + sampled
            if not is_cut:
                finished.append(member)
            if not request.is_evaluation:
                named = GREEDY if request.temperature == 0.0 else request.group
                self._log.add(named, request_output, int(sampled.versions[-1]))
        if self._settings.record_routing:
            await self._take_routing(group, finished, outputs)

    async def _take_routing(self, group: PendingGroup, finished: Sequence[int], outputs: dict[int, Any]) -> None:
        """Add the experts that the tokens of finished members chose to their partials, as `Completion.routing`. A request
        that continues tokens computes them as its prompt, so its rows are of the whole sequence. Raises RolloutError for
        missing rows."""
        if self._on_cpu:
            names = [group.name(member) for member in finished], [group.name(member) for member in outputs.keys() - finished]
            ranks: Any = await self._utility(self._alive().collective_rpc("megarl_take_routing", args=names))
            # Tensor ranks route alike. The number format follows from the size: msgpack has no arrays.
            recorded = [
                np.frombuffer(content, {1: np.uint8, 2: np.int16}[len(content) // int(np.prod(shape))]).reshape(shape)
                for content, shape in ranks[0]
            ]
            layers = None
        else:
            recorded = [outputs[member].outputs[0].routed_experts for member in finished]
            shape = self._settings.planned.shape
            layers = [layer for layer in range(shape.num_layers) if shape.has_experts(layer)]
        for member, rows in zip(finished, recorded, strict=True):
            partial = group.partials[member]
            try:
                routing = routing_rows(rows, len(group.request.prompt_ids) + len(partial), layers)
            except ValueError as error:
                raise RolloutError(f"group {group.request.group}: {error}") from error
            group.partials[member] = replace(partial, routing=routing)

    async def _every_worker(self, method: str, *arguments: Any) -> list[Any]:
        """Return the answer of every worker in order; `collective_rpc` calls those of the first data-parallel rank only."""
        core: Any = self._alive().engine_core
        ranks = await core.call_utility_all_async("collective_rpc", method, None, arguments)
        return [answer for rank in ranks for answer in rank]

    def _clean(self) -> AsyncLLM:
        if self._dirty is not None:
            raise EngineDirty(f"weights are unknown: {self._dirty}")
        return self._alive()

    def _alive(self) -> AsyncLLM:
        if self._engine is None:
            raise EngineDied("the engine was not started or is stopped")
        if self._engine.errored:
            raise EngineDied(f"vLLM's engine process is gone\n{log_errors()}")
        return self._engine

    async def _utility(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await a utility call to the engine core. vLLM 0.32 never answers if the core dies during the call, so poll."""
        engine = self._alive()
        task = asyncio.create_task(self._guard(call))
        while not (await asyncio.wait({task}, timeout=DEATH_POLL_S))[0]:
            if engine.errored:
                task.cancel()
                raise EngineDied(f"vLLM's engine process is gone\n{log_errors()}")
        return task.result()

    async def _guard(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await a call to vLLM; a dead engine core becomes EngineDied."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await call
        except EngineDeadError as error:
            raise EngineDied(f"vLLM's engine process is gone\n{log_errors()}") from error


def request_seed(run_seed: int, step: int, prompt: int, member: int, turn: int = 0) -> tuple[int, ...]:
    """Return the seed of one completion, or of one turn of an episode. It depends on what is sampled, not on when or where.
    The engine mixes its numbers: that takes 7 us, which rank 0's loop has no time for."""
    return (run_seed, step, prompt, member, turn) if turn else (run_seed, step, prompt, member)


def vllm_seed(numbers: Sequence[int]) -> int:
    """Return a seed for vLLM, or for an environment, that is mixed from numbers."""
    # The same for a list, in twice the time.
    entropy = np.array(numbers, np.uint32) if max(numbers) < 2**32 else numbers
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1  # vLLM takes a signed 64-bit seed


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
