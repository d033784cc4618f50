"""Run users' code in child processes that can always be stopped: reward functions and environments.

Only a process can be stopped for sure: a user's function may loop in C, crash, exit, fork or take all memory, and a signal's
time limit needs the main thread. The server is a plain Python process (a `multiprocessing` one would import the trainer's
main module again). It forks one child per key, which takes milliseconds, and passes questions and answers on. It kills a
child with everything that the child has started: when the child ends, passes a limit, has no answer in time or is no longer
needed, and when the client is gone.

pebble is not used: its pools stop a worker at a deadline, but leave what the worker has started, and limit no memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import itertools
import os
import pickle
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from megarl.reward.sandbox_keeper import sizes
from megarl.telemetry.stacks import mark_from_environment

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
CHECK_INTERVAL_S = 0.05  # between two checks of the children's limits, and at most that long after the client has gone ...
CHECK_PAUSE = 10  # ... or this many times as long as the last check took: checks of many children take a tenth of a core ...
IDLE_CHECK_INTERVAL_S = 1.0  # ... or this while no child is checked
# With at most this many children all are checked, since what a child has left running may grow between two questions; with
# more only those that answer a question.
FEW_CHILDREN = 4
MAX_ZOMBIES = 256  # of a child: each keeps a process id, of which a machine may have 32 thousand for all children
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
LIBC = ctypes.CDLL(None, use_errno=True)
# What a policy's text can do to the process that judges or answers it. The text scores 0.
ZERO_CAUSES = ("wall_time", "memory", "processes", "crash", "error")

Answer = Callable[[Any], Any]  # runs in the child, once per question


@dataclass(frozen=True)
class ChildLimits:
    """Limits of a child together with all processes that it starts; memory that it has from the server does not count."""

    memory_bytes: int
    processes: int | None = None


@dataclass(frozen=True)
class ChildDeath:
    """Why a child has no answer. `cause` is one of ZERO_CAUSES, "fork" if the machine has no room for a child, or "" if the
    child was gone before the question or its server has died. `was_idle`: it died between two questions."""

    cause: str
    description: str
    was_idle: bool = False


# The client ------------------------------------------------------------------------------------------------------------


class ForkServerClient:
    """Starts a server and asks its children, many at a time. Starts another server when one has died.

    `load` runs once in the server, with `argument`, and returns the function that makes an `Answer` in each new child. The
    modules of both are looked for on `import_path`: a Ray actor has another `sys.path` than the trainer. `name` appears in
    messages and in the watchdog's stacks.

    Raises ValueError if `load` does, and RuntimeError if the server does not start.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[Any], Callable[[], Answer]],
        argument: Any,
        limits: ChildLimits,
        import_path: Sequence[str],
    ) -> None:
        self._name = name
        # As bytes: what `load` and `argument` need to unpickle may lie on the path that the server reads first.
        self._setup = (list(import_path), os.getpid(), pickle.dumps((name, load, argument, limits)))
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # by the question's number
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop that reads the server's answers
        self._sending = asyncio.Lock()
        self._start()

    @property
    def process(self) -> int:
        """Process id of the server."""
        return self._server.pid

    async def ask(self, key: Any, question: Any, timeout_s: float | None, starts: bool = False) -> Any:
        """Return the answer of a key's child, or a ChildDeath if there is none within `timeout_s` of sending the question,
        or however long it takes. With `starts` a new child is forked for the key first."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        self._waiting[number] = answer
        try:
            await self._send((number, key, question, starts))
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            await self.end([key])
            return ChildDeath("wall_time", f"had no answer within {timeout_s or 0:.3g} s")
        except OSError:
            return ChildDeath("", "is gone with its fork server")
        finally:
            del self._waiting[number]

    async def end(self, keys: Iterable[Any]) -> None:
        """Kill the children of some keys, whatever they do, with all that they have started."""
        with suppress(OSError):  # they have ended with their server
            for key in keys:
                await self._send((None, key, None, False))

    def close(self) -> None:
        """Stop the server and everything below it. A server that has to be killed leaves what its children have started."""
        self._stop_listening()
        self._connection.close()
        try:
            self._server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    async def _send(self, message: tuple[int | None, Any, Any, bool]) -> None:
        """Raises OSError if the server dies meanwhile."""
        async with self._sending:
            is_question = message[0] is not None
            if self._is_lost and is_question:
                self.close()
                self._start()
            if not self._is_lost and self._loop is None:
                self._loop = asyncio.get_running_loop()
                self._loop.add_reader(self._connection.fileno(), self._receive)
                # uvloop, which Ray's actors run on, has made it non-blocking: long messages would fail in the middle.
                os.set_blocking(self._connection.fileno(), True)
            try:
                # In a thread: answers are still read while the pipe is full, or both ends would wait for each other.
                await asyncio.to_thread(self._connection.send, message)
            except OSError:
                self._lose()
                raise

    def _receive(self) -> None:
        try:
            while self._connection.poll():
                number, reply = self._connection.recv()
                answer = self._waiting.get(number)
                if answer is not None and not answer.done():  # nobody waits for a late answer
                    answer.set_result(reply)
        except (EOFError, OSError):
            self._lose()

    def _lose(self) -> None:
        """The server has died, and its children with it. The pipe stays open until no thread sends to it."""
        self._stop_listening()
        self._is_lost = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(ChildDeath("", "is gone with its fork server"))

    def _stop_listening(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._connection.fileno())
        self._loop = None

    def _start(self) -> None:
        self._is_lost = True
        self._connection, server_end = Pipe()
        command = [sys.executable, "-m", "megarl.reward.fork_server", str(server_end.fileno())]
        self._server = subprocess.Popen(command, pass_fds=[server_end.fileno()], stdin=subprocess.DEVNULL)
        server_end.close()
        try:
            self._connection.send(self._setup)
            if not self._connection.poll(START_TIMEOUT_S):
                raise TimeoutError
            refusal = self._connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise RuntimeError(
                f"the fork server of the {self._name} did not start within {START_TIMEOUT_S:g} s (exit status "
                f"{self._server.returncode}); its own error is printed above"
            ) from error
        if refusal is not None:
            self.close()
            raise ValueError(refusal)
        self._is_lost = False


# The server ------------------------------------------------------------------------------------------------------------


@dataclass
class _Child:
    process: int
    pipe: Connection
    question: int | None = None  # number of the question that it answers now


class ForkServer:
    """The children by key, seen from the process that forks them. It runs nothing of the user's but the import."""

    def __init__(self, client: Connection, name: str, make_answer: Callable[[], Answer], limits: ChildLimits) -> None:
        self._client, self._name, self._make_answer, self._limits = client, name, make_answer, limits
        self._process = os.getpid()
        self._children: dict[Any, _Child] = {}
        self._deaths: dict[Any, ChildDeath] = {}  # of children that died between two questions; told to the next question
        self._module_processes = set(below(self._process, deep=False))  # started by the import, for all children
        self._next_check = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(client, selectors.EVENT_READ)

    def run(self, client_process: int) -> None:
        """Serve until the client has closed its pipe or died: a fork of the client may hold the pipe open."""
        try:
            while os.getppid() == client_process:
                checks = self._checked_keys()
                for ready, _ in self._selector.select(CHECK_INTERVAL_S if checks else IDLE_CHECK_INTERVAL_S):
                    if ready.fileobj is self._client:
                        self._take(*self._client.recv())
                    elif ready.data in self._children:  # otherwise it has just been ended
                        self._pass_answer_on(ready.data)
                if time.monotonic() >= self._next_check:
                    begun = time.monotonic()
                    self._check_children()
                    now = time.monotonic()
                    self._next_check = now + max(CHECK_INTERVAL_S, CHECK_PAUSE * (now - begun))
        except (EOFError, ConnectionError):
            return
        finally:
            for key in list(self._children):
                self._end(key)

    def _take(self, number: int | None, key: Any, question: Any, starts: bool) -> None:
        if starts or number is None:
            self._deaths.pop(key, None)
            if key in self._children:
                child = self._children[key]
                self._end(key)
                if child.question is not None:  # who asked may still wait
                    self._client.send((child.question, ChildDeath("", "was ended")))
        if number is None:
            return
        if starts:
            try:
                self._fork(key)
            except OSError as error:
                files, processes = (resource.getrlimit(name)[0] for name in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
                limits = f"ulimit -n is {files}, ulimit -u is {processes}"
                description = f"could not be forked beside {len(self._children)} others: {error}; {limits}"
                self._client.send((number, ChildDeath("fork", description)))
                return
        if key not in self._children:
            self._client.send((number, self._deaths.get(key, ChildDeath("", "is gone"))))
            return
        self._children[key].question = number
        with suppress(ConnectionError):  # a dead child shows when its pipe is read
            self._children[key].pipe.send(question)

    def _pass_answer_on(self, key: Any) -> None:
        child = self._children[key]
        try:
            answer = child.pipe.recv()
        except Exception:  # it has died, perhaps in the middle of an answer, or its answer cannot be unpickled
            self._report_death(key, child, "crash", f"died with {self._end(key)}")
            return
        number, child.question = child.question, None
        self._client.send((number, answer))

    def _checked_keys(self) -> list[Any]:
        if len(self._children) <= FEW_CHILDREN:
            return list(self._children)
        return [key for key, child in self._children.items() if child.question is not None]

    def _check_children(self) -> None:
        self._end_orphans()
        for key in self._checked_keys():
            child = self._children[key]
            # What a dead child has started may hold its pipe open, which then never ends.
            is_dead = os.waitid(os.P_PID, child.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            if is_dead and not child.pipe.poll():
                self._report_death(key, child, "crash", f"died with {self._end(key)}")
            elif limit := passed_limit(child.process, self._limits, self._process):
                self._end(key)
                self._report_death(key, child, limit, f"passed its limit of {limit}")

    def _report_death(self, key: Any, child: _Child, cause: str, description: str) -> None:
        death = ChildDeath(cause, f"{child.process} {description}", was_idle=child.question is None)
        if child.question is None:
            self._deaths[key] = death
        else:
            self._client.send((child.question, death))

    def _fork(self, key: Any) -> None:
        """Raises OSError if the machine gives no further process or pipe."""
        server_end, child_end = Pipe()
        try:
            process = os.fork()
        except OSError:
            server_end.close()
            child_end.close()
            raise
        if process == 0:
            pipes = [self._client, server_end, *(child.pipe for child in self._children.values())]
            self._run_child(child_end, [self._selector, *pipes])
        child_end.close()
        self._children[key] = _Child(process, server_end)
        self._selector.register(server_end, selectors.EVENT_READ, key)

    def _run_child(self, pipe: Connection, others: Sequence[Connection | selectors.BaseSelector]) -> NoReturn:
        """Answer questions until the pipe is closed. Never returns into the server's stack."""
        status = 1
        try:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == self._process:  # otherwise the server died before that was set
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what it starts stays below it, and can be killed
                os.setsid()
                os.register_at_fork(after_in_child=pipe.close)  # what it forks may write to whatever it holds
                mark_from_environment(self._name)
                for other in others:
                    other.close()
                question = pipe.recv()  # before the user's code, which may hang: the server would wait with a long question
                answer = self._make_answer()
                while True:
                    pipe.send(answer(question))
                    question = pipe.recv()
        except (EOFError, ConnectionError):
            status = 0
        except BaseException:  # SystemExit too
            traceback.print_exc()
        finally:
            with suppress(BaseException):  # a closed output must not keep the child
                sys.stdout.flush()
            os._exit(status)

    def _end(self, key: Any) -> str:
        """Kill a child and all that it has started; return how the child itself ended."""
        child = self._children.pop(key)
        self._selector.unregister(child.pipe)
        child.pipe.close()
        kill_tree(child.process)
        _, status = os.waitpid(child.process, 0)
        self._end_orphans()
        code = os.waitstatus_to_exitcode(status)
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def _end_orphans(self) -> None:
        """Kill what children have left: it is below the server once its parents have ended, and belongs to no child."""
        expected = self._module_processes | {child.process for child in self._children.values()}
        for orphan in set(below(self._process, deep=False)) - expected:
            kill_tree(orphan)
            with suppress(ChildProcessError):
                os.waitpid(orphan, 0)


def serve(client: Connection) -> None:
    """Load what the client names, report whether that worked, and serve until the client has gone."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a pipe per child
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through the `finally` below
    path, client_process, setup = client.recv()
    sys.path[:] = path
    try:
        name, load, argument, limits = pickle.loads(setup)
        try:
            make_answer = load(argument)
        except ValueError as error:
            client.send(str(error))
            return
        client.send(None)
        gc.freeze()  # a collection would write to the pages that the children share
        ForkServer(client, name, make_answer, limits).run(client_process)
    finally:
        kill_tree(os.getpid(), itself=False)


# Libraries that ask services, by name, since only the user's function needs to have them.
LIBRARIES = {"httpx", "requests", "urllib", "aiohttp", "openai", "anthropic"}
# Where their errors hold an HTTP status.
STATUS_FIELDS = ("status_code", "status", "code")
# Their errors for a service that was not reached, by library and class.
UNREACHED = {
    ("httpx", "TransportError"), ("requests", "ConnectionError"), ("requests", "Timeout"),
    ("aiohttp", "ClientConnectionError"), ("openai", "APIConnectionError"), ("anthropic", "APIConnectionError"),
}  # fmt: skip
NO_ROUTE = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)


def causes_of(
    error: BaseException | None, hides: Callable[[BaseException], bool] = lambda error: False
) -> Iterator[BaseException]:
    """Yield an error and those that caused it, but not what was handled when an error was raised that `hides` it."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ or hides(error) else error.__context__)


def is_outage(error: BaseException) -> bool:
    """Return whether an error, or one that caused it, says that a service was not reached or cannot judge now (status 429 or
    5xx). An error that a completion can cause is no outage: a missing file, an invalid URL, a program that closes its
    pipe."""
    return any(map(_is_of_transport, causes_of(error)))


def _is_of_transport(error: BaseException) -> bool:
    if LIBRARIES.intersection(library for library, _ in _classes(error)):
        statuses = (
            getattr(getattr(error, "response", None), "status_code", None),
            *(getattr(error, field, None) for field in STATUS_FIELDS),
        )
        if status := next((status for status in statuses if isinstance(status, int)), 0):
            return status == 429 or status >= 500
    return is_unreached(error)


def _classes(error: BaseException) -> set[tuple[str, str]]:
    """Return the classes of an error, each by its library and name."""
    return {(base.__module__.partition(".")[0], base.__name__) for base in type(error).__mro__}


def is_unreached(error: BaseException) -> bool:
    """Return whether an error says that a service was not reached; one that answered with a status was."""
    bases = _classes(error)
    if ("urllib", "URLError") in bases:
        reason = getattr(error, "reason", None)
        return isinstance(reason, OSError) and reason.filename is None
    if isinstance(error, OSError) and error.errno in NO_ROUTE or bases & UNREACHED:
        return True
    return isinstance(error, ConnectionError | TimeoutError | socket.gaierror) and not isinstance(error, BrokenPipeError)


# Process trees ---------------------------------------------------------------------------------------------------------


def below(process: int, deep: bool = True) -> list[int]:
    """Processes that a process has started and not waited for, and with `deep` all that those have started."""
    processes: list[int] = []
    waiting = [process]
    while waiting:
        parent = waiting.pop()
        with suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{parent}/task"):
                with suppress(OSError):
                    children = Path(f"/proc/{parent}/task/{thread}/children").read_text(encoding="utf-8")
                    (waiting if deep else processes).extend(map(int, children.split()))
        if parent != process:
            processes.append(parent)
    return processes


def passed_limit(child: int, limits: ChildLimits, server: int) -> str:
    """Return the limit that a child and its processes have passed, or "".

    Memory is anonymous and shared memory and swap, without pages of files and without pages that the child has from the
    `server` by fork and that nobody has written since. Processes that have ended do not count, as long as they are few: many
    programs wait for none of those that they start. Pages that processes share are counted once; that takes long and is
    done only if a plain sum is above the limit.
    """
    processes = [child, *below(child)]
    if limits.processes is not None and len(processes) > limits.processes + MAX_ZOMBIES:
        return "processes"
    statuses = _read_sizes(processes, "status")
    keys = ("RssAnon", "RssShmem", "VmSwap")
    if limits.processes is not None and sum(keys[0] in status for status in statuses) > limits.processes:
        return "processes"
    if sum(status.get(key, 0) for status in statuses for key in keys) <= limits.memory_bytes:
        return ""
    # A page that several processes map counts for each by its part, and each has the same part of a page of the server. The
    # server is read twice, as another child may begin or end meanwhile.
    before, rollups, after = (_read_sizes(group, "smaps_rollup") for group in ([server], processes, [server]))
    inherited = max(map(_shared, before + after), default=0)
    held = sum(rollup.get("Pss_Anon", 0) + rollup.get("Pss_Shmem", 0) + rollup.get("SwapPss", 0) for rollup in rollups)
    return "memory" if held - sum(min(_shared(rollup), inherited) for rollup in rollups) > limits.memory_bytes else ""


def _read_sizes(processes: Sequence[int], name: str) -> list[dict[str, int]]:
    """Sizes in a file of /proc of each process that still runs, in bytes."""
    of_each = []
    for process in processes:
        with suppress(OSError):
            of_each.append(sizes(f"/proc/{process}/{name}"))
    return of_each


def _shared(rollup: dict[str, int]) -> int:
    """A process's part of the pages, without those of files, that other processes map too."""
    return max(0, rollup.get("Pss_Anon", 0) + rollup.get("Pss_Shmem", 0) - rollup.get("Private_Dirty", 0))


def kill_tree(process: int, itself: bool = True) -> None:
    """Kill all processes below a process, which may go on to start others meanwhile, and the process `itself`. Waits for
    none of them: they are stopped first, each before its children are looked up, so that the tree no longer grows."""
    for sent in (signal.SIGSTOP, signal.SIGKILL):
        deadline, reached, new = time.monotonic() + STOP_TIMEOUT_S, set[int](), [process]
        while time.monotonic() < deadline and new:
            new, waiting = [], [process]
            while waiting:
                member = waiting.pop()
                if member not in reached and (itself or member != process):
                    new.append(member)
                    if sent == signal.SIGSTOP:
                        _send(member, sent)
                waiting += below(member, deep=False)
            for member in reversed(new if sent == signal.SIGKILL else []):  # children first: orphans would leave the tree
                _send(member, sent)
            reached.update(new)


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # a program below may run as another user
        os.kill(process, number)


if __name__ == "__main__":
    # Run as a module this file is `__main__`; answers must be of the classes that the client knows.
    from megarl.reward import fork_server

    fork_server.serve(Connection(int(sys.argv[1])))
