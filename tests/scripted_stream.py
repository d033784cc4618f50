"""Engines that answer when a test says so, without Ray, for routers and streams."""

from __future__ import annotations

import asyncio
import functools
import itertools
import pickle
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import ray

from megarl.data.sample import Completion, Example, Prompt, Sample
from megarl.recipe import Recipe
from megarl.reward.verifiers import TextScore
from megarl.reward.workers import RewardWorkers, Task, TaskResult
from megarl.rollout import EngineDied, RolloutError, environment_workers
from megarl.rollout.engine import BatchPart, GroupRequest
from megarl.rollout.environment_workers import EnvironmentWorkers, Reply
from megarl.rollout.groups import GroupFacts, GroupResult, RolloutBatch, RolloutExecuted
from megarl.rollout.router import Router
from megarl.rollout.session import SessionLimits
from megarl.rollout.stream import RolloutStream
from tests.rollout_cases import recipe


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock a test moves."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.routers: list[Router] = []

    def time(self) -> float:
        return self.now


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in a new `Loop` and close its routers. Fails if a task is left."""

    async def work_and_close() -> None:
        await work
        for routes in clock().routers:
            await routes.close()

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(work_and_close())
        assert not asyncio.all_tasks(runner.get_loop()), "a task is left"


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine, which runs in a new `Loop`."""

    @functools.wraps(test)
    def in_new_loop(**arguments: Any) -> None:
        run(test(**arguments))

    return in_new_loop


async def settle() -> None:
    """Let the loop do all that it can do now."""
    for _ in range(12):
        await asyncio.sleep(0)


def request(group: int = 0, members: int = 1, prompt_tokens: int = 1, max_new_tokens: int | None = None) -> GroupRequest:
    return GroupRequest(
        0, group, np.arange(prompt_tokens), tuple((member,) for member in range(members)), max_new_tokens=max_new_tokens
    )


@dataclass(eq=False)
class Work:
    """A request that an engine holds."""

    request: GroupRequest
    version: int
    facts: asyncio.Future[GroupFacts]
    tokens: asyncio.Future[GroupResult]


def two_tokens(request: GroupRequest, version: int) -> GroupResult:
    members = [
        Completion(np.array([7, 1], np.int32), np.zeros(2, np.float32), "stop", np.full(2, version)) for _ in request.seeds
    ]
    return GroupResult.of(request.group, request.prompt_ids, members)


@dataclass(eq=False)
class ScriptedEngine:
    """In the place of an EngineHandle. `calls` has the requests of each batch. It completes a request, by `complete`,
    `delay` seconds after it came, or when a test says so if that is None. With `holds_submissions` it begins nothing and
    confirms nothing until `accept`; `submissions` are its answers to `holds`. `arrivals` gets what it begins."""

    index: int
    restarts: int = 0
    version: int = 0
    delay: Callable[[GroupRequest], float | None] = lambda request: None
    complete: Callable[[GroupRequest, int], GroupResult] = two_tokens
    loses: Callable[[GroupRequest], bool] = lambda request: False  # the tokens, as if its node had died
    arrivals: queue.SimpleQueue[GroupRequest] = field(default_factory=queue.SimpleQueue)
    calls: list[list[GroupRequest]] = field(default_factory=list)
    continued: list[bool] = field(default_factory=list)
    work: dict[int, Work] = field(default_factory=dict)  # unfinished, by position
    held: list[Work] = field(default_factory=list)
    is_dead: bool = False
    is_lost: bool = False
    is_silent: bool = False  # when it is to cut its requests
    holds_submissions: bool = False
    submissions: list[asyncio.Future[None]] = field(default_factory=list)
    first_batch: int = 0  # in `calls`, since it was started
    max_requests: int = 1000

    def __post_init__(self) -> None:
        self.name = f"rollout engine {self.index}"
        self.settings = SimpleNamespace(index=self.index, takes_turns=False)
        self.process = SimpleNamespace(max_concurrent=8)

    def call(self, method: str, argument: Any) -> Any:
        if self.is_dead:
            raise EngineDied("it was ended")
        loop = asyncio.get_running_loop()
        if method == "sample":
            part: BatchPart = pickle.loads(argument)
            if self.first_batch + part.batch == len(self.calls):
                self.calls.append([])
                self.continued.append(part.continues)
            batch = self.calls[self.first_batch + part.batch]
            batch.append(part.request)
            assert len(batch) <= part.size and part.request.position not in self.work
            work = Work(part.request, self.version, loop.create_future(), loop.create_future())
            self.work[part.request.position] = work
            self.held.append(work)
            if not self.holds_submissions:
                self._begin()
            return work.facts, work.tokens
        answer: asyncio.Future[Any] = loop.create_future()
        if method == "holds":
            assert argument == len(self.calls) - self.first_batch, "not all that was sent"
            self.submissions.append(answer)
            if not self.holds_submissions:
                answer.set_result(None)
        else:
            assert method == "cut"
            if not self.is_silent:
                answer.set_result({position: self.work[position].request.partials for position in argument})
        return answer

    def _begin(self) -> None:
        for work in self.held:
            if (seconds := self.delay(work.request)) is not None:
                asyncio.get_running_loop().call_later(seconds, self.finish, work.request.position, None, work)
            self.arrivals.put(work.request)
        self.held.clear()

    async def answer(self, reference: asyncio.Future[Any]) -> Any:
        return await asyncio.shield(reference)

    def accept(self) -> None:
        """Begin all requests and confirm them, and those that come."""
        self.holds_submissions = False
        self._begin()
        for accepted in self.submissions:
            if not accepted.done():
                accepted.set_result(None)

    def finish(self, position: int, error: Exception | None = None, expected: Work | None = None) -> None:
        """Complete a request, only if it is the `expected` one."""
        if expected is not None and self.work.get(position) is not expected:
            return  # the engine died in between
        work = self.work.pop(position)
        try:
            if error is not None:
                raise error
            result = self.complete(work.request, work.version)
        except Exception as raised:
            work.facts.set_exception(raised)
            return
        work.facts.set_result(GroupFacts.of(result))
        if self.loses(work.request):
            work.tokens.set_exception(ray.exceptions.ObjectLostError("ab", None, ""))
        else:
            work.tokens.set_result(result)

    def finish_all(self) -> None:
        """Complete all requests that it holds."""
        for position in list(self.work):
            self.finish(position)

    def release(self, group: int) -> None:
        """Complete a request, from another thread."""
        work = next(work for work in self.work.values() if work.request.group == group)
        work.facts.get_loop().call_soon_threadsafe(self.finish, work.request.position)

    def die(self, tells: bool = True) -> list[Work]:
        """End; without `tells` return what it held, which nobody knows to be lost before `lose`."""
        self.is_dead = True
        lost, self.work, self.held = list(self.work.values()), {}, []
        submissions, self.submissions = self.submissions, []
        for accepted in submissions:
            if not accepted.done():
                accepted.set_exception(EngineDied("killed"))
        if tells:
            for work in lost:
                lose(work)
        return lost

    def start(self) -> None:
        """Come back, empty."""
        self.restarts += 1
        self.is_dead, self.work, self.held, self.submissions = False, {}, [], []
        self.first_batch = len(self.calls)

    @property
    def groups(self) -> list[list[int]]:
        """The groups of each batch."""
        return [[request.group for request in call] for call in self.calls]


def lose(work: Work) -> None:
    """Say that the engine of a request is dead."""
    if not work.facts.done():
        work.facts.set_exception(EngineDied("killed"))


class InMemory:
    """In the place of a payload in Ray's object store."""

    def __init__(self, groups: Sequence[GroupResult]) -> None:
        self.groups, self.size = groups, len(groups[0].lengths)

    def fetch(self, sample_ids: Iterable[int]) -> dict[int, Sample]:
        return {s: self.groups[s // self.size].sample(s % self.size) for s in sample_ids}


@dataclass(eq=False)
class ScriptedPool:
    """In the place of an EnginePool. A restart waits for `may_restart`, does nothing for an engine that is lost, and fails
    with `restart_error`."""

    engines: list[ScriptedEngine]
    restarted: list[int] = field(default_factory=list)
    may_restart: threading.Event = field(default_factory=threading.Event)
    restart_error: Exception | None = None
    has_published: bool = True
    max_concurrent: int = 8
    check: Callable[[Sequence[Prompt]], None] = lambda prompts: None

    @classmethod
    def of(cls, count: int, **settings: Any) -> ScriptedPool:
        pool = cls([ScriptedEngine(index, **settings) for index in range(count)])
        pool.may_restart.set()
        return pool

    def restart(self, engine: ScriptedEngine, phase: str, cause: Exception) -> bool:
        assert self.may_restart.wait(60)
        self.restarted.append(engine.index)
        if engine.is_lost:
            return False
        if self.restart_error is not None:
            raise self.restart_error
        for work in engine.work.values():
            work.facts.get_loop().call_soon_threadsafe(lose, work)
        engine.start()
        return not self.has_published

    def end_restarts(self, ends: bool) -> None:
        if not ends:
            return
        self.restart_error = self.restart_error or RolloutError("the run ends")
        self.may_restart.set()

    async def store_batch(self, facts: Sequence[GroupFacts], tokens: Sequence[Any]) -> RolloutBatch:
        results = [group if isinstance(group, GroupResult) else await group for group in tokens]
        executed = RolloutExecuted(len(facts), len(facts[0].lengths), self.max_concurrent)
        return RolloutBatch.of(facts, InMemory(results), executed, {})


@dataclass(eq=False)
class ScriptedPrompts:
    """In the place of a PromptStream. `learned` has the prompts whose rewards it was given, in order; each prompt has the
    `examples`."""

    position: int = 0
    examples: tuple[Example, ...] = ()
    learned: list[int] = field(default_factory=list)

    def take(self, count: int) -> list[Prompt]:
        self.position += count
        return [replace(prompt(index), examples=self.examples) for index in range(self.position - count, self.position)]

    def learn(self, prompts: Sequence[Prompt], rewards: np.ndarray, valid: np.ndarray) -> None:
        self.learned += [prompt.index for prompt in prompts]

    def metrics(self) -> dict[str, float]:
        return {"data/position": self.position}

    def state(self) -> dict[str, int]:
        return {"position": self.position}


TASK_S = 0.25  # that each task of a `ScriptedScorer` says it took


class ScriptedScorer:
    """In the place of `Scorer`: scores member `sample` of a prompt by `score(prompt, sample, tokens)`, or m with m."""

    def __init__(self, score: Callable[[Prompt, int, GroupResult], TextScore] | None = None) -> None:
        self._score = score or (lambda prompt, member, tokens: TextScore({"last_number": float(member)}))
        self.num_scored = 0

    async def ready(self) -> int:
        return 0

    async def score_task(self, task: Task) -> TaskResult:
        scores = []
        for (payload, samples), prompt in zip(task.pieces, pickle.loads(task.pickled_prompts), strict=True):
            tokens = payload.tokens if isinstance(payload.tokens, GroupResult) else await payload.tokens
            scores += [self._score(prompt, sample, tokens) for sample in samples]
        self.num_scored += len(scores)
        return TaskResult(scores, TASK_S, 0)

    async def close(self) -> None:
        """There is nothing to end."""


def scripted_rewards(recipe: Recipe, scorer: ScriptedScorer, sequences: int | None = None) -> RewardWorkers:
    """`RewardWorkers` with a scorer of a test, in this process; tasks of `sequences`, as the recipe says if that is None."""
    section = recipe.phases.reward.model_copy(update={} if sequences is None else {"sequences": sequences})
    with mock.patch("megarl.reward.workers.Scorer", lambda *_: scorer):
        return RewardWorkers(recipe.verifiers, "model", (), section, local=True)


def scripted_environments(answer: Callable[[Any], Any], timeout_s: float) -> Any:
    """In the place of `Environments`: two turns with one worker, whose `answer` gets each question."""

    async def ask(episode: int, question: Any) -> Reply:
        return await answer(question)

    workers = EnvironmentWorkers.__new__(EnvironmentWorkers)
    workers._timeout_s, workers._places = timeout_s, [asyncio.Semaphore(environment_workers.AT_A_TIME)]
    workers._actors = [SimpleNamespace(ask=SimpleNamespace(remote=ask), end=SimpleNamespace(remote=lambda episodes: None))]
    return SimpleNamespace(
        section=SimpleNamespace(kind="class", target="module:Game", max_turns=2, max_observation_tokens=8, on_error="mask"),
        recipe=SimpleNamespace(max_completion_tokens=24, rollout=SimpleNamespace(max_new_tokens=4)),
        limits=SessionLimits(64, 24, 1),
        gateway=None, seed=0, stops=frozenset(), numbers=itertools.count(), workers=workers,
        tokenizer=SimpleNamespace(decode=lambda ids: "turn"),
        observations=SimpleNamespace(chat=None, behind=lambda last, messages: np.array([5], np.int32)),
    )  # fmt: skip


def prompt(index: int) -> Prompt:
    return Prompt(index, np.array([3, 4], np.int32), "", "1", {})


PER_STEP, SIZE = 2, 2


def stream_recipe(phases__reward__timeout_s: float | None = None, **rollout: Any) -> Any:
    """Two groups of two a step."""
    values = recipe(Path("nowhere"), **rollout).model_dump()
    values["phases"]["rollout"] |= {"prompts": PER_STEP, "max_concurrent": 8}
    values["phases"]["actor_update"] |= {"mini_batch": PER_STEP * SIZE}
    values["algorithm"]["group_size"] = SIZE
    values["run"]["steps"] = 1000
    values["phases"]["reward"]["timeout_s"] = phases__reward__timeout_s or values["phases"]["reward"]["timeout_s"]
    return recipe(Path("nowhere")).model_validate(values)


@dataclass
class Trainer:
    """Takes steps from a stream as the trainer does. The engines' version is the number of steps that are over."""

    stream: RolloutStream
    pool: ScriptedPool
    step: int = 0
    resynced: list[list[int]] = field(default_factory=list)
    threads: set[threading.Thread] = field(default_factory=set)

    def begin(self) -> None:
        self.step += 1
        self.stream.begin(self.step)

    def take(self) -> Any:
        """Take a step's groups."""
        taken = None
        while taken is None:
            self.stream.wait_sampled(self.resync)
            taken = self.stream.take()
        return taken

    def sync(self) -> None:
        """Send the weights of this step to all engines."""
        self._send(self.step, None)

    def resync(self, engines: Sequence[int]) -> None:
        self.resynced.append(list(engines))
        self.threads.add(threading.current_thread())
        self._send(self.step - 1, engines)

    def in_loop(self, function: Callable[[], Any]) -> None:
        """Run a function in the stream's loop, and wait for it."""
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.stream._loop.call_soon_threadsafe(lambda: done.put(function()))
        done.get(timeout=20)

    def _send(self, version: int, engines: Sequence[int] | None) -> None:
        self.stream.pause()
        for engine in self.pool.engines:
            if engines is None or engine.index in engines:
                if engine.is_dead:
                    engine.start()
                engine.version = version
        self.stream.resume(version, engines)


@contextmanager
def trainer(
    pool: ScriptedPool,
    rewards: RewardWorkers | None = None,
    environments: Any = None,
    prompts: ScriptedPrompts | None = None,
    **rollout: Any,
) -> Iterator[Trainer]:
    """A trainer with a stream that is closed at the end, as its rewards are, and leaves no thread."""
    before, loaded = set(threading.enumerate()), stream_recipe(**rollout)
    rewards = rewards or scripted_rewards(loaded, ScriptedScorer(), SIZE)  # no group waits for others
    stream = RolloutStream(loaded, pool, 0, prompts or ScriptedPrompts(), rewards, environments)  # type: ignore[arg-type]
    try:
        yield Trainer(stream, pool)
    finally:
        stream.close()
        rewards.close()
    assert set(threading.enumerate()) <= before, "a thread is left"


ROUTER_TIMEOUT_S = 30.0


def router(
    pool: ScriptedPool,
    depth: int | None = None,
    unserved: list[list[int]] | None = None,
    errors: list[Exception] | None = None,
) -> Router:
    """A router with completions of 100 tokens at most, which `run` closes. `unserved` gets the engines that wait for weights
    when no live engine is left."""
    routes: Router
    errors = errors if errors is not None else []

    def on_unserved() -> None:
        if unserved is not None:
            unserved.append(routes.unserved)

    routes = Router(pool, ROUTER_TIMEOUT_S, 100, depth, on_unserved, errors.append)  # type: ignore[arg-type]
    clock().routers.append(routes)
    return routes


def clock() -> Loop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    return loop
