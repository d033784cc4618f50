"""Play environments off the trainer: Ray actors with one process per episode, and a deadline for each call.

An environment that hangs, crashes or leaks takes no other episode along (megarl/reward/fork_server.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megarl.recipe.environment_section import EnvironmentSection
from megarl.reward.fork_server import START_TIMEOUT_S, ChildDeath, ChildLimits, ForkServerClient, is_outage
from megarl.rollout import EngineSilent, RolloutError
from megarl.rollout import environment as interface
from megarl.rollout.environment import (
    Environment,
    Fields,
    MalformedCall,
    Turn,
    checked_messages,
    checked_observation,
    load_environment,
    read_call,
)
from megarl.telemetry.stacks import mark_from_environment, watched_environment

MAX_WORKER_RESTARTS = 2
# Episodes that are asked of a worker at the same time: more would wait for cores, and for each other's deadlines.
AT_A_TIME = 64


@dataclass(frozen=True)
class Make:
    """Construct an environment that nobody plays, to see whether it takes `environment.options`."""


@dataclass(frozen=True)
class Reset:
    """Begin an episode."""

    row: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class Step:
    """Answer a turn."""

    text: str


@dataclass(frozen=True)
class Reply:
    """An environment's answer: messages (None if reset keeps the row's prompt), the turn's reward, and whether the episode
    is over. Or the failure: with a `cause`, one of ZERO_CAUSES, if a turn of the policy can be the cause. `malformed`: the
    turn held a tool call that cannot be answered."""

    messages: list[dict[str, str]] | None = None
    reward: float = 0.0
    done: bool = False
    malformed: bool = False
    failure: str = ""
    cause: str = ""


# In an episode's process -----------------------------------------------------------------------------------------------


def load_episodes(section: EnvironmentSection) -> Callable[[], Callable[[Make | Reset | Step], Reply]]:
    """In the fork server: import the environment's class once for all episodes. Raises RecipeError."""
    return partial(_EpisodePlayer, load_environment(section.target, section.options), section.options)


class _EpisodePlayer:
    """One episode's environment, constructed at the first question."""

    def __init__(self, cls: type[Environment], options: Mapping[str, Any]) -> None:
        self._cls, self._options = cls, options
        self._environment: Environment | None = None

    def __call__(self, question: Make | Reset | Step) -> Reply:
        call = "its constructor"
        try:
            if self._environment is None:
                self._environment = self._cls(**self._options)
            environment = self._environment
            if isinstance(question, Make):
                return Reply()
            if isinstance(question, Reset):
                call = "reset"
                first = environment.reset(Fields(question.row), question.seed)
                return Reply(None if first is None else checked_messages(first, "what reset returned"))
            call = "step"
            try:
                tool_call = read_call(question.text, environment.tools) if environment.tools else None
            except MalformedCall as error:
                return Reply([{"role": environment.tool_role, "content": f"error: {error}"}], malformed=True)
            return Reply(*checked_observation(environment.step(Turn(question.text, tool_call))))
        except Exception as error:  # whatever a user's environment raises is that episode's failure, not the run's
            cause = "error" if isinstance(question, Step) and not is_outage(error) else ""
            frames = traceback.extract_tb(error.__traceback__)
            users = [frame for frame in frames if frame.filename not in (__file__, interface.__file__)]
            where = f" ({os.path.basename(users[-1].filename)}:{users[-1].lineno})" if users else ""
            return Reply(failure=f"{call} raised {type(error).__name__}: {error}{where}", cause=cause)


# The worker ------------------------------------------------------------------------------------------------------------


class EnvironmentWorker:
    """Asks the environments of some episodes, all at the same time; a Ray actor.

    `import_path` is the trainer's `sys.path`. Raises ValueError if the class does not load, and RuntimeError if the fork
    server does not start.
    """

    def __init__(self, section: EnvironmentSection, import_path: Sequence[str]) -> None:
        mark_from_environment()
        self._section = section
        limits = ChildLimits(section.memory_mib << 20)
        self._server = ForkServerClient("environments", load_episodes, section, limits, import_path)
        self._played: set[Any] = set()  # episodes that have had a turn

    async def ready(self) -> int:
        """Construct one environment and return this process. Raises ValueError if the class does not take its options."""
        section = self._section
        reply = await self._ask(None, Make())
        await self._server.end([None])
        if reply.failure:
            raise ValueError(f"environment.options = {section.options}: {section.target}: {reply.failure}")
        return os.getpid()

    async def ask(self, episode: Any, question: Reset | Step) -> Reply:
        """Return the answer of an episode's environment, or why there is none; then its process is killed."""
        return await self._ask(episode, question)

    async def end(self, episodes: Iterable[Any]) -> None:
        """Kill the processes of some episodes, whatever they do; episodes that are over already are skipped."""
        episodes = list(episodes)
        self._played.difference_update(episodes)
        await self._server.end(episodes)

    def close(self) -> None:
        """Stop all processes, and everything that they have started."""
        self._server.close()

    async def _ask(self, episode: Any, question: Make | Reset | Step) -> Reply:
        is_step = isinstance(question, Step)
        reply = await self._server.ask(episode, question, self._section.timeout_s, starts=not is_step)
        had_turn = episode in self._played
        if is_step:
            self._played.add(episode)
        if isinstance(reply, Reply):
            return reply
        assert isinstance(reply, ChildDeath)
        match reply.cause:
            case "wall_time":
                call = {Make: "its constructor", Reset: "reset", Step: "step"}[type(question)]
                failure = f"{call} gave no answer within environment.timeout_s = {self._section.timeout_s:g}"
            case "memory":
                failure = f"its processes held more than environment.memory_mib = {self._section.memory_mib}"
            case "crash":
                failure = f"crashed: its process {reply.description}"
            case "fork":
                failure = (
                    f"its process {reply.description}: raise that limit, or spread environment.workers = more over machines"
                )
            case _:
                failure = f"its process {reply.description}"
        # A process that died between two turns was killed by something that the turn before had started.
        is_caused = had_turn if reply.was_idle else is_step
        return Reply(failure=failure, cause=reply.cause if is_caused else "")


class EnvironmentWorkers:
    """`environment.workers` actors of the connected Ray cluster, which share the episodes."""

    def __init__(self, section: EnvironmentSection, max_calls: int, timeout_s: float) -> None:
        """Each actor takes up to `max_calls` calls at a time. Raises RolloutError if a worker does not start."""
        import ray

        self._timeout_s = timeout_s
        self._places = [asyncio.Semaphore(AT_A_TIME) for _ in range(section.workers)]

        # No CPU is reserved, as for reward workers: on a small machine the engines hold them all.
        remote = ray.remote(num_cpus=0, max_restarts=MAX_WORKER_RESTARTS, max_concurrency=max_calls)(EnvironmentWorker)
        names = [{"env_vars": watched_environment(f"environment-worker-{number}")} for number in range(section.workers)]
        self._actors = [remote.options(runtime_env=name).remote(section, sys.path) for name in names]
        try:
            ray.get([actor.ready.remote() for actor in self._actors], timeout=2 * START_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"phase rollout: no environment worker was up within {2 * START_TIMEOUT_S:g} s") from error
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:  # with what the worker raised
            raise RolloutError(f"phase rollout: a worker of environments did not start: {error}") from error

    async def ask(self, episode: int, question: Reset | Step) -> Reply:
        """Ask an episode's environment. If a worker is lost, its episodes have failed and Ray starts it again. Raises
        RolloutError if it is gone for good, EngineSilent if it does not answer within `rollout.timeout_s`."""
        import ray

        try:
            worker = episode % len(self._actors)
            async with self._places[worker], asyncio.timeout(self._timeout_s):
                return await self._actors[worker].ask.remote(episode, question)  # type: ignore[no-any-return]
        except TimeoutError as error:
            raise EngineSilent(
                f"environments: a worker gave no answer in phase rollout within rollout.timeout_s = {self._timeout_s:g}"
            ) from error
        except ray.exceptions.ActorDiedError as error:
            raise RolloutError(
                f"phase rollout: a worker of environments is gone for good, after {MAX_WORKER_RESTARTS} restarts; the log "
                f"of its machine says why, most often for want of memory: environment.workers = more share it; a "
                f"resume goes on from the last checkpoint; cause: {error}"
            ) from error
        except ray.exceptions.RayActorError as error:
            return Reply(failure=f"the worker of its process is gone: {error}")
        except ray.exceptions.RayTaskError as error:
            return Reply(failure=f"the worker of its process could not ask it: {error.cause}")

    def end(self, episodes: Iterable[int]) -> None:
        """Kill the processes of some episodes; does not wait."""
        for episode in episodes:
            self._actors[episode % len(self._actors)].end.remote([episode])

    def close(self) -> None:
        """Stop the workers, and all processes below them."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
