"""The engines of a run, seen from rank 0: starts them, starts dead engines again, and leads all through a sync."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import ray

from megarl.cluster.cores import node_load
from megarl.cluster.engine_nodes import one_machine
from megarl.cluster.ray_cluster import node_share, start_cluster, stop_cluster
from megarl.data.sample import Prompt
from megarl.models import ModelShape
from megarl.models.model_files import model_directory
from megarl.planner.placement import EnginePlace, place_engines
from megarl.platform import current as platform
from megarl.recipe.phases_section import EARLY_PARTS
from megarl.recipe.recipe import Recipe
from megarl.recipe.sizes import engines_of, teacher_engines
from megarl.rollout import EngineDied, EngineSilent, RolloutError, StreamStalled
from megarl.rollout.engine_settings import EngineSettings
from megarl.rollout.groups import GroupFacts, GroupStore, Payload, RolloutBatch, RolloutExecuted, StoredPayload
from megarl.rollout.handle import EngineHandle
from megarl.telemetry.trace import EngineReport
from megarl.weight_sync.manifest import AdapterManifest, SyncAborted, SyncError, SyncLate, WeightManifest

logger = logging.getLogger(__name__)


class EnginePool:
    """vLLM engines behind Ray actors; used on rank 0 only. A `RolloutStream` samples with them."""

    def __init__(
        self,
        recipe: Recipe,
        model_path: str,
        stop_token_ids: Sequence[int],
        seed: int,
        ray_address: str | None = None,
        places: Sequence[EnginePlace] = (),
        bound_ranks: int | None = None,
        teachers: Sequence[EnginePlace] = (),
    ) -> None:
        """`model_path` is a Hugging Face directory. Without `ray_address` a local Ray is started. `places` has one place per
        engine; without places, engines are placed on this machine. `bound_ranks` is the number of trainer ranks of a node if
        processes are bound to cores. `teachers` are the places of the engines of `recipe.served`; without, none starts."""
        self._recipe, self._ray_address = recipe, ray_address
        shape = ModelShape.from_directory(model_path)
        planned = engines_of(recipe, shape, on_gpu=platform.num_devices is not None)
        assert planned is not None, "a pool of engines needs a recipe without rollout.replay"
        self._vocab = shape.vocab
        self._version: int | None = None  # the last version that was published
        self._manifest: WeightManifest | AdapterManifest  # of the current sync
        self._sync_begun = 0.0  # on the monotonic clock
        self._pausing: dict[int, Any] = {}  # engine -> its call of `pause` in the current sync
        self._receiving: dict[int, Any] = {}  # engine -> its call of `receive`
        self._reports: dict[int, dict[str, float]] = {}  # engine -> its metrics of the last version
        self._refusals: dict[int, int] = {}
        self._num_batches = 0
        self._max_concurrent = 0
        self._store: Any = None
        self._store_name = f"rollouts-{secrets.token_hex(8)}"  # a cluster may serve several runs
        self._owns_cluster = self._ends_restarts = False
        self.address: str | None = None
        rollout = recipe.rollout
        places = places or place_engines(recipe, one_machine(recipe))
        self.engines = [
            EngineHandle(
                EngineSettings(
                    index=index,
                    model_path=str(model_path),
                    planned=planned,
                    kv_cache_bytes=rollout.kv_cache_bytes or planned.kv_cache_bytes,
                    max_model_len=recipe.max_sequence_tokens,
                    max_new_tokens=rollout.max_new_tokens,
                    temperature=rollout.temperature,
                    stop_token_ids=tuple(int(token) for token in stop_token_ids),
                    seed=seed,
                    memory_utilization=rollout.memory_utilization,
                    record_routing=recipe.actor.router_replay,
                    place=place,
                    device_variable=platform.device_variable,
                    takes_turns=takes_turns(recipe),
                    load=None if bound_ranks is None else node_load(recipe, places, place.node, bound_ranks),
                    times_requests=recipe.run.trace != "none" or (rollout.max_staleness > 0 and len(places) > 1),
                    engine_args=rollout.engine_args,
                    adapter=recipe.sent_adapter,
                    position=sum(other.node == place.node for other in places[:index]),
                ),
                rollout.timeout_s,
                # One a group. Evaluations and agents may ask for more at a time, which wait in the router.
                max_requests=(2 + rollout.max_staleness) * recipe.num_sequences,
            )
            for index, place in enumerate(places)
        ]
        self.teachers: dict[str, EngineHandle] = {}
        served = teacher_engines(recipe, on_gpu=platform.num_devices is not None) if teachers else {}
        for (name, teacher_plan), place in zip(served.items(), teachers, strict=True):
            # The teacher's own files, which no sync changes.
            path = str(model_directory(recipe.path(f"teachers.{name}")))
            settings = EngineSettings(
                index=0, teacher=name, model_path=path, planned=teacher_plan, kv_cache_bytes=teacher_plan.kv_cache_bytes,
                max_model_len=recipe.max_sequence_tokens + 1, max_new_tokens=1, temperature=1.0, stop_token_ids=(),
                seed=seed, place=place, device_variable=platform.device_variable,
            )  # fmt: skip
            self.teachers[name] = EngineHandle(settings, rollout.timeout_s, max_requests=1)

    def start(self) -> None:
        """Start Ray, and all engines at the same time. Raises RolloutError naming an engine that did not start."""
        self._owns_cluster = not ray.is_initialized()
        self.address = start_cluster(self._ray_address)
        # Of a step, whose parts are batches, too.
        batches = EARLY_PARTS + (2 if self._recipe.algorithm.advantage == "remax" else 1)
        # On rank 0's node: the loss of another node loses no rollouts.
        store = ray.remote(GroupStore).options(name=self._store_name, num_cpus=0, resources=node_share(0))
        self._store = store.remote(1 + batches)
        started = [(engine, engine.begin_start()) for engine in self._all_engines]
        for engine, reference in started:
            try:
                engine.finish_start(reference)
            except EngineDied as error:
                raise RolloutError(f"{engine.name} died while it started: {error}") from error

    async def store_batch(self, facts: Sequence[GroupFacts], tokens: Sequence[Any]) -> RolloutBatch:
        """Return a batch of groups of one size; their tokens stay in the object store."""
        self._num_batches += 1
        name, size = str(self._num_batches), len(facts[0].last_segments)
        timeout_s = self._recipe.rollout.timeout_s
        try:
            await asyncio.wait_for(self._store.add.remote(name, list(tokens)), timeout_s)
        except (TimeoutError, ray.exceptions.RayActorError) as error:
            kind = StreamStalled if isinstance(error, TimeoutError) else RolloutError
            raise kind(
                f"phase rollout: the store of rollouts, an actor on rank 0's node, did not take batch {name} within "
                f"rollout.timeout_s = {timeout_s:g}: {error or 'no answer'}; a resume goes on from the last checkpoint"
            ) from error
        # A dead engine has no process, and all engines run the same number of sequences.
        self._max_concurrent = max(
            [self._max_concurrent, *(engine.process.max_concurrent for engine in self.engines if engine.process is not None)]
        )
        executed = RolloutExecuted(len(facts), size, self._max_concurrent)
        sizes = tuple(len(group.lengths) for group in facts)
        payload = StoredPayload(self._store_name, name, sizes, timeout_s)
        metrics: dict[str, float] = {"rollout/num_restarts": sum(engine.restarts for engine in self.engines)}
        if num_lost := sum(engine.is_lost for engine in self.engines):
            metrics["rollout/num_lost_engines"] = num_lost
        return RolloutBatch.of(facts, payload, executed, metrics)

    def take_times(self) -> list[EngineReport]:
        """Return what each engine did since the last call, in the order of their numbers; nothing of a dead engine."""
        reports = []
        for engine in self.engines:
            report = EngineReport(0.0, engine=engine.settings.index)
            with contextlib.suppress(EngineDied):
                if engine.process:  # an engine that starts would answer only then
                    report = engine.report()
            reports.append(report)
        return reports

    def rest(self) -> None:
        """After a step's rollouts: engines that share GPUs with the trainer sleep until the next sync."""
        calls = []
        for engine in self.engines:
            if engine.settings.takes_turns:
                with contextlib.suppress(EngineDied):  # it is lost
                    calls.append((engine, engine.call("sleep")))
        for engine, call in calls:
            with contextlib.suppress(EngineDied):  # its memory is free as well, and the sync restarts it
                engine.get(call, "rollout")

    def ask(self, version: int, engines: Sequence[int]) -> None:
        """Let some engines begin to pause for a version, after which their weights are unknown; `pause` waits for them. A
        sleeping engine is left to `pause`: it wakes to the memory of its weights, which a rank may still occupy. So is an
        engine without an actor, which `pause` restarts."""
        self._pausing = self._call_pause(
            (index for index in engines if not self.engines[index].settings.takes_turns), version
        )

    def pause(self, version: int, attempt: int, engines: Sequence[int]) -> list[int]:
        """Pause the given engines for a version, unless `ask` did, after which their weights are unknown; return how often
        each of all engines was restarted, -1 for an engine that is lost for good. Completions in flight are waited for, kept
        or aborted, by the recipe. A dead engine is restarted, and so is a silent one unless completions are waited for.
        Raises RolloutError for an engine that does not pause."""
        if attempt == 1:
            self._reports, self._refusals = {}, {}
        self._version = version
        section = self._recipe.weight_sync
        timeout_s, rule = section.timeout_s, f"weight_sync.timeout_s = {section.timeout_s:g}"
        if section.in_flight == "wait":
            timeout_s = self._recipe.rollout.timeout_s
            rule = f"rollout.timeout_s = {timeout_s:g}: weight_sync.in_flight = wait, for what it generates"
        calls, self._pausing = self._pausing, {}
        calls |= self._call_pause((index for index in engines if index not in calls), version)
        for index in engines:
            engine = self.engines[index]
            report = {"pause_s": 0.0, "in_flight": 0.0}
            while not engine.is_lost:
                try:
                    call = calls.pop(index, None) or engine.call("pause", version, section.in_flight)
                    report = engine.get(call, "weight_sync", timeout_s, rule)
                    break
                except (EngineDied, RolloutError) as error:
                    if isinstance(error, RolloutError) and section.in_flight == "wait":
                        raise
                    self.restart(engine, "weight_sync", error)
            earlier = self._reports.get(index, {"pause_s": 0.0, "in_flight": 0.0})
            self._reports[index] = {
                "pause_s": earlier["pause_s"] + report["pause_s"],
                # Completions that an earlier attempt kept or aborted are counted again in this one.
                "in_flight": max(earlier["in_flight"], report["in_flight"]),
            }
        return [-1 if engine.is_lost else engine.restarts for engine in self.engines]

    def _call_pause(self, engines: Iterable[int], version: int) -> dict[int, Any]:
        """Return the calls by engine, without engines that have no actor."""
        calls = {}
        for index in engines:
            with contextlib.suppress(EngineDied):
                calls[index] = self.engines[index].call("pause", version, self._recipe.weight_sync.in_flight)
        return calls

    def begin(self, manifest: WeightManifest | AdapterManifest) -> None:
        """Let the manifest's engines receive; does not wait for them. Adapters travel through Ray's object store, once to
        each node."""
        self._manifest, self._sync_begun = manifest, time.monotonic()
        if isinstance(manifest, AdapterManifest):
            method, argument = "receive_adapter", ray.put(manifest)
        else:
            method, argument = "receive", manifest.as_dict()
        self._receiving = {index: self.engines[index].call(method, argument) for index in manifest.engines}

    def finish(self) -> tuple[tuple[int, ...], dict[str, float]]:
        """Wait for the engines that receive. Returns the engines that need another attempt, and the metrics of all others.

        A dead or silent engine is restarted. Raises RolloutError if none is left that did not die too often, SyncError for
        one that refused the version more than `weight_sync.retries` times: it answers nothing until a later sync succeeds.
        """
        again: list[int] = []
        restarted: set[int] = set()
        refused: dict[int, SyncError] = {}
        failure: Exception | None = None
        waits, timeout_s = self._manifest.report_waits, self._manifest.timeout_s
        deadline, rule = self._sync_begun + waits * timeout_s, f"{waits} times weight_sync.timeout_s = {timeout_s:g}"
        for index, call in self._receiving.items():
            engine = self.engines[index]
            try:
                left_s = max(0.0, deadline - time.monotonic())
                self._reports[index] |= engine.get(call, "weight_sync", left_s, rule)
            except (EngineDied, RolloutError) as error:
                restarted.add(index)
                again.append(index)
                try:
                    self.restart(engine, "weight_sync", error)
                except RolloutError as final_error:
                    failure = failure or final_error
            except SyncError as error:
                refused[index] = error
                again.append(index)
        # A refusal does not count if another process failed first. If that excuses every engine, all count: otherwise a sync
        # might never end.
        at_fault = [index for index, error in refused.items() if not isinstance(error, SyncAborted)]
        for index in at_fault if at_fault or restarted else list(refused):
            self._refusals[index] = self._refusals.get(index, 0) + 1
            if self._refusals[index] > self._recipe.weight_sync.retries:
                kind = SyncLate if isinstance(refused[index], SyncLate) else SyncError
                failure = failure or kind(f"{self.engines[index].name}, phase weight_sync: {refused[index]}")
        if failure is not None:  # raised only after the others have received what they can
            raise failure
        reports = [report for report in self._reports.values() if "received_bytes" in report]
        if not reports:
            return tuple(again), {}
        metrics = {f"sync/{key}": max(report[key] for report in reports) for key in reports[0]}
        for key in ("received_bytes", "in_flight"):
            metrics[f"sync/{key}"] = sum(report[key] for report in reports)
        metrics["sync/bytes_per_s"] = metrics["sync/received_bytes"] / len(reports) / metrics["sync/transfer_s"]
        return tuple(again), metrics

    def score(self, sequences: Sequence[np.ndarray], engines: Sequence[int] | None = None) -> dict[int, np.ndarray]:
        """Return what each engine, or each of some, computes for token sequences (`RolloutEngine.score`), without engines
        that died: a rollout restarts them."""
        calls, scores, timeout_s = {}, {}, self._recipe.weight_sync.timeout_s
        for index in range(len(self.engines)) if engines is None else engines:
            with contextlib.suppress(EngineDied):
                calls[index] = self.engines[index].call("score", sequences)
        for index, call in calls.items():
            with contextlib.suppress(EngineDied):
                rule = f"weight_sync.timeout_s = {timeout_s:g}"
                scores[index] = self.engines[index].get(call, "weight_sync", timeout_s, rule)
        return scores

    def judge(self, teacher: str, payload: Payload, samples: Sequence[int]) -> list[np.ndarray]:
        """Return the log-probabilities of the own tokens of a batch's samples from the engine of a teacher. A dead or silent
        engine is restarted. Raises RolloutError for an engine that died too often, and for NaN."""
        engine, phase = self.teachers[teacher], f"teacher_logprob.{teacher}"
        while True:
            try:
                scores: list[np.ndarray] = engine.get(engine.call("judge", payload, samples), phase)
                break
            except (EngineDied, EngineSilent) as error:
                self.restart(engine, phase, error)
        for sample, logprobs in zip(samples, scores, strict=True):
            if not np.isfinite(logprobs).all():
                raise RolloutError(f"phase {phase}: a log-probability of sample {sample} is not finite in {engine.name}")
        return scores

    @property
    def _all_engines(self) -> list[EngineHandle]:
        return [*self.engines, *self.teachers.values()]

    def shutdown(self) -> None:
        """End all engines, and Ray if `start` started it; safe after a failure and more than once."""
        if self.address is None:
            return
        for engine in self._all_engines:
            engine.stop()
        if self._store is not None:
            ray.kill(self._store)
        if self._owns_cluster:
            stop_cluster()
        self.address = None

    def end_restarts(self, ends: bool) -> None:
        """End engines that are starting, from another thread than theirs, and start none until the next call with False."""
        self._ends_restarts = ends
        for engine in self._all_engines if ends else ():
            if engine.process is None:
                engine.kill()

    def restart(self, engine: EngineHandle, phase: str, cause: Exception) -> bool:
        """Start a fresh engine, without the published weights; return whether there are none. An engine that was restarted
        too often is lost, and nothing is started. Raises RolloutError if that leaves no engine or is a teacher's, if it is
        silent, and after `end_restarts`."""
        limit = self._recipe.rollout.max_restarts
        while True:
            # A silent engine that ends the run is left alive, so that the watchdog can print its stacks first.
            left_alive = engine.restarts >= limit and isinstance(cause, EngineSilent)
            if not left_alive:
                engine.kill()
            if engine.restarts >= limit:
                engine.is_lost = not left_alive
                end = (
                    f"{engine.name} died in phase {phase} after {engine.restarts} restarts "
                    f"(rollout.max_restarts = {limit}); cause: {cause}"
                )
                num_left = 0 if engine.settings.teacher else sum(not other.is_lost for other in self.engines)
                if left_alive or not num_left:
                    raise (EngineSilent if left_alive else RolloutError)(end) from cause
                logger.warning("the run goes on with %d of %d engines: %s", num_left, len(self.engines), end)
                return False
            engine.restarts += 1
            logger.warning(
                "%s is lost in phase %s and started again (restart %d of rollout.max_restarts = %d): %s",
                engine.name, phase, engine.restarts, limit, cause,
            )  # fmt: skip
            begun = time.monotonic()
            try:
                start = engine.begin_start(None if engine.settings.teacher else self._version)
                if self._ends_restarts:
                    engine.kill()
                    raise RolloutError(f"{engine.name} is not started again: the run ends") from cause
                engine.finish_start(start)
            except (EngineDied, RolloutError) as error:
                if self._ends_restarts:
                    raise
                cause = error
                continue
            logger.warning("%s runs again after %.0f s", engine.name, time.monotonic() - begun)
            return self._version is None

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that no engine may see: a token id outside the vocabulary would end vLLM's engine process."""
        longest = self._recipe.data.max_prompt_tokens
        for prompt in prompts:
            ids = np.asarray(prompt.token_ids)
            if not 0 < len(ids) <= longest:
                raise ValueError(
                    f"prompt {prompt.index} has {len(ids)} tokens; 1 to data.max_prompt_tokens = {longest} are allowed"
                )
            if ids.min() < 0 or ids.max() >= self._vocab:
                raise ValueError(
                    f"prompt {prompt.index} has token ids {ids.min()} to {ids.max()}, but model.path has a vocabulary "
                    f"of {self._vocab}; give the tokenizer that belongs to the model"
                )


def takes_turns(recipe: Recipe) -> bool:
    """Say whether engines sleep, without weights, while the trainer works. On CPUs they do not: there is no device memory to
    hand over, and vLLM for CPUs cannot sleep."""
    return recipe.rollout.placement == "colocated" and platform.num_devices is not None
