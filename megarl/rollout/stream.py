"""The stream of rollouts: groups are admitted, sampled, scored, and taken by the step that trains on them.

One event loop, on a thread of rank 0, runs it while the trainer works. The trainer's thread calls the methods of
`RolloutStream` that are no coroutines. With `rollout.max_staleness: 0` a step's groups start when the step begins and the
trainer waits for all of them; above 0 the same code has groups of later steps under way, as far as
megarl/schedule/admission.py lets them start.

- Every admitted group is trained on once, or counted with its reason.
- A group's requests survive their engine (router.py) and a weight sync (engine.py). Nothing is sampled twice unless its
  engine died, or its tokens were lost with their node before anything has used them, or it is a group that shared a reward
  task with such tokens.
- An error of an engine, an environment or a reward ends the next call of the trainer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import ray
import torch

from megarl.algorithm.advantage import informative_groups
from megarl.data.prompts import PromptStream
from megarl.data.routing import takes_answer, teachers_of
from megarl.data.sample import Completion, Prompt
from megarl.models import ModelShape
from megarl.recipe.recipe import Recipe
from megarl.reward.verifiers import TextScore
from megarl.reward.workers import TASK_GRACE_S, RewardResult, RewardWorkers, add_episodes
from megarl.rollout import StreamStalled, TokensLost
from megarl.rollout.engine import GroupRequest, request_seed
from megarl.rollout.episodes import AgentEpisodes, Environments, Episode, Episodes, GroupEpisodes
from megarl.rollout.groups import EpisodeFacts, GroupFacts, GroupPayload, GroupResult, RolloutBatch, restored, saved
from megarl.rollout.loop_thread import LoopThread, T
from megarl.rollout.pool import EnginePool
from megarl.rollout.router import Router
from megarl.rollout.taken import Resync, Taken
from megarl.schedule.admission import Admission
from megarl.telemetry.progress import advance_work, begin_work
from megarl.telemetry.trace import EngineReport

logger = logging.getLogger(__name__)

# Sequences that an engine holds for each that it decodes, so that it never waits for the next one. A group counts with all
# its sequences until the last has ended: of 4 long-tailed ones about 1.3 are under way (`benchmarks/stream.py`).
QUEUED = 4.0
# With staleness a reward task waits this long to be full: each task costs the loop as much time as a request of an engine.
FILL_S = 0.1


@dataclass(frozen=True)
class Sampling:
    """How to sample completions that no step trains on. The same `draw` gives the same completions under the same weights;
    a `temperature` of None takes the recipe's."""

    completions: int
    draw: int
    temperature: float | None = None


@dataclass(eq=False)
class Group:
    """A prompt and its completions so far. `step` is the one that started it, and a part of every sampling seed."""

    prompt: Prompt
    size: int
    step: int
    temperature: float | None = None
    number: int = -1  # of `Admission`; -1 for a group that no step trains on
    greedy: Group | None = None
    facts: GroupFacts | None = None
    tokens: Any = None  # reference of a GroupResult
    episodes: EpisodeFacts | None = None
    scores: list[TextScore] = field(default_factory=list)
    partials: tuple[Completion, ...] = ()  # of a run that was interrupted
    is_in_part: bool = False  # that an early phase has run on
    num_sampled_again: int = 0  # times that it or a turn of it was sampled again, as tokens were lost
    is_evaluation: bool = False

    @property
    def parts(self) -> list[Group]:
        return [self] if self.greedy is None else [self, self.greedy]


class RolloutStream:
    """Samples with the engines of a pool; without `prompts` only what `sample` is asked for, without `rewards` unscored."""

    def __init__(
        self,
        recipe: Recipe,
        pool: EnginePool,
        seed: int,
        prompts: PromptStream | None = None,
        rewards: RewardWorkers | None = None,
        environments: Environments | None = None,
    ) -> None:
        self._recipe, self._pool, self._seed = recipe, pool, seed
        self._prompts, self._rewards, self._environments = prompts, rewards, environments
        algorithm, rollout, dynamic = recipe.algorithm, recipe.rollout, recipe.algorithm.dynamic_sampling
        self._filters = dynamic is not None
        self._per_step, self._size = recipe.phases.rollout.prompts, algorithm.group_size
        self._with_greedy = algorithm.advantage == "remax"
        self._masks_truncated = algorithm.overlong is not None and algorithm.overlong.mask
        self._is_synchronous = rollout.max_staleness == 0
        max_rounds = 1 if dynamic is None else dynamic.max_rounds
        self._admission = Admission(self._per_step, rollout.max_staleness, recipe.window, max_rounds, recipe.rollout_steps)
        self._groups: dict[int, Group] = {}  # by number
        self._to_learn: deque[Group] = deque()  # groups that the curriculum does not know yet, in order
        self._num_sampling = [0, 0]  # groups that do not wait for their rewards yet: of training, of an evaluation
        self._fill_timer: asyncio.TimerHandle | None = None  # when a reward task begins although it is not full
        self._restored: list[Group] = []  # to be started with the next step
        self._is_awaited = False  # the trainer waits for groups
        self._step = self._version = 0
        self._error: BaseException | None = None
        self._thread = LoopThread("rollout stream", rollout.timeout_s)
        self._loop = self._thread.loop
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._router = self._call(self._begin())

    # For the trainer --------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Start the groups that may start once the steps before `step` are over."""
        begin_work("sequences", self._per_step * self._size)

        async def begin() -> None:
            self._step, self._is_awaited = step, True
            self._admission.begin(self._version)
            for group in self._restored:
                self._start(group)
            self._restored = []
            await self._admit()

        self._call(begin())

    def wait_sampled(self, resync: Resync) -> None:
        """Wait until the next step waits for no completion any more. `resync` sends the weights to some engines when no live
        engine is left. Raises what engines and environments raise."""
        self._call(self._until(lambda: self._admission.is_sampled), resync)

    def next_part(self, num_groups: int, resync: Resync) -> RolloutBatch:
        """Return the groups of this step that were sampled first, without those of earlier parts, in the order of their
        prompts; for phases that start early."""
        return self._call(self._next_part(num_groups), resync)

    def take(self) -> Taken | None:
        """Take the next step's groups as soon as they have their rewards; None if more must be sampled in place of groups
        without information or of lost tokens."""
        return self._call(self._take())

    def sample(
        self, prompts: Sequence[Prompt], sampling: Sampling, resync: Resync | None = None, answers: bool = False
    ) -> tuple[RolloutBatch, RewardResult | None]:
        """Sample and score groups that no step trains on. Without `resync` no weights were ever sent, and an engine that was
        started again has those of its model. Raises ValueError for a prompt that no engine may see."""
        self._pool.check(prompts)
        groups = [
            Group(prompt, sampling.completions, sampling.draw, sampling.temperature, is_evaluation=True)
            for prompt in prompts
        ]

        async def sample() -> tuple[RolloutBatch, RewardResult | None]:
            self._num_sampling[True] += len(groups)
            await asyncio.gather(*(self._complete(group, answers) for group in groups))
            rewards = None if self._rewards is None else _rewards_of(self._rewards, groups, answers)
            return await self._join(groups), rewards

        return self._call(sample(), resync)

    def pause(self) -> None:
        """Send nothing to engines until `resume`: they change their weights."""
        self._call(self._router.pause())

    def resume(self, version: int, engines: Sequence[int] | None) -> None:
        """Go on with engines that have received a version, all if None."""

        async def resume() -> None:
            self._version = version
            self._router.resume(engines)
            self._changed.set()

        self._call(resume())

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs between two steps, as tensors and plain values: the position in the prompts, and every
        group that started and was not trained on, with the tokens that it has. Episodes under way begin anew."""
        return self._call(self._state())

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken: what was sampled is not sampled again, and all rewards are computed again."""
        assert self._prompts is not None, "a stream without prompts has no state"
        self._prompts.restore(state["prompts"])
        self._admission.restore(state["admission"])
        for values in [values for values in state["groups"] if values["number"] in self._admission.waiting]:
            prompt = self._prompts.prompt(values["index"], tuple(values["origin"]))
            group = Group(prompt, self._size, values["step"], number=values["number"])
            if self._with_greedy:
                group.greedy = Group(prompt, 1, values["step"], temperature=0.0)
            for part, part_values in zip(group.parts, values["parts"], strict=True):
                part.partials = tuple(restored(Completion, member) for member in part_values["partials"])
                if part_values["result"] is not None:
                    result = restored(GroupResult, part_values["result"])
                    part.facts, part.tokens = GroupFacts.of(result), ray.put(result)
                if part_values["episodes"] is not None:
                    part.episodes = restored(EpisodeFacts, part_values["episodes"])
            self._groups[group.number] = group
            self._restored.append(group)
            if values["is_to_learn"]:
                self._to_learn.append(group)

    def follow(self, reports: Sequence[EngineReport]) -> None:
        """Adapt what engines hold to the requests that they preempted."""

        async def follow() -> None:
            self._router.follow({report.engine: report.num_preempted for report in reports})

        self._call(follow())

    def prompt_metrics(self) -> dict[str, float]:
        """Return the metrics `data/...`."""
        assert self._prompts is not None

        async def read() -> dict[str, float]:
            return self._prompts.metrics()  # type: ignore[union-attr]

        return self._call(read())

    def close(self) -> None:
        """End the loop; engines, environments and rewards are their owners' to end."""

        async def cancel() -> None:
            await self._router.close()
            if self._environments is not None and self._environments.gateway is not None:
                await self._environments.gateway.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._loop.shutdown_default_executor()

        self._thread.close(cancel())

    def _call(self, work: Coroutine[Any, Any, T], resync: Resync | None = None) -> T:
        """Run a coroutine in the loop and return its result; meanwhile engines without weights are synced here."""

        def sync() -> None:
            while resync is not None and (engines := self._router.unserved):
                resync(engines)

        return self._thread.call(work, sync)

    # In the loop ------------------------------------------------------------------------------------------------------

    async def _begin(self) -> Router:
        """Serve agents, and return the router."""
        if self._environments is not None and self._environments.gateway is not None:
            self._environments.gateway.serve()
        rollout = self._recipe.rollout
        max_concurrent = self._recipe.phases.rollout.max_concurrent
        depth = None if self._is_synchronous or max_concurrent is None else int(QUEUED * max_concurrent)
        return Router(self._pool, rollout.timeout_s, rollout.max_new_tokens, depth, self._thread.wake, self._end)

    def _end(self, error: Exception) -> None:
        """Let the trainer's next call raise an error."""
        self._error = self._error or error
        self._changed.set()

    async def _admit(self) -> None:
        """Start as many groups as may start."""
        assert self._prompts is not None
        prompts = self._prompts.take(self._admission.num_to_start())
        self._pool.check(prompts)
        for prompt in prompts:
            group = Group(prompt, self._size, self._step, number=self._admission.start())
            if self._with_greedy:
                group.greedy = Group(prompt, 1, self._step, temperature=0.0)
            self._groups[group.number] = group
            self._to_learn.append(group)
            self._start(group)

    def _start(self, group: Group) -> None:
        self._num_sampling[False] += 1
        task = self._loop.create_task(self._run(group))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, group: Group) -> None:
        """Sample and score a group, from its start until it waits for a step."""
        try:
            await self._complete(group)
            self._admission.finish(group.number, not self._filters or self._is_informative(group))
            self._learn()
            await self._admit()
        except Exception as error:  # the trainer's next call raises it
            self._end(error)
        self._changed.set()

    async def _complete(self, group: Group, answers: bool = False) -> None:
        """Sample and score a group; once more where its tokens were lost before they had a reward."""
        is_training, parts, to_advance = not group.is_evaluation, group.parts, group.size
        send = partial(self._admission.send, group.number) if is_training else lambda: None
        num_lost = 0  # times
        while True:
            if len(parts) == 1:
                await self._sample(group, send)
            else:
                await asyncio.gather(*(self._sample(part, send, is_last=part is group.greedy) for part in parts))
            if is_training:
                first_version = min(min(part.facts.first_versions) for part in parts if part.facts)
                self._admission.sampled(group.number, first_version)
                if self._is_awaited:
                    advance_work(to_advance)
                    to_advance = 0
                self._changed.set()
            try:
                return await self._score(group, answers)
            except TokensLost as error:
                num_lost += 1
                self._note_lost(group, "the group", num_lost, error)
            self._num_sampling[group.is_evaluation] += 1
            for part in parts:
                part.facts = part.tokens = part.episodes = None
                part.partials = ()
            if is_training:
                self._admission.lose(group.number)
                self._changed.set()  # a trainer that waits for rewards has to wait for completions again

    def _note_lost(self, group: Group, lost: str, num_lost: int, error: TokensLost) -> None:
        """Count that a group or a turn is sampled again: its tokens were lost for the `num_lost`-th time. Raises the error
        where an early phase has used the tokens, or `rollout.max_restarts` is exceeded."""
        if group.is_in_part or num_lost > self._recipe.rollout.max_restarts:
            raise error
        group.num_sampled_again += 1
        logger.warning("%s of prompt %d is sampled again: %s", lost, group.prompt.index, error)

    async def _sample(self, group: Group, send: Callable[[], None] = lambda: None, is_last: bool = False) -> None:
        """Let an engine complete a group, in turns with environments if there are any; `send` is called whenever an engine
        gets a request."""
        if group.facts is None and not group.is_evaluation and takes_answer(self._recipe, group.prompt.index):
            result = GroupResult.of_examples(group.prompt, group.size, self._version)
            group.facts, group.tokens = GroupFacts.of(result), ray.put(result)
        if group.facts is not None:
            return  # before this run was interrupted, or by the data
        if self._environments is None:
            prompt = group.prompt
            seeds = tuple(request_seed(self._seed, group.step, prompt.index, member) for member in range(group.size))
            ids = np.asarray(prompt.token_ids, np.int32)
            request = GroupRequest(
                0, prompt.index, ids, seeds, group.temperature, partials=group.partials, is_evaluation=group.is_evaluation
            )
            group.facts, group.tokens = await self._router.sample(request, group.step, send, owner=group, is_last=is_last)
            return
        kind: type[GroupEpisodes] = Episodes if self._environments.gateway is None else AgentEpisodes
        episodes = kind(self._environments, group.prompt, group.size, group.temperature, group.step)

        async def generate(request: GroupRequest, episode: Episode) -> GroupResult:
            continues, request = episode.turns > 0, replace(request, is_evaluation=group.is_evaluation)
            num_lost = 0  # times
            while True:
                _, tokens = await self._router.sample(request, group.step, send, session=episode.number, continues=continues)
                try:
                    result: GroupResult = await tokens
                    return result
                except ray.exceptions.ObjectLostError as error:  # nothing has seen them
                    num_lost += 1
                    named = TokensLost(f"phase rollout: a turn was lost with the node of its engine: {error}")
                    self._note_lost(group, "a turn of the group", num_lost, named)

        try:
            await episodes.play(generate)
        finally:
            for episode in episodes.episodes:
                self._router.end_session(episode.number)
        result, group.episodes = episodes.result(), episodes.facts()
        group.facts, group.tokens = GroupFacts.of(result), ray.put(result)

    async def _score(self, group: Group, answers: bool = False) -> None:
        """Let the reward workers score a group, in full tasks but for the last one, or with staleness after `FILL_S`."""
        if self._rewards is None:
            return
        timeout_s, lane = self._recipe.rollout.timeout_s, group.is_evaluation
        scored = [
            self._rewards.score_group(
                GroupPayload(part.tokens, timeout_s), part.facts.last_segments, part.prompt, answers, lane
            )
            for part in group.parts
            if part.facts is not None
        ]
        self._num_sampling[lane] -= 1
        if self._num_sampling[lane] == 0:
            self._rewards.send_all(lane)
        elif not self._is_synchronous and self._fill_timer is None:
            self._fill_timer = self._loop.call_later(FILL_S, self._send_rewards)
        for part, scores in zip(group.parts, await asyncio.gather(*scored), strict=True):
            part.scores = scores

    def _send_rewards(self) -> None:
        """Send all that waits of a lane once the oldest has waited for `FILL_S`."""
        assert self._rewards is not None
        due = list[float]()
        for lane in (False, True):
            since = self._rewards.waiting_since(lane)
            if since is not None and since + FILL_S > self._loop.time():
                due.append(since + FILL_S)
            else:
                self._rewards.send_all(lane)
        self._fill_timer = self._loop.call_at(min(due), self._send_rewards) if due else None

    async def _next_part(self, num_groups: int) -> RolloutBatch:
        def in_no_part() -> list[Group]:
            return [group for group in self._groups.values() if group.facts is not None and not group.is_in_part]

        await self._until(lambda: len(in_no_part()) >= num_groups)
        part = sorted(in_no_part()[:num_groups], key=lambda group: group.number)
        for group in part:
            group.is_in_part = True
        return await self._join(part)

    async def _take(self) -> Taken | None:
        taken: tuple[list[int], list[int]] | None = None

        def is_over() -> bool:
            nonlocal taken
            taken = self._admission.take()
            return taken is not None or not self._admission.is_sampled

        num_rounds = self._admission.num_rounds
        await self._until(is_over)
        if taken is None:
            return None
        self._is_awaited = False
        chosen = [self._groups.pop(number) for number in taken[0]]
        passed_over = [self._groups.pop(number) for number in taken[1]]
        stale = max(self._version - min(group.facts.first_versions) for group in chosen if group.facts is not None)
        limit = self._recipe.rollout.max_staleness
        assert stale <= limit, f"a token is {stale} versions old, and rollout.max_staleness = {limit}"
        assert self._rewards is not None
        # Metrics cover the groups that were passed over, too.
        ordered = sorted([*chosen, *passed_over], key=lambda group: group.number)
        rewards = _rewards_of(self._rewards, ordered)
        numbers = [n * self._size + m for n, group in enumerate(ordered) if group in chosen for m in range(self._size)]
        rollouts = await self._join(chosen)
        greedy = [group.greedy for group in chosen if group.greedy is not None]
        greedy_rewards = None
        if greedy:
            greedy_rewards = _rewards_of(self._rewards, greedy)
            rollouts = replace(rollouts, greedy=await self._join(greedy))
        metrics = self._passed_over_metrics(ordered, chosen, rewards, num_rounds) if self._filters else {}
        if num_sampled_again := sum(part.num_sampled_again for group in ordered for part in group.parts):
            metrics["rollout/num_sampled_again"] = num_sampled_again
        if not self._is_synchronous:
            metrics |= {"rollout/groups_ahead": len(self._groups), "rollout/num_too_old": self._admission.removed["too_old"]}
        teachers = teachers_of(self._recipe, [group.prompt for group in chosen])
        return Taken(rollouts, rewards.select(numbers), greedy_rewards, metrics, teachers)

    async def _join(self, groups: Sequence[Group]) -> RolloutBatch:
        """Return finished groups as one batch."""
        facts = [group.facts for group in groups if group.facts is not None]
        batch = await self._pool.store_batch(facts, [group.tokens for group in groups])
        return batch if groups[0].episodes is None else replace(batch, episodes=_episodes_of(groups))

    async def _state(self) -> dict[str, Any]:
        assert self._prompts is not None, "a stream without prompts has no state"
        await self._router.pause()
        self._learn(in_order=False)  # a resumed run does not know the rewards of groups that were taken
        partials = await self._router.cut()
        # At one moment: groups that finish from here on may let others start.
        groups, admission, prompts = [], self._admission.state(), self._prompts.state()
        for group in [self._groups[number] for number, _ in admission["waiting"]]:
            parts = []
            for part in group.parts:
                try:
                    result = None if part.tokens is None else saved(await part.tokens)
                except ray.exceptions.ObjectLostError:  # a resumed run samples them again
                    result = None
                cut = partials.get(part, part.partials) if result is None else ()
                episodes = None if part.episodes is None else saved(part.episodes)
                parts.append({"result": result, "partials": [saved(member) for member in cut], "episodes": episodes})
            names = {"number": group.number, "step": group.step, "index": group.prompt.index, "origin": group.prompt.origin}
            groups.append(names | {"parts": parts, "is_to_learn": group in self._to_learn})
        self._router.resume([])
        return {"prompts": prompts, "admission": admission, "groups": groups}

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition of groups. Raises what ended a part of the stream, and StreamStalled if nothing happens for
        longer than any part may take: engines, which may start again, environments, rewards."""
        limit_s = 3 * self._recipe.rollout.timeout_s + self._recipe.phases.reward.timeout_s + TASK_GRACE_S
        environment = self._recipe.environment
        if environment is not None and environment.kind != "class":
            limit_s += environment.idle_s
        changed_at = self._loop.time()
        while self._error is None and not condition():
            self._changed.clear()
            try:
                async with asyncio.timeout_at(max(changed_at, self._router.progressed_at) + limit_s):
                    await self._changed.wait()
                changed_at = self._loop.time()
            except TimeoutError:
                if self._loop.time() >= max(changed_at, self._router.progressed_at) + limit_s:
                    self._end(StreamStalled(self._starving(limit_s)))
        if self._error is not None:
            raise self._error

    def _starving(self, limit_s: float) -> str:
        """Say for what the trainer waits."""
        sampling = [number for number, group in self._groups.items() if any(part.facts is None for part in group.parts)]
        scoring = [number for number, group in self._groups.items() if number not in sampling and not group.scores]
        waits = "is paused" if self._router.is_paused else "has engines at work or starting"
        return (
            f"phase rollout: step {self._step} waits for groups, and none came on within {limit_s:g} s; the stream {waits}; "
            f"groups {sampling[:8]} of {len(sampling)} wait for completions, {scoring[:8]} of {len(scoring)} for rewards"
        )

    def _rewards_in(self, group: Group) -> np.ndarray:
        """Return the rewards of a group, float32 [members], NaN where masked."""
        assert self._rewards is not None
        rewards, _ = self._rewards.rewards(group.scores)
        return rewards if group.episodes is None else rewards + group.episodes.rewards

    def _is_informative(self, group: Group) -> bool:
        """Whether the rewards of a group differ, so that its advantages are not all 0."""
        assert group.facts is not None
        rewards = self._rewards_in(group)
        counted = np.isfinite(rewards)
        if self._masks_truncated:
            counted &= np.array([group.facts.finish_reasons[last] != "length" for last in group.facts.last_segments])
        return bool(informative_groups(torch.from_numpy(rewards)[None], torch.from_numpy(counted)[None])[0])

    def _learn(self, in_order: bool = True) -> None:
        """Tell the curriculum the rewards of groups, `in_order` so that it does not matter which finished first."""
        assert self._prompts is not None
        for group in list(self._to_learn):
            if group.scores:
                self._to_learn.remove(group)
                rewards = self._rewards_in(group)
                self._prompts.learn([group.prompt], rewards, ~np.isnan(rewards))
            elif in_order:
                return

    def _passed_over_metrics(
        self, ordered: Sequence[Group], chosen: Sequence[Group], rewards: RewardResult, num_rounds: int
    ) -> dict[str, float]:
        """Return what dynamic sampling cost: groups without information, and groups and tokens that nobody trains on."""
        num_informative, num_used = (sum(map(self._is_informative, groups)) for groups in (ordered, chosen))
        tokens, used = (
            sum(sum(group.facts.own_lengths) for group in groups if group.facts is not None) for groups in (ordered, chosen)
        )
        metrics = {
            "rollout/rounds": num_rounds,
            "rollout/extra_prompts": len(ordered) - self._per_step,
            "rollout/uninformative_groups": len(ordered) - num_informative,
            "rollout/surplus_groups": num_informative - num_used,
            "rollout/filler_groups": len(chosen) - num_used,
            "rollout/discarded_tokens": tokens - used,
            "reward/sampled_mean": float(rewards.rewards[rewards.valid].mean()),
        }
        if ordered[0].episodes is not None:
            episodes = _episodes_of(ordered)
            metrics["rollout/sampled_failed_share"] = float((episodes.failures != "").mean())
            metrics["rollout/sampled_malformed_calls"] = int(episodes.malformed.sum())
        return metrics


def open_stream(
    recipe: Recipe,
    pool: EnginePool,
    model_path: str,
    stop_token_ids: Sequence[int],
    prompts: PromptStream | None,
    rewards: RewardWorkers,
    stack: ExitStack,
) -> RolloutStream:
    """Return the stream of a started pool, with environments if the recipe has them; `stack` closes both."""
    environments = None
    if recipe.environment is not None:
        num_tokens = ModelShape.from_directory(model_path).vocab
        environments = Environments(recipe, model_path, num_tokens, stop_token_ids, recipe.run.seed)
        stack.callback(environments.workers.close)
    stream = RolloutStream(recipe, pool, recipe.run.seed, prompts, rewards, environments)
    stack.callback(stream.close)
    return stream


def _episodes_of(groups: Sequence[Group]) -> EpisodeFacts:
    return EpisodeFacts.joined([group.episodes for group in groups if group.episodes is not None])


def _rewards_of(workers: RewardWorkers, groups: Sequence[Group], answers: bool = False) -> RewardResult:
    scored = workers.join([score for group in groups for score in group.scores], answers, groups[0].is_evaluation)
    return scored if groups[0].episodes is None else add_episodes(scored, _episodes_of(groups))
