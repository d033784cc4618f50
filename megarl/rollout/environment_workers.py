"""Play environments and run agents off the trainer: Ray actors with one process per episode, and limits for each.

An environment that hangs, crashes or leaks takes no other episode along (megarl/reward/fork_server.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from megarl.cluster.ray_cluster import node_share
from megarl.recipe.environment_section import AgentSection, AnyEnvironment, CommandSection
from megarl.reward.fork_server import START_TIMEOUT_S, ChildDeath, ChildLimits, ForkServerClient
from megarl.reward.outages import is_outage
from megarl.rollout import EngineSilent, RolloutError
from megarl.rollout import environment as interface
from megarl.rollout.agent import AgentRun, load_agent, load_agents
from megarl.rollout.environment import (
    Environment,
    Fields,
    MalformedCall,
    Reply,
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
ENDING_CALLS = 16


@dataclass(frozen=True)
class Reset:
    """Begin an episode."""

    row: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class Step:
    """Answer a turn, perhaps the first of the episode."""

    text: str
    is_first: bool = False


# In an episode's process -----------------------------------------------------------------------------------------------


def check_environment(section: AnyEnvironment) -> None:
    """Import the user's code on a trainer rank, and run nothing of it. Raises RecipeError."""
    if section.kind == "class":
        load_environment(section.target, section.options)
    elif section.kind == "agent":
        load_agent(section.target, section.options)


def load_episodes(section: AnyEnvironment) -> Callable[[], Callable[[Any], Reply]]:
    """In the fork server: import the environment's class or the agent once for all episodes. Raises RecipeError."""
    if section.kind != "class":
        return load_agents(section)
    return partial(_EpisodePlayer, load_environment(section.target, section.options), section.options)


class _EpisodePlayer:
    """One episode's environment, constructed at the first question."""

    def __init__(self, cls: type[Environment], options: Mapping[str, Any]) -> None:
        self._cls, self._options = cls, options
        self._environment: Environment | None = None

    def __call__(self, question: Reset | Step | None) -> Reply:
        call = "its constructor"
        try:
            if self._environment is None:
                self._environment = self._cls(**self._options)
            environment = self._environment
            if question is None:  # whether the class takes `environment.options`
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

    def __init__(self, section: AnyEnvironment, import_path: Sequence[str]) -> None:
        mark_from_environment()
        self._section = section
        num_waiting = 0 if section.kind == "class" else 1  # the process that waits for the agent
        limits = ChildLimits(section.memory_mib << 20, section.max_processes + num_waiting)
        self._server = ForkServerClient("environments", load_episodes, section, limits, import_path)

    async def ready(self) -> int:
        """Construct one environment and return this process. Raises ValueError if the class does not take its options."""
        section = self._section
        reply = await self.ask(None, None)
        self._server.end(None)
        if reply.failure:  # of a class: an agent is not tried
            assert section.kind == "class"
            raise ValueError(f"environment.options = {section.options}: {section.target}: {reply.failure}")
        return os.getpid()

    async def ask(self, episode: Any, question: Reset | Step | AgentRun | None) -> Reply:
        """Return the answer of an episode's environment or agent, or why there is none. `environment.timeout_s` begins when
        the question is sent. Rank 0 ends every episode, and an agent that exceeds that time."""
        is_step, is_run = isinstance(question, Step), isinstance(question, AgentRun)
        timeout_s = None if is_run else self._section.timeout_s
        reply = await self._server.ask(episode, question, timeout_s, starts=not is_step)
        if isinstance(reply, Reply):
            return reply
        assert isinstance(reply, ChildDeath)
        section, died = self._section, f"its process {reply.description}"
        call = {Reset: "reset", Step: "step", AgentRun: "it"}.get(type(question), "its constructor")
        failure = {
            "wall_time": f"{call} gave no answer within environment.timeout_s = {section.timeout_s:g}",
            "memory": f"its processes held more than environment.memory_mib = {section.memory_mib}",
            "processes": f"it had more processes than environment.max_processes = {section.max_processes}",
            "crash": f"crashed: {died}",
        }.get(reply.cause, died)
        # A process that died between two turns was killed by something that the turn before had started, if there was one.
        # Rank 0 knows whether an agent has had a turn.
        is_caused = is_run or (isinstance(question, Step) and not (reply.was_idle and question.is_first))
        return Reply(failure=failure, cause=reply.cause if is_caused else "")

    async def end(self, episode: Any) -> None:
        """Kill the processes of an episode, whatever they do."""
        self._server.end(episode)

    def close(self) -> None:
        """Stop all processes, and everything that they have started."""
        self._server.close()


class AgentClock:
    """The time of an agent, which stands still while one of its requests is answered."""

    def __init__(self, section: AgentSection | CommandSection) -> None:
        self._section = section
        self._spent_s = 0.0
        self._num_requests = 0
        self._since = time.monotonic()

    def begin(self) -> None:
        """Note that the agent starts now."""
        self._since = time.monotonic()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock for a request."""
        self._spent_s += self._idle_s()
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            self._since = time.monotonic()

    def left_s(self) -> float:
        """Seconds until a limit can have been passed."""
        section, idle_s = self._section, self._idle_s()
        return max(0.0, min(section.idle_s - idle_s, section.timeout_s - self._spent_s - idle_s))

    def passed(self) -> str:
        """Return which limit has been passed, or ""."""
        section, idle_s = self._section, self._idle_s()
        if self._spent_s + idle_s >= section.timeout_s:
            return f"it took longer than environment.timeout_s = {section.timeout_s:g}"
        return f"it asked nothing for environment.idle_s = {section.idle_s:g}" if idle_s >= section.idle_s else ""

    def _idle_s(self) -> float:
        return 0.0 if self._num_requests else time.monotonic() - self._since


class EnvironmentWorkers:
    """`environment.workers` actors of the connected Ray cluster, which share the episodes."""

    def __init__(self, section: AnyEnvironment, timeout_s: float) -> None:
        """Raises RolloutError if a worker does not start."""
        import ray

        self._timeout_s = timeout_s
        at_a_time = AT_A_TIME if section.kind == "class" else section.max_concurrent
        self._places = [asyncio.Semaphore(at_a_time) for _ in range(section.workers)]

        # No CPU is reserved, as for reward workers: on a small machine the engines hold them all.
        # A call for each episode that has a place, and more to end some: none waits inside Ray, where its time would run.
        calls = at_a_time + ENDING_CALLS
        remote = ray.remote(num_cpus=0, max_restarts=MAX_WORKER_RESTARTS, max_concurrency=calls)(EnvironmentWorker)
        # An endpoint at a loopback address is reached from the node of rank 0 alone.
        near = node_share(0) if section.kind != "class" and section.is_loopback else {}
        names = [{"env_vars": watched_environment(f"environment-worker-{number}")} for number in range(section.workers)]
        self._actors = [remote.options(runtime_env=name, resources=near).remote(section, sys.path) for name in names]
        try:
            ray.get([actor.ready.remote() for actor in self._actors], timeout=2 * START_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"phase rollout: no environment worker was up within {2 * START_TIMEOUT_S:g} s") from error
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:  # with what the worker raised
            raise RolloutError(f"phase rollout: a worker of environments did not start: {error}") from error

    async def run(self, episode: int, question: AgentRun, clock: AgentClock) -> Reply:
        """Run an agent as soon as its worker has room, until it ends or its `clock` has passed a limit. Raises as `ask`."""
        async with self._places[episode % len(self._places)]:
            clock.begin()
            reply = asyncio.ensure_future(self.ask(episode, question))
            try:
                while not (await asyncio.wait({reply}, timeout=clock.left_s()))[0]:
                    if passed := clock.passed():
                        return Reply(failure=passed, cause="wall_time")
                return reply.result()
            finally:
                reply.cancel()
                self.end(episode)  # before the place is another's, whose call would wait for this one to end

    async def ask(self, episode: int, question: Reset | Step | AgentRun) -> Reply:
        """Ask an episode's environment. If a worker is lost, its episodes have failed and Ray starts it again. Raises
        RolloutError if it is gone for good, EngineSilent if an environment's worker does not answer within
        `rollout.timeout_s`."""
        import ray

        try:
            worker = episode % len(self._actors)
            if isinstance(question, AgentRun):  # `run` holds a place, and ends an agent that takes too long
                return await self._actors[worker].ask.remote(episode, question)  # type: ignore[no-any-return]
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

    def end(self, episode: int) -> None:
        """Kill the processes of an episode; does not wait."""
        self._actors[episode % len(self._actors)].end.remote(episode)

    def close(self) -> None:
        """Stop the workers, and all processes below them."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
