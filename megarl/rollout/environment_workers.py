"""Environments off the trainer, where Ray runs: workers that have one process for each episode, and deadlines for all of
it."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Sequence
from multiprocessing import Pipe
from typing import Any

from megarl.recipe.environment_section import EnvironmentSection
from megarl.rollout import RolloutError
from megarl.rollout.environment_keeper import End, Make, Reply, Reset, Step
from megarl.telemetry.stacks import mark_from_environment, watched_environment

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
MAX_WORKER_RESTARTS = 2
# Episodes of a worker that are asked at the same time: more would wait for cores, and for each other's deadlines.
AT_A_TIME = 64


class EnvironmentWorker:
    """Asks the environments of some episodes, all at the same time; a Ray actor, or by itself in an event loop.

    `import_path` is where modules are looked for: the trainer's `sys.path`. Raises ValueError where the class does not load
    or cannot be made with its options, and RuntimeError where the keeper of its processes does not come up.
    """

    def __init__(self, section: EnvironmentSection, import_path: Sequence[str]) -> None:
        mark_from_environment()
        self._section, self._import_path = section, list(import_path)
        self._asked: dict[Any, asyncio.Future[Reply]] = {}  # by episode
        self._hears, self._lost = False, True  # answers are read; the keeper has died
        self._places = asyncio.Semaphore(AT_A_TIME)
        self._sends = asyncio.Lock()  # one message at a time
        self._start()

    async def ready(self) -> int:
        """Answers once the worker is up, with its process."""
        return os.getpid()

    async def ask(self, episode: Any, question: Reset | Step) -> Reply:
        """What an episode's environment answers, or why it does not: then its process has ended. `environment.timeout_s`
        begins when it has been asked."""
        limit = self._section.timeout_s
        async with self._places:
            try:
                answer = await self._send(episode, question)
                return await asyncio.wait_for(answer, limit)
            except TimeoutError:
                await self.end([episode])
                doing, cause = ("reset", "") if isinstance(question, Reset) else ("step", "wall_time")
                said = f"{doing} gave no answer within environment.timeout_s = {limit:g}; its process was ended"
                return Reply(failure=said, cause=cause)
            except OSError:
                return Reply(failure="the keeper of its process is gone")
            finally:
                self._asked.pop(episode, None)

    async def end(self, episodes: Iterable[Any]) -> None:
        """End the processes of some episodes, whatever they do; of those that have ended it does nothing."""
        try:
            for episode in episodes:
                await self._send(episode, End())
        except OSError:
            return  # they have ended with their keeper

    def close(self) -> None:
        """End all processes, and what they have started; of a keeper that does not end by itself only the former."""
        self._connection.close()
        try:
            self._keeper.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    async def _send(self, episode: Any, message: Reset | Step | End) -> asyncio.Future[Reply]:
        """Tell the keeper something; what its answer will be. Where the keeper died another one is started, of which nobody
        has an end to hear. Raises OSError where it dies just then."""
        loop = asyncio.get_running_loop()
        async with self._sends:
            answer = loop.create_future()
            if self._lost and not isinstance(message, End):
                self.close()
                self._start()
            if not self._lost and not self._hears:
                loop.add_reader(self._connection.fileno(), self._hear)
                self._hears = True
            if not isinstance(message, End):
                self._asked[episode] = answer
            try:
                # In a thread: while the pipe is full answers are still read, or both ends would wait for each other.
                await asyncio.to_thread(self._connection.send, (episode, message))
            except OSError:
                self._lose()
                raise
            return answer

    def _hear(self) -> None:
        """Hand on what the keeper says."""
        try:
            while self._connection.poll():
                episode, reply = self._connection.recv()
                answer = self._asked.get(episode)
                if answer is not None and not answer.done():  # nobody waits for one that was late
                    answer.set_result(reply)
        except (EOFError, ConnectionError):
            self._lose()

    def _lose(self) -> None:
        """The keeper died, and its episodes with it. Its pipe stays open until nobody writes to it any more."""
        if self._hears:
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self._hears, self._lost = False, True
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(Reply(failure="the keeper of its process died"))

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "megarl.rollout.environment_keeper", str(theirs.fileno())]
        self._keeper = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        try:
            # The section travels as bytes: what it needs to unpickle may lie on the path that goes before it.
            self._connection.send((self._import_path, pickle.dumps(self._section)))
            if not self._connection.poll(START_TIMEOUT_S):
                raise TimeoutError
            refusal = self._connection.recv()
            if refusal is None:
                refusal = self._tried()
        except (EOFError, ConnectionError, TimeoutError) as error:
            self.close()
            raise RuntimeError(
                f"phase rollout: the keeper of environments did not start within {START_TIMEOUT_S:g} s "
                f"(exit status {self._keeper.returncode}); its own words are above"
            ) from error
        if refusal is not None:
            self.close()
            raise ValueError(refusal)
        self._lost = False

    def _tried(self) -> str | None:
        """What is wrong with an environment that is made with the options."""
        section, limit = self._section, self._section.timeout_s
        self._connection.send((None, Make()))
        if self._connection.poll(limit):
            wrong = self._connection.recv()[1].failure
        else:
            wrong = f"its constructor did not come back within environment.timeout_s = {limit:g}"
        self._connection.send((None, End()))
        return f"environment.options = {section.options}: {section.target}: {wrong}" if wrong else None


class EnvironmentWorkers:
    """`environment.workers` actors of the connected Ray cluster, which episodes are dealt to."""

    def __init__(self, section: EnvironmentSection, max_calls: int) -> None:
        """`max_calls` of each at a time. Raises RolloutError where a worker does not start."""
        import ray

        # No CPU is reserved, as for reward workers: on a small machine the engines hold them all.
        remote = ray.remote(num_cpus=0, max_restarts=MAX_WORKER_RESTARTS, max_concurrency=max_calls)(EnvironmentWorker)
        named = [{"env_vars": watched_environment(f"environment-worker-{number}")} for number in range(section.workers)]
        self._actors = [remote.options(runtime_env=one).remote(section, sys.path) for one in named]
        try:
            ray.get([actor.ready.remote() for actor in self._actors], timeout=2 * START_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"phase rollout: no environment worker was up within {2 * START_TIMEOUT_S:g} s") from error
        except ray.exceptions.RayActorError as error:  # with what the worker raised
            raise RolloutError(f"phase rollout: a worker of environments did not start: {error}") from error

    def ask(self, number: int, episode: Any, question: Reset | Step) -> Any:
        """Begin to ask; the reference of a Reply. `number` says which worker has the episode."""
        return self._actors[number % len(self._actors)].ask.remote(episode, question)

    def reply(self, reference: Any) -> Reply:
        """What came of it: a worker that is lost has failed its episodes, and is started again by Ray. Raises RolloutError
        for one that is gone for good."""
        import ray

        try:
            return ray.get(reference)
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

    def end(self, episodes: Iterable[tuple[int, Any]]) -> None:
        """End the processes of some episodes, each with its `number`; does not wait."""
        for number, episode in episodes:
            self._actors[number % len(self._actors)].end.remote([episode])

    def close(self) -> None:
        """Stop the workers, and all processes below them."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
