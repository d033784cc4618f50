"""The engines of a run, seen from rank 0: deals prompts out, brings dead engines back, hands weights on."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from megarl.cluster.cores import node_load
from megarl.cluster.engine_nodes import one_machine
from megarl.cluster.ray_cluster import node_share, start_cluster, stop_cluster
from megarl.data.sample import Prompt
from megarl.models import ModelShape
from megarl.planner.placement import EnginePlace, place_engines
from megarl.platform import current as platform
from megarl.recipe.memory import engines_of
from megarl.recipe.recipe import Recipe
from megarl.rollout.arrivals import Arrivals
from megarl.rollout.batch import GroupFacts, RolloutBatch, RolloutExecuted
from megarl.rollout.engine import GroupRequest, request_seed
from megarl.rollout.engine_settings import EngineSettings
from megarl.rollout.episodes import Environments, Episodes
from megarl.rollout.failure import EngineDied, EngineDirty, EngineSilent, RolloutError
from megarl.rollout.handle import EngineHandle
from megarl.rollout.replay import ReplayPool
from megarl.rollout.requests import ClockOffset, EngineReport
from megarl.rollout.store import GroupStore, StoredPayload
from megarl.telemetry.progress import advance_work, begin_work
from megarl.weight_sync.manifest import SyncAborted, SyncError, SyncLate, WeightManifest
from megarl.weight_sync.publish import EngineFacts
from megarl.weight_sync.transport import REPORT_WAITS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn that no step trains on. The same `draw` gives the same completions under the same weights;
    `temperature` is the recipe's where it is None."""

    completions: int
    draw: int
    temperature: float | None = None


class EnginePool:
    """vLLM engines behind Ray actors; used on rank 0 only. The same seed, step and prompts give the same completions,
    bit for bit, on fresh engines with the same weights.
    """

    def __init__(
        self,
        recipe: Recipe,
        model_path: str,
        stop_token_ids: Sequence[int],
        seed: int,
        ray_address: str | None = None,
        places: Sequence[EnginePlace] = (),
        bound_ranks: int | None = None,
    ) -> None:
        """`model_path` is a Hugging Face directory; without `ray_address` a local Ray is started. `places` has one for each
        engine; without any they are placed on this machine. `bound_ranks`: trainer ranks of a node, where processes are
        bound to cores."""
        self._recipe, self._seed, self._ray_address = recipe, seed, ray_address
        shape = ModelShape.from_directory(model_path)
        sizes = engines_of(recipe, shape, on_gpu=platform.num_devices is not None)
        assert sizes is not None, "engines that are not replayed"
        self._vocab = shape.vocab
        self._model_path, self._stops = str(model_path), tuple(int(token) for token in stop_token_ids)
        self._environments: Environments | None = None  # of a recipe with one, from the start on
        self._version: int | None = None  # the last one that was published
        self._resync: Callable[[Sequence[int]], None] | None = None
        self._manifest: WeightManifest  # of the sync under way
        self._receiving: dict[int, Any] = {}  # by engine: the call under way in a sync
        self._pausing: dict[int, Any] = {}  # likewise, those that were asked to pause
        self._reports: dict[int, dict[str, float]] = {}  # by engine, of the version that is published
        self._refusals: dict[int, int] = {}
        self._batches = 0
        self._deadline = 0.0  # of the rollout under way, by the monotonic clock
        self._with_greedy = recipe.algorithm.advantage == "remax"
        self._store: Any = None
        self._store_name = f"rollouts-{secrets.token_hex(8)}"  # a cluster may serve several runs
        self._owns_cluster = False
        self.address: str | None = None
        rollout = recipe.rollout
        places = places or place_engines(recipe, one_machine(recipe))
        self._engines = [
            EngineHandle(
                EngineSettings(
                    index=index,
                    model_path=str(model_path),
                    precision=recipe.rollout_precision,
                    layout=rollout.layout,
                    max_model_len=recipe.max_sequence_tokens,
                    batched_tokens=sizes.batched_tokens,
                    max_new_tokens=rollout.max_new_tokens,
                    max_concurrent=sizes.max_concurrent,
                    kv_cache_bytes=rollout.kv_cache_bytes or sizes.kv_cache_bytes,
                    needed_bytes=sizes.memory.total,
                    memory_utilization=rollout.memory_utilization,
                    temperature=rollout.temperature,
                    stop_token_ids=self._stops,
                    seed=seed,
                    record_routing=recipe.actor.router_replay,
                    quantization=rollout.quantization,
                    place=place,
                    device_variable=platform.device_variable,
                    takes_turns=takes_turns(recipe),
                    load=None if bound_ranks is None else node_load(recipe, places, place.node, bound_ranks),
                    times_requests=recipe.run.trace != "none",
                    engine_args=rollout.engine_args,
                    position=sum(other.node == place.node for other in places[:index]),
                ),
                rollout.timeout_s,
                max_calls=2 * recipe.num_sequences + 16,  # one for each group, and an evaluation may have groups of one
            )
            for index, place in enumerate(places)
        ]
        self._times = self._no_times()
        self._offsets = [ClockOffset() for _ in self._engines]

    def start(self) -> None:
        """Start Ray and all engines, side by side. Raises RolloutError naming the engine that did not start."""
        self._owns_cluster = not ray.is_initialized()
        self.address = start_cluster(self._ray_address)
        beside = node_share(0)  # where rank 0 is: the loss of another node takes no rollouts along
        store = ray.remote(GroupStore).options(name=self._store_name, num_cpus=0, resources=beside)
        self._store = store.remote(1 + _batches_of_a_step(self._recipe))
        if self._recipe.environment is not None:
            self._environments = Environments(self._recipe, self._model_path, self._vocab, self._stops, self._seed)
        started = [(engine, engine.begin_start()) for engine in self._engines]
        for engine, reference in started:
            try:
                engine.finish_start(reference)
            except EngineDied as error:
                raise RolloutError(f"{engine.name} died while it started: {error}") from error

    def generate(
        self,
        prompts: Sequence[Prompt],
        step: int,
        resync: Callable[[Sequence[int]], None] | None = None,
        sampling: Sampling | None = None,
    ) -> RolloutBatch:
        """Sample a group for each prompt, as a step does it if no `sampling` says otherwise. `resync` brings the weights to
        engines that were started again, by their numbers. Raises ValueError for a prompt no engine may see, RolloutError
        where engines cannot finish.
        """
        self._check(prompts)
        self._resync = resync
        asked = sampling or Sampling(self._recipe.algorithm.group_size, draw=step)
        with_greedy = self._with_greedy and sampling is None
        if self._environments is not None:
            result = self._play(self._environments, prompts, step, asked, with_greedy)
        else:
            result = self._complete(prompts, step, asked, with_greedy)
        self._ask_times()
        result.metrics["rollout/num_restarts"] = sum(engine.restarts for engine in self._engines)
        return result

    def _complete(self, prompts: Sequence[Prompt], step: int, asked: Sampling, with_greedy: bool) -> RolloutBatch:
        """One turn: a completion is all that follows a prompt."""
        size = asked.completions
        work: dict[int, dict[int, GroupRequest]] = {engine.settings.index: {} for engine in self._engines}
        for position, prompt in enumerate(prompts):
            seeds = tuple(request_seed(self._seed, asked.draw, prompt.index, member) for member in range(size))
            token_ids = np.asarray(prompt.token_ids, dtype=np.int32)
            request = GroupRequest(position, prompt.index, token_ids, seeds, asked.temperature)
            work[position % len(self._engines)][position] = request
            if with_greedy:
                beside = len(prompts) + position
                work[position % len(self._engines)][beside] = replace(request, position=beside, seeds=(0,), temperature=0.0)
        facts, tokens = self._run(work, step)
        result = self._keep(range(len(prompts)), size, facts, tokens, step)
        if with_greedy:
            greedy = self._keep(range(len(prompts), 2 * len(prompts)), 1, facts, tokens, step)
            result = replace(result, greedy=greedy)
        return result

    def _play(
        self, environments: Environments, prompts: Sequence[Prompt], step: int, asked: Sampling, with_greedy: bool
    ) -> RolloutBatch:
        """Turn by turn: an environment answers each turn of a completion until its episode has ended."""
        groups = [(prompt, asked.completions, asked.temperature) for prompt in prompts]
        groups += [(prompt, 1, 0.0) for prompt in prompts] if with_greedy else []
        episodes = Episodes(environments, groups, asked.draw, len(self._engines))
        try:
            self._run({engine.settings.index: {} for engine in self._engines}, step, episodes)
        finally:
            episodes.close()
        played = episodes.results()
        facts = {position: GroupFacts.of(result) for position, result in played.items()}
        tokens = {position: ray.put(result) for position, result in played.items()}
        first, second = range(len(prompts)), range(len(prompts), 2 * len(prompts))
        result = replace(self._keep(first, asked.completions, facts, tokens, step), episodes=episodes.facts(first))
        if with_greedy:
            greedy = replace(self._keep(second, 1, facts, tokens, step), episodes=episodes.facts(second))
            result = replace(result, greedy=greedy)
        return result

    def _keep(
        self, positions: range, size: int, facts: dict[int, GroupFacts], tokens: dict[int, Any], step: int
    ) -> RolloutBatch:
        """A batch of the groups at some positions, each of `size`; their tokens stay in the object store."""
        self._batches += 1
        batch = f"{step}-{self._batches}"
        keep = self._store.add.remote(batch, [tokens[position] for position in positions])
        ray.get(keep, timeout=self._recipe.rollout.timeout_s)
        processes = [engine.process for engine in self._engines if engine.process is not None]
        executed = RolloutExecuted(len(positions), size, max(process.max_concurrent for process in processes))
        payload = StoredPayload(self._store_name, batch, size, self._recipe.rollout.timeout_s)
        return RolloutBatch.of([facts[position] for position in positions], payload, executed)

    def take_times(self) -> list[EngineReport]:
        """What each engine did in the rollouts since the last call, by its number."""
        times, self._times = self._times, self._no_times()
        return times

    def _no_times(self) -> list[EngineReport]:
        return [EngineReport(0.0, engine=index) for index in range(len(self._engines))]

    def _ask_times(self) -> None:
        for index, engine in enumerate(self._engines):
            with contextlib.suppress(EngineDied):  # what it did is forgotten with it
                asked = time.time()
                said = engine.get(engine.call("report"), "rollout")
                self._offsets[index].learn(asked, time.time(), said.now)
                host = "" if engine.process is None else engine.process.host
                said = replace(said, engine=index, host=host, offset_s=self._offsets[index].seconds)
                self._times[index] = self._times[index] + said

    def rest(self) -> None:
        """Behind a step's rollouts: engines that take turns with the trainer leave it the devices, until the next sync."""
        resting = [(engine, engine.call("sleep")) for engine in self._engines if engine.settings.takes_turns]
        for engine, call in resting:
            with contextlib.suppress(EngineDied):  # its memory is free as well, and the sync starts it again
                engine.get(call, "rollout")

    def ask(self, version: int, engines: Sequence[int]) -> None:
        """Have some engines begin to pause for a version, with their weights unknown from here on; `pause` waits for them.
        One that sleeps is not asked yet: it wakes to the memory of its weights, and not all ranks may have left theirs. Nor
        is one without an actor: `pause` says so."""
        self._pausing = self._call_pause((one for one in engines if not self._engines[one].settings.takes_turns), version)

    def pause(self, version: int, attempt: int, engines: Sequence[int]) -> list[EngineFacts]:
        """Pause some engines for a version, where they were not asked to yet, with their weights unknown from here on; where
        every engine runs. What they generate is waited for, kept or aborted, as the recipe says. One that is dead is started
        again, and so is a silent one where nothing is waited for. Raises RolloutError for an engine that does not pause."""
        if attempt == 1:
            self._reports, self._refusals = {}, {}
        self._version = version
        section = self._recipe.weight_sync
        asked, self._pausing = self._pausing, {}
        asked |= self._call_pause((one for one in engines if one not in asked), version)
        for index in engines:
            engine = self._engines[index]
            while True:
                try:
                    call = asked.pop(index, None) or engine.call("pause", version, section.in_flight)
                    report = engine.get_paused(call, section.in_flight, section.timeout_s)
                    break
                except (EngineDied, RolloutError) as error:
                    if isinstance(error, RolloutError) and section.in_flight == "wait":
                        raise
                    self._restart(engine, "weight_sync", error)
            earlier = self._reports.get(index, {"pause_s": 0.0, "in_flight": 0.0})
            self._reports[index] = {
                "pause_s": earlier["pause_s"] + report["pause_s"],
                # What an earlier attempt kept or aborted has not gone on since, and is counted again.
                "in_flight": max(earlier["in_flight"], report["in_flight"]),
            }
        machines = ["" if engine.process is None else engine.process.machine for engine in self._engines]
        return [EngineFacts(one, engine.restarts) for one, engine in zip(machines, self._engines, strict=True)]

    def _call_pause(self, engines: Iterable[int], version: int) -> dict[int, Any]:
        """The calls by engine; none of one that has no actor any more."""
        calls = {}
        for index in engines:
            with contextlib.suppress(EngineDied):
                calls[index] = self._engines[index].call("pause", version, self._recipe.weight_sync.in_flight)
        return calls

    def begin(self, manifest: WeightManifest) -> None:
        """Have the manifest's engines receive; does not wait for them."""
        self._manifest = manifest
        self._receiving = {index: self._engines[index].call("receive", manifest.as_dict()) for index in manifest.engines}

    def failed(self) -> list[int]:
        """Engines that received no more than a part of what is streamed; does not wait."""
        calls = list(self._receiving.values())
        ended = set(ray.wait(calls, num_returns=len(calls), timeout=0)[0])
        return [index for index, call in self._receiving.items() if call in ended and self._ended_badly(call)]

    def finish(self) -> tuple[tuple[int, ...], dict[str, float]]:
        """Wait for the engines that receive; those that must be streamed to again, and the figures of all others.

        A dead or silent engine is started again. Raises RolloutError for one that died too often, SyncError for one that
        took wrong bytes more than `weight_sync.retries` times: it answers nothing until a later sync went through.
        """
        again: list[int] = []
        restarted: set[int] = set()
        refused: dict[int, SyncError] = {}
        failure: Exception | None = None
        timeout_s, waits = self._manifest.timeout_s, REPORT_WAITS[self._manifest.transport]
        for index, call in self._receiving.items():
            engine = self._engines[index]
            try:
                self._reports[index] |= engine.get_report(call, timeout_s, waits)
            except (EngineDied, RolloutError) as error:
                restarted.add(index)
                again.append(index)
                try:
                    self._restart(engine, "weight_sync", error)
                except RolloutError as final:
                    failure = failure or final
            except SyncError as error:
                refused[index] = error
                again.append(index)
        for index in self._at_fault(refused, restarted):
            self._refusals[index] = self._refusals.get(index, 0) + 1
            if self._refusals[index] > self._recipe.weight_sync.retries:
                kind = SyncLate if isinstance(refused[index], SyncLate) else SyncError
                failure = failure or kind(f"{self._engines[index].name}, phase weight_sync: {refused[index]}")
        if failure is not None:  # not before the others have taken what they can take
            raise failure
        return tuple(again), self._figures()

    def _at_fault(self, refused: dict[int, SyncError], restarted: set[int]) -> list[int]:
        """Of the engines that refused a version, those whose refusal counts: not where another process failed, nor where the
        engine that leads was started again. Where that leaves nobody all count, or a sync might never end."""
        leaders = self._manifest.leaders
        own = [index for index, error in refused.items() if not isinstance(error, SyncAborted)]
        own = [index for index in own if leaders[index] not in restarted]
        return own if own or restarted else list(refused)

    def _figures(self) -> dict[str, float]:
        reports = [report for report in self._reports.values() if "received_bytes" in report]
        if not reports:
            return {}
        figures = {f"sync/{key}": max(report[key] for report in reports) for key in reports[0]}
        for key in ("received_bytes", "in_flight"):
            figures[f"sync/{key}"] = sum(report[key] for report in reports)
        figures["sync/bytes_per_s"] = figures["sync/received_bytes"] / len(reports) / figures["sync/transfer_s"]
        return figures

    def _ended_badly(self, call: Any) -> bool:
        try:
            ray.get(call)
            return False
        except ray.exceptions.RayError:
            return True

    def shutdown(self) -> None:
        """End all engines, and Ray where `start` began it; safe after a failure and more than once."""
        if self.address is None:
            return
        for engine in self._engines:
            engine.stop()
        if self._environments is not None:
            self._environments.close()
        if self._store is not None:
            ray.kill(self._store)
        if self._owns_cluster:
            stop_cluster()
        self.address = None

    def _run(
        self, work: dict[int, dict[int, GroupRequest]], step: int, episodes: Episodes | None = None
    ) -> tuple[dict[int, GroupFacts], dict[int, Any]]:
        """Facts and token references of every position; groups of an engine that dies are submitted again. Of `episodes` the
        work is what they ask for, turn by turn: an engine's next turn is submitted when its environments have answered."""
        facts: dict[int, GroupFacts] = {}
        tokens: dict[int, Any] = {}
        sequences = sum(len(request.seeds) for requests in work.values() for request in requests.values())
        begin_work("sequences", sequences if episodes is None else len(episodes.episodes))
        arrivals = Arrivals()
        asked = set() if episodes is None else set(arrivals.expect(episodes.begin()))  # environments
        calls: dict[Any, tuple[EngineHandle, int, Any]] = {}
        for engine in self._engines:
            calls |= arrivals.expect(self._submit(engine, work[engine.settings.index]))
        self._renew_deadline()
        while calls or asked:
            answered = arrivals.next(max(0.0, self._deadline - time.monotonic()))
            if answered is None:
                late = sorted({engine.name for engine, _, _ in calls.values()}) or [f"environments of {len(asked)} episodes"]
                raise EngineSilent(
                    f"{', '.join(late)}: {len(calls)} of {sum(map(len, work.values()))} groups of step {step} not "
                    f"finished in phase rollout within rollout.timeout_s = {self._recipe.rollout.timeout_s:g}"
                )
            if answered in asked:
                assert episodes is not None, "nobody else asks environments"
                asked.remove(answered)
                calls |= arrivals.expect(self._next_turn(episodes, episodes.hear(answered), work))
                continue
            if answered not in calls:
                continue  # of an engine that was started again since
            engine, position, token_reference = calls.pop(answered)
            try:
                facts[position] = engine.get(answered, "rollout")
                tokens[position] = token_reference
                result: Any = None if episodes is None else engine.get(token_reference, "rollout")
                del work[engine.settings.index][position]
                if episodes is None:
                    advance_work(len(facts[position].lengths))
                else:
                    asked.update(arrivals.expect(episodes.sampled(position, result)))
                    calls |= arrivals.expect(self._next_turn(episodes, engine.settings.index, work))
            except EngineDied as error:
                self._revive(engine, error)
                calls = {reference: call for reference, call in calls.items() if call[0] is not engine}
                calls |= arrivals.expect(self._submit(engine, work[engine.settings.index]))
            except RolloutError as error:
                raise type(error)(f"{engine.name}, phase rollout, step {step}: {error}") from error
        return facts, tokens

    def _next_turn(
        self, episodes: Episodes, index: int, work: dict[int, dict[int, GroupRequest]]
    ) -> dict[Any, tuple[EngineHandle, int, Any]]:
        """Of an engine whose turn is over, and whose environments have all answered, the next one. As `_submit`."""
        if work[index] or episodes.waits(index):
            return {}
        advance_work(episodes.take_ended())
        work[index] = episodes.requests(index)
        return self._submit(self._engines[index], work[index], goes_on=episodes.have_begun(index))

    def _submit(
        self, engine: EngineHandle, requests: dict[int, GroupRequest], goes_on: bool = False
    ) -> dict[Any, tuple[EngineHandle, int, Any]]:
        """Queue an engine's groups; for each, what its facts' reference stands for. `goes_on` as of
        `RolloutEngine.submit`."""
        if not requests:
            return {}
        while True:
            try:
                engine.get(engine.call("submit", list(requests.values()), goes_on), "rollout")
                break
            except EngineDirty as error:
                raise RolloutError(f"{engine.name} refuses phase rollout: {error}") from error
            except EngineDied as error:
                self._revive(engine, error)
        results = {}
        for position in requests:
            facts, tokens = engine.call("result", position, num_returns=2)
            results[facts] = (engine, position, tokens)
        return results

    def _revive(self, engine: EngineHandle, cause: Exception) -> None:
        """A fresh engine with the last published weights, in the middle of a rollout, whose deadline begins again."""
        self._restart(engine, "rollout", cause)
        if self._version is not None:
            assert self._resync is not None, "generate() was not told how to bring weights back"
            self._resync([engine.settings.index])
        self._renew_deadline()

    def _renew_deadline(self) -> None:
        self._deadline = time.monotonic() + self._recipe.rollout.timeout_s

    def _restart(self, engine: EngineHandle, phase: str, cause: Exception) -> None:
        """A fresh engine, still without published weights. Raises RolloutError when the engine has been restarted often
        enough."""
        limit = self._recipe.rollout.max_restarts
        while True:
            # One that is silent for good is ended with the run: the watchdog asks for its stacks first.
            is_last_word = engine.restarts >= limit and isinstance(cause, EngineSilent)
            if not is_last_word:
                engine.kill()
            if engine.restarts >= limit:
                raise (EngineSilent if is_last_word else RolloutError)(
                    f"{engine.name} died in phase {phase} after {engine.restarts} restarts "
                    f"(rollout.max_restarts = {limit}); cause: {cause}"
                ) from cause
            engine.restarts += 1
            logger.warning(
                "%s is lost in phase %s and started again (restart %d of rollout.max_restarts = %d): %s",
                engine.name, phase, engine.restarts, limit, cause,
            )  # fmt: skip
            begun = time.monotonic()
            try:
                engine.finish_start(engine.begin_start(self._version))
            except (EngineDied, RolloutError) as error:
                cause = error
                continue
            logger.warning("%s runs again after %.0f s", engine.name, time.monotonic() - begun)
            return

    def _check(self, prompts: Sequence[Prompt]) -> None:
        """A token id outside the vocabulary ends vLLM's engine process, so it must not get there."""
        if not prompts:
            raise ValueError("no prompts to generate for")
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
    """Whether engines sleep while the trainer works, without weights: cores have no memory of their own to hand over, and
    vLLM for CPUs refuses to sleep."""
    return recipe.rollout.placement == "colocated" and platform.num_devices is not None


def _batches_of_a_step(recipe: Recipe) -> int:
    algorithm = recipe.algorithm
    rounds = 1 if algorithm.dynamic_sampling is None else algorithm.dynamic_sampling.max_rounds
    return rounds * (2 if algorithm.advantage == "remax" else 1)  # which has a batch of greedy completions beside


def open_pool(
    recipe: Recipe,
    model_path: str,
    stop_token_ids: Sequence[int],
    seed: int,
    ray_address: str | None = None,
    places: Sequence[EnginePlace] = (),
    bound_ranks: int | None = None,
) -> EnginePool | ReplayPool:
    """Engines, or the replay that the recipe names in their place; not started yet. Arguments as of `EnginePool`."""
    if recipe.rollout.replay is not None:
        section = recipe.phases.rollout
        routed = recipe.actor.router_replay
        greedy, played = recipe.algorithm.advantage == "remax", recipe.environment is not None
        size = recipe.algorithm.group_size
        assert section.max_concurrent is not None, "settled where a recipe with a replay is loaded"
        return ReplayPool(recipe.rollout.replay, size, section.max_concurrent, routed, greedy, played)
    return EnginePool(recipe, model_path, stop_token_ids, seed, ray_address, places, bound_ranks)
