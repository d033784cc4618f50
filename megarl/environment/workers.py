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

from megarl.environment.keeper import End, Reply, Reset, Step
from megarl.recipe.environment_section import EnvironmentSection
from megarl.watchdog.stacks import mark_from_environment, watched_environment

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
MAX_WORKER_RESTARTS = 2


class EnvironmentWorker:
    """Asks the environments of some episodes, all at the same time; a Ray actor, or by itself in an event loop.

    `import_path` is where modules are looked for: the trainer's `sys.path`. Raises ValueError where the class does not load,
    and RuntimeError where the keeper of its processes does not come up.
    """

    def __init__(self, section: EnvironmentSection, import_path: Sequence[str]) -> None:
        mark_from_environment()
        self._section, self._import_path = section, list(import_path)
        self._asked: dict[Any, asyncio.Future[Reply]] = {}  # by episode
        self._hears = False
        self._start()

    async def ready(self) -> int:
        """Answers once the worker is up, with its process."""
        return os.getpid()

    async def ask(self, episode: Any, question: Reset | Step) -> Reply:
        """What an episode's environment answers, or why it does not: then its process has ended."""
        if not self._hears:
            asyncio.get_running_loop().add_reader(self._connection.fileno(), self._hear)
            self._hears = True
        answer = self._asked[episode] = asyncio.get_running_loop().create_future()
        limit = self._section.timeout_s
        try:
            self._connection.send((episode, question))
            return await asyncio.wait_for(answer, limit)
        except TimeoutError:
            await self.end([episode])
            doing = "reset" if isinstance(question, Reset) else "step"
            return Reply(failure=f"{doing} gave no answer within environment.timeout_s = {limit:g}; its process was ended")
        except OSError:
            return Reply(failure="the keeper of its process is gone")
        finally:
            self._asked.pop(episode, None)

    async def end(self, episodes: Iterable[Any]) -> None:
        """End the processes of some episodes, whatever they do; of those that have ended it does nothing."""
        try:
            for episode in episodes:
                self._connection.send((episode, End()))
        except OSError:
            return  # they have ended with their keeper

    def close(self) -> None:
        """End all processes."""
        self._connection.close()
        try:
            self._keeper.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def _hear(self) -> None:
        """Hand on what the keeper says; where it died, start another one."""
        try:
            while self._connection.poll():
                episode, reply = self._connection.recv()
                answer = self._asked.get(episode)
                if answer is not None and not answer.done():  # nobody waits for one that was late
                    answer.set_result(reply)
        except (EOFError, ConnectionError):
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            self._hears = False
            self.close()
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_result(Reply(failure="the keeper of its process died"))
            self._start()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "megarl.environment.keeper", str(theirs.fileno())]
        self._keeper = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        try:
            # The section travels as bytes: what it needs to unpickle may lie on the path that goes before it.
            self._connection.send((self._import_path, pickle.dumps(self._section)))
            if not self._connection.poll(START_TIMEOUT_S):
                raise TimeoutError
            refusal = self._connection.recv()
        except (EOFError, ConnectionError, TimeoutError) as error:
            self.close()
            raise RuntimeError(
                f"phase rollout: the keeper of environments did not start within {START_TIMEOUT_S:g} s "
                f"(exit status {self._keeper.returncode}); its own words are above"
            ) from error
        if refusal is not None:
            self.close()
            raise ValueError(refusal)


class EnvironmentWorkers:
    """`environment.workers` actors of the connected Ray cluster, which episodes are dealt to."""

    def __init__(self, section: EnvironmentSection, max_calls: int) -> None:
        """`max_calls` of each at a time."""
        import ray

        # No CPU is reserved, as for reward workers: on a small machine the engines hold them all.
        remote = ray.remote(num_cpus=0, max_restarts=MAX_WORKER_RESTARTS, max_concurrency=max_calls)(EnvironmentWorker)
        named = [{"env_vars": watched_environment(f"environment-worker-{number}")} for number in range(section.workers)]
        self._actors = [remote.options(runtime_env=one).remote(section, sys.path) for one in named]
        try:
            ray.get([actor.ready.remote() for actor in self._actors], timeout=2 * START_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"phase rollout: no environment worker was up within {2 * START_TIMEOUT_S:g} s") from error

    def ask(self, number: int, episode: Any, question: Reset | Step) -> Any:
        """Begin to ask; the reference of a Reply. `number` says which worker has the episode."""
        return self._actors[number % len(self._actors)].ask.remote(episode, question)

    def reply(self, reference: Any) -> Reply:
        """What came of it: a worker that is lost has failed its episodes, and is started again by Ray."""
        import ray

        try:
            return ray.get(reference)
        except ray.exceptions.RayActorError as error:
            return Reply(failure=f"the worker of its process is gone: {error}")

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
