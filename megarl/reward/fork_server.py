"""Run users' code in child processes that can always be stopped: reward functions and environments.

Only a process can be stopped for sure: a user's function may loop in C, crash, exit, fork or take all memory, and a signal's
time limit needs the main thread. The server is a plain Python process (a `multiprocessing` one would import the trainer's
main module again). It forks one child per key, which takes milliseconds. Questions and answers go over a socket between the
client and the child. The server holds the child's end as well: there it sees that the client has closed the socket, and
there it writes why a child has died. It kills a child with everything that the child has started: when the child ends,
passes a limit, has no answer in time or is no longer needed, and when the client is gone.

pebble is not used: its pools stop a worker at a deadline, but leave what the worker has started, and limit no memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import os
import pickle
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, NoReturn

from megarl.reward.sandbox_keeper import sizes
from megarl.telemetry.stacks import mark_from_environment

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
CHECK_INTERVAL_S = 0.05  # between two checks of the children, and at most that long after the client has gone ...
# ... or this many times the processor time of the last check: checks of many children take a tenth of a core.
CHECK_PAUSE = 10
RESERVED_DESCRIPTORS = 16  # of the server: without a free descriptor it could not look at its children in /proc
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
    """Why a child has no answer. `cause` is one of ZERO_CAUSES, or "" if the child could not be forked, was gone before the
    question or was lost with its server. `was_idle`: it died before it read the question."""

    cause: str
    description: str
    was_idle: bool = False


def _framed(message: Any) -> bytes:
    """Return a message as `Connection.send` writes it and `Connection.recv` reads it."""
    data = pickle.dumps(message)
    return struct.pack("!i", len(data)) + data


def _no_room(error: OSError) -> ChildDeath:
    return ChildDeath("", f"could not be forked: {error}; raise ulimit -n and ulimit -u, or use more workers")


# The client ------------------------------------------------------------------------------------------------------------


class _Channel:
    """The client's end of the socket to a child, which answers one question at a time."""

    def __init__(self) -> None:
        self._socket, self.far_end = socket.socketpair()
        self._socket.setblocking(False)
        self._is_asked = self.is_ended = self.has_begun_answer = False

    async def ask(self, frame: bytes) -> Any:
        """Return the answer to a framed question, or the server's ChildDeath. Raises EOFError or OSError without either;
        `has_begun_answer` then says whether a part of the answer has arrived."""
        self._is_asked, self.has_begun_answer, was_sent = True, False, False
        try:
            with suppress(ConnectionError):  # the child has died, and the reason is to be read
                await asyncio.get_running_loop().sock_sendall(self._socket, frame)
                was_sent = True
            (size,) = struct.unpack("!i", await self._read(4))
            reply = pickle.loads(await self._read(size))
            if isinstance(reply, ChildDeath):
                return replace(reply, was_idle=not was_sent or await self._was_closed_unread())
            return reply
        finally:
            self._is_asked = False
            if self.is_ended:
                self._socket.close()

    def end(self) -> None:
        """Close the socket, on which the server kills the child. Who waits for an answer reads the end of the stream."""
        self.is_ended = True
        with suppress(OSError):  # the other end is closed
            self._socket.shutdown(socket.SHUT_RDWR)
        if not self._is_asked:
            self._socket.close()

    async def _was_closed_unread(self) -> bool:
        """Whether the far end was closed before the question was read. Linux then resets the connection."""
        try:
            await asyncio.get_running_loop().sock_recv(self._socket, 1)
        except ConnectionResetError:
            return True
        return False

    async def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = await asyncio.get_running_loop().sock_recv(self._socket, min(size - len(data), 1 << 18))
            if not piece:
                raise EOFError
            self.has_begun_answer = True
            data += piece
        return bytes(data)


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
        self._channels: dict[Any, _Channel] = {}
        self._start()

    @property
    def process(self) -> int:
        """Process id of the server."""
        return self._server.pid

    async def ask(self, key: Any, question: Any, timeout_s: float | None, starts: bool = False) -> Any:
        """Return the answer of a key's child, or a ChildDeath if there is none within `timeout_s`, or however long it takes.
        With `starts` a new child is forked for the key first. A child without an answer is ended."""
        frame = _framed(question)
        if starts:
            self.end(key)
            try:
                self._channels[key] = self._fork()
            except OSError as error:
                return _no_room(error)
        channel = self._channels.get(key)
        if channel is None:
            return ChildDeath("", "is gone")
        reply: Any = ChildDeath("", "is gone with its fork server")
        try:
            async with asyncio.timeout(timeout_s):
                reply = await channel.ask(frame)
        except TimeoutError:
            reply = ChildDeath("wall_time", f"had no answer within {timeout_s or 0:.3g} s")
        except (EOFError, OSError):
            if channel.is_ended:
                reply = ChildDeath("", "was ended")
            elif channel.has_begun_answer and self._server.poll() is None:
                # The server's ChildDeath cannot be told from the rest of the answer, or found no room behind it.
                reply = ChildDeath("crash", "died in the middle of an answer")
        except Exception as error:  # of the answer's own classes
            reply = ChildDeath("crash", f"gave an answer that cannot be read: {type(error).__name__}: {error}")
        finally:
            if isinstance(reply, ChildDeath) and self._channels.get(key) is channel:
                self.end(key)
        return reply

    def end(self, key: Any) -> None:
        """Let the server kill the child of a key, whatever it does, with all that it has started."""
        if key in self._channels:
            self._channels.pop(key).end()

    def close(self) -> None:
        """Stop the server and everything below it. A server that has to be killed leaves what its children have started."""
        for key in list(self._channels):
            self.end(key)
        self._connection.close()
        try:
            self._server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _fork(self) -> _Channel:
        """Raises OSError if this process may open no further file."""
        channel = _Channel()
        with channel.far_end:
            try:
                send_handle(self._connection, channel.far_end.fileno(), self._server.pid)
            except ConnectionError:  # the server has died
                self.close()
                self._start()
                send_handle(self._connection, channel.far_end.fileno(), self._server.pid)
        return channel

    def _start(self) -> None:
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


# The server ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Child:
    process: int
    pipe: socket.socket  # the child's end of the socket to the client


class ForkServer:
    """The children, seen from the process that forks them. It runs nothing of the user's but the import."""

    def __init__(self, client: Connection, name: str, make_answer: Callable[[], Answer], limits: ChildLimits) -> None:
        self._name, self._make_answer, self._limits = name, make_answer, limits
        self._client = socket.fromfd(client.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
        client.close()  # programs could inherit it, unlike the copy
        self._process = os.getpid()
        self._children: dict[int, _Child] = {}  # by the descriptor of their pipes
        self._module_processes = set(_children_of(self._process))  # started by the import, for all children
        self._poll = select.epoll()  # poll(2) fails where more descriptors are open than `ulimit -n` allows
        self._poll.register(self._client, select.EPOLLIN)

    def run(self, client_process: int) -> None:
        """Serve until the client has closed its pipe or died: a fork of the client may hold the pipe open."""
        next_check = 0.0
        while os.getppid() == client_process:
            for descriptor, _ in self._poll.poll(CHECK_INTERVAL_S):
                if descriptor in self._children:  # the client has closed its end
                    self._end(descriptor, "crash")
                else:
                    try:
                        request, received, *_ = socket.recv_fds(self._client, 1, 1)
                    except ConnectionError:
                        return
                    if not request:
                        return
                    for pipe in received:  # empty if no descriptor is free: the kernel has closed the child's end
                        self._fork(socket.socket(fileno=pipe))
            if time.monotonic() >= next_check:
                begun_s = time.thread_time()  # on a busy machine a check waits long for a core
                self._check_children()
                next_check = time.monotonic() + max(CHECK_INTERVAL_S, CHECK_PAUSE * (time.thread_time() - begun_s))

    def _check_children(self) -> None:
        self._end_orphans()
        for descriptor, child in list(self._children.items()):
            if os.waitid(os.P_PID, child.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._end(descriptor, "crash")
            elif limit := passed_limit(child.process, self._limits, self._process):
                self._end(descriptor, limit)

    def _fork(self, pipe: socket.socket) -> None:
        # A program that the child starts must not answer for it, nor keep the socket open when child and server are gone.
        pipe.set_inheritable(False)
        try:
            if pipe.fileno() >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_DESCRIPTORS:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            process = os.fork()
        except OSError as error:
            _tell(pipe, _no_room(error))
            return
        if process == 0:
            self._run_child(pipe)
        self._children[pipe.fileno()] = _Child(process, pipe)
        self._poll.register(pipe, 0)  # for nothing but its end

    def _run_child(self, pipe: socket.socket) -> NoReturn:
        """Answer questions until the pipe is closed. Never returns into the server's stack."""
        status = 1
        try:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == self._process:  # otherwise the server died before that was set
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what it starts stays below it, and can be killed
                os.setsid()
                client = Connection(pipe.detach())
                os.register_at_fork(after_in_child=client.close)  # what it forks may write to whatever it holds
                mark_from_environment(self._name)
                self._client.close()
                self._poll.close()
                for child in self._children.values():
                    child.pipe.close()
                answer = self._make_answer()
                while True:
                    client.send(answer(client.recv()))
        except (EOFError, ConnectionError):
            status = 0
        except BaseException:  # SystemExit too
            traceback.print_exc()
        finally:
            with suppress(BaseException):  # a closed output must not keep the child
                sys.stdout.flush()
            os._exit(status)

    def _end(self, descriptor: int, cause: str) -> None:
        """Kill a child and all that it has started, and tell the client why unless it has closed the socket."""
        child = self._children.pop(descriptor)
        self._poll.unregister(descriptor)
        kill_tree(child.process)
        code = os.waitstatus_to_exitcode(os.waitpid(child.process, 0)[1])
        self._end_orphans()
        how = f"passed its limit of {cause}"
        if cause == "crash":
            how = f"died with signal {-code}" if code < 0 else f"died with exit status {code}"
        _tell(child.pipe, ChildDeath(cause, f"{child.process} {how}"))

    def _end_orphans(self) -> None:
        """Kill what children have left: it is below the server once its parents have ended, and belongs to no child."""
        expected = self._module_processes | {child.process for child in self._children.values()}
        for orphan in set(_children_of(self._process)) - expected:
            kill_tree(orphan)
            with suppress(ChildProcessError):
                os.waitpid(orphan, 0)


def _tell(pipe: socket.socket, death: ChildDeath) -> None:
    """Write why there is no answer as the last message of a child's pipe, which the child may have left full."""
    with pipe, suppress(OSError):
        pipe.send(_framed(death), socket.MSG_DONTWAIT)


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
        with suppress(ChildProcessError):
            while True:
                os.wait()


# Process trees ---------------------------------------------------------------------------------------------------------


def _children_of(process: int) -> list[int]:
    """Return the processes that a process has started and not waited for."""
    children: list[int] = []
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{process}/task"):
            with suppress(OSError):
                text = Path(f"/proc/{process}/task/{thread}/children").read_text(encoding="utf-8")
                children += map(int, text.split())
    return children


def below(process: int, stops: bool = False) -> list[int]:
    """Return the children of a process and all that those have started, parents first. With `stops` each is stopped before
    its own children are looked up, so that it starts no further."""
    processes, waiting = list[int](), _children_of(process)
    while waiting:
        member = waiting.pop()
        if stops:
            _send(member, signal.SIGSTOP)
        processes.append(member)
        waiting += _children_of(member)
    return processes


def passed_limit(child: int, limits: ChildLimits, server: int) -> str:
    """Return the limit that a child and its processes have passed, or "".

    Memory is anonymous and shared memory and swap, without pages of files and without pages that the child has from the
    `server` by fork and that nobody has written since. Processes that have ended do not count, as long as they are few: many
    programs wait for none of those that they start. Pages that processes share are counted once; that takes long and is
    done only if a plain sum is above the limit.
    """
    processes = [child, *below(child)]
    statuses = [sizes(f"/proc/{process}/status") for process in processes]
    if limits.processes is not None:
        num_running = sum("RssAnon" in status for status in statuses)
        if num_running > limits.processes or len(processes) > limits.processes + MAX_ZOMBIES:
            return "processes"
    if sum(status.get(key, 0) for status in statuses for key in ("RssAnon", "RssShmem", "VmSwap")) <= limits.memory_bytes:
        return ""
    # A page that several processes map counts for each by its part, and each has the same part of a page of the server.
    # The parts change while they are read, since children start and end; so the server's larger part counts.
    inherited = _shared(sizes(f"/proc/{server}/smaps_rollup"))
    rollups = [sizes(f"/proc/{process}/smaps_rollup") for process in processes]
    inherited = max(inherited, _shared(sizes(f"/proc/{server}/smaps_rollup")))
    held = sum(rollup.get(key, 0) for rollup in rollups for key in ("Pss_Anon", "Pss_Shmem", "SwapPss"))
    return "memory" if held - sum(min(_shared(rollup), inherited) for rollup in rollups) > limits.memory_bytes else ""


def _shared(rollup: dict[str, int]) -> int:
    """A process's part of the pages, without those of files, that other processes map too."""
    return max(0, rollup.get("Pss_Anon", 0) + rollup.get("Pss_Shmem", 0) - rollup.get("Private_Dirty", 0))


def kill_tree(process: int, itself: bool = True) -> None:
    """Kill all processes below a process, which may go on to start others meanwhile, and the process `itself`. Waits for
    none of them: all are stopped first, until the tree no longer grows."""
    if itself:
        _send(process, signal.SIGSTOP)
    deadline, before = time.monotonic() + STOP_TIMEOUT_S, list[int]()
    while (members := below(process, stops=True)) != before and time.monotonic() < deadline:
        before = members
    for member in [*reversed(members), *([process] if itself else [])]:  # children first: orphans would leave the tree
        _send(member, signal.SIGKILL)


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # a program below may run as another user
        os.kill(process, number)


if __name__ == "__main__":
    # Run as a module this file is `__main__`; answers must be of the classes that the client knows.
    from megarl.reward import fork_server

    fork_server.serve(Connection(int(sys.argv[1])))
