"""Environments in processes of their own, because only a process can be stopped for sure, one for each episode: one that
hangs, crashes or leaks takes no other along.

A keeper has the user's module imported and forks for each episode, which takes milliseconds where a new Python takes a
second. It runs nothing of the user's itself but the import: instances are made below it. It hands messages on: (episode,
question) from its parent, (episode, answer) back.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

from megarl.recipe.environment_section import EnvironmentSection
from megarl.recipe.violation import RecipeError
from megarl.reward.process_tree import LIBC, PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, below, end_all, is_over
from megarl.rollout import environment as interface
from megarl.rollout.environment import Environment, Fields, Turn, checked_messages, checked_observation, load_environment
from megarl.rollout.tool_calls import MalformedCall, read_call
from megarl.telemetry.stacks import mark_from_environment

LOOK_S = 0.1  # how often it is looked what the processes of episodes at work hold


@dataclass(frozen=True)
class Make:
    """Make an environment that nobody plays, to see whether `environment.options` are right."""


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
class End:
    """Nobody asks anything of the episode any more, or it is to be ended whatever it does."""


@dataclass(frozen=True)
class Reply:
    """What an environment said: messages (None where reset left the row's prompt), what the turn was worth, and whether it
    was the last; or why it said nothing, and by what `cause` of SCORED if that was
    behind a turn of the policy. `malformed`: the turn held a tool call that cannot be answered."""

    messages: list[dict[str, str]] | None = None
    reward: float = 0.0
    done: bool = False
    malformed: bool = False
    failure: str = ""
    cause: str = ""


class Keeper:
    """The processes of some episodes, seen from the process that forks them."""

    def __init__(
        self, parent: Connection, made: type[Environment], options: Mapping[str, Any], memory_bytes: int = 4 << 30
    ) -> None:
        """`memory_bytes` is what the processes of an episode may hold together."""
        self._parent, self._made, self._options, self._memory_bytes = parent, made, options, memory_bytes
        self._episodes: dict[Any, tuple[int, Connection]] = {}  # process and its end of a pipe
        self._steps: dict[Any, bool] = {}  # episodes at work: whether they answer a turn
        self._played: set[Any] = set()  # episodes that were asked a turn
        self._died: dict[Any, Reply] = {}  # episodes whose process died between turns: what the next one is told
        self._kept = set(below(os.getpid(), deep=False))  # what the user's module has started: all episodes may use it
        # It knows the pipes, and is not told all of them for each answer.
        self._look_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(parent, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the parent has gone."""
        try:
            while True:
                for ready, _ in self._selector.select(LOOK_S if self._steps else None):
                    if ready.fileobj is self._parent:
                        self._hear(*self._parent.recv())
                    elif ready.data in self._episodes:  # else it has been ended just now
                        self._hand_on(ready.data)
                self._look()
        except (EOFError, ConnectionError):
            return
        finally:
            for episode in list(self._episodes):
                self._end(episode)

    def _look(self) -> None:
        """End the episodes at work that hold too much memory."""
        if time.monotonic() < self._look_at:
            return
        for episode, is_step in list(self._steps.items()):
            process = self._episodes[episode][0]
            if is_over([process, *below(process)], self._memory_bytes, parent=os.getpid()):
                self._end(episode)
                said = f"its processes held more than environment.memory_mib = {self._memory_bytes >> 20}, and were ended"
                self._parent.send((episode, Reply(failure=said, cause="memory" if is_step else "")))
        self._look_at = time.monotonic() + LOOK_S

    def _hear(self, episode: Any, question: Make | Reset | Step | End) -> None:
        if isinstance(question, End | Make | Reset):
            self._played.discard(episode)
            self._died.pop(episode, None)
        if isinstance(question, End):
            if episode in self._episodes:
                self._end(episode)
            return
        if isinstance(question, Make | Reset):
            try:
                self._begin(episode)
            except OSError as error:
                self._parent.send((episode, Reply(failure=_no_process(error, len(self._episodes)))))
                return
        if episode not in self._episodes:
            gone = Reply(failure="the process of its environment is gone")
            self._parent.send((episode, self._died.get(episode, gone)))
            return
        self._steps[episode] = isinstance(question, Step)
        if isinstance(question, Step):
            self._played.add(episode)
        with suppress(ConnectionError):  # then its pipe says so, which is handed on
            self._episodes[episode][1].send(question)

    def _hand_on(self, episode: Any) -> None:
        try:
            reply = self._episodes[episode][1].recv()
        except (EOFError, ConnectionError):
            is_asked, cause = episode in self._steps, "crash" if self._steps.get(episode, episode in self._played) else ""
            reply = Reply(failure=f"crashed: its process died with {self._end(episode)}", cause=cause)
            if not is_asked:  # a tool call of the turn before may have killed it meanwhile
                self._died[episode] = reply
                return
        self._steps.pop(episode, None)
        self._parent.send((episode, reply))

    def _begin(self, episode: Any) -> None:
        """Raises OSError where the machine gives no further process or pipe."""
        ours, theirs = Pipe()
        keeper = os.getpid()
        try:
            process = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if not process:
            _play(keeper, theirs, [self._selector, self._parent, ours, *(pipe for _, pipe in self._episodes.values())],
                  self._made, self._options)  # fmt: skip
        theirs.close()
        self._episodes[episode] = process, ours
        self._selector.register(ours, selectors.EVENT_READ, episode)

    def _end(self, episode: Any) -> str:
        """End an episode's process, and all that it has started; how the former ended."""
        process, pipe = self._episodes.pop(episode)
        self._steps.pop(episode, None)
        self._selector.unregister(pipe)
        pipe.close()
        end_all(process, itself=True)
        _, status = os.waitpid(process, 0)
        # What a process has left that ended by itself is below this one now, and belongs to no other episode.
        own = self._kept | {one for one, _ in self._episodes.values()}
        for stray in set(below(os.getpid(), deep=False)) - own:
            end_all(stray, itself=True)
            with suppress(ChildProcessError):
                os.waitpid(stray, 0)
        code = os.waitstatus_to_exitcode(status)
        return f"signal {-code}" if code < 0 else f"exit status {code}"


def _no_process(error: OSError, num_episodes: int) -> str:
    files, processes = (resource.getrlimit(which)[0] for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    return (
        f"no process could be made for it beside {num_episodes} of other episodes: {error}; ulimit -n is {files} and "
        f"ulimit -u {processes}: raise what is short, spread environment.workers = more over more machines, or play fewer "
        "episodes in a step"
    )


def _play(
    keeper: int,
    pipe: Connection,
    others: Sequence[Connection | selectors.BaseSelector],
    made: type[Environment],
    options: Mapping[str, Any],
) -> NoReturn:
    """The process of one episode, until its pipe is closed. It never returns into the keeper's stack."""
    status = 1
    try:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == keeper:  # else the keeper died before that was set
            LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what it starts stays below it
            os.setsid()
            for other in others:
                other.close()
            environment = None
            while True:
                question = pipe.recv()  # before the user's code, which may hang: the keeper would wait with a long row
                if environment is None:
                    try:
                        environment = made(**options)
                    except Exception as error:  # whatever the user's class raises
                        pipe.send(Reply(failure=f"its constructor raised {_said(error)}"))
                        continue
                pipe.send(_answer(environment, question))
    except (EOFError, ConnectionError):
        status = 0
    except BaseException:  # SystemExit too: a forked process must not go on with the keeper's stack
        traceback.print_exc()
    finally:
        os._exit(status)


def _answer(environment: Environment, question: Make | Reset | Step) -> Reply:
    if isinstance(question, Make):
        return Reply()
    doing = "reset" if isinstance(question, Reset) else "step"
    try:
        if isinstance(question, Reset):
            first = environment.reset(Fields(question.row), question.seed)
            return Reply(None if first is None else checked_messages(first, "what reset returned"))
        call = None
        if environment.tools:
            try:
                call = read_call(question.text, environment.tools)
            except MalformedCall as error:
                return Reply([{"role": environment.tool_role, "content": f"error: {error}"}], malformed=True)
        return Reply(*checked_observation(environment.step(Turn(question.text, call))))
    except Exception as error:  # whatever a user's environment raises is that episode's failure, not the run's
        cause = "error" if isinstance(question, Step) else ""
        return Reply(failure=f"{doing} raised {_said(error)}", cause=cause)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}{_where(error)}"


def _where(error: BaseException) -> str:
    """The last line that is the environment's own."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename not in (__file__, interface.__file__)]
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


def serve(parent: Connection) -> None:
    """The keeper's process: load the class, say whether that went well, and keep until the parent has gone."""
    mark_from_environment("environments")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a pipe for each episode
    path, given = parent.recv()
    sys.path[:] = path
    section: EnvironmentSection = pickle.loads(given)
    try:
        made = load_environment(section.target, section.options)
    except RecipeError as error:
        parent.send(str(error))
        return
    parent.send(None)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.freeze()  # a collection would write to the pages that the episodes share
    try:
        Keeper(parent, made, section.options, section.memory_mib << 20).run()
    finally:
        end_all(os.getpid())


if __name__ == "__main__":
    # Run as a module this file is `__main__`; answers must be of the class that the parent knows.
    from megarl.rollout import environment_keeper as keeper

    keeper.serve(Connection(int(sys.argv[1])))
