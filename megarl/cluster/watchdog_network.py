"""The watchers of several nodes, and whether their machines can still be reached.

Each watcher is connected with node 0's, which judges over all ranks and has the others dump stacks and end their ranks.
A watcher that has lost node 0's judges over its own ranks.

A cut cable shows late and names nobody: ranks wait for rank 0 as long as a rollout may take, and rank 0 for its engines. So
the kernels at both ends of these connections ask each other whether they are there (TCP keepalive).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass, field, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from megarl.cluster.watchdog_judge import Deadlines, OtherProcess, Standing

CONNECT_S = 60.0
# How much longer than a node's dump itself its message may take.
NEWS_S = 5.0
# A kernel asks this often within half of a collective's deadline, but not less often than every minute, so that no firewall
# on the way forgets the connection.
QUESTIONS, LONGEST_QUESTION_S = 4, 60
# In tcp_info of <linux/tcp.h>: milliseconds since the last data and the last acknowledgement came.
LAST_HEARD = struct.Struct("52xII")


@dataclass(frozen=True)
class WatchedRank:
    """A rank of this node: its process, and the numbers of two files there: its page, and the end of a pipe to it."""

    rank: int
    pid: int
    page: int
    pipe: int


@dataclass(frozen=True)
class WatcherSettings:
    """What a watcher gets when it starts. `num_nodes` counts the nodes that have ranks."""

    run: str
    node: int
    num_nodes: int
    ranks: tuple[WatchedRank, ...]
    deadlines: Deadlines
    token: str
    """Marks the run's processes, and opens connections between its watchers."""
    master: tuple[str, int] | None = None
    """Where node 0's watcher listens, for the others."""
    listener: int | None = None
    """File of the socket on which node 0's watcher listens, where there are others."""


@dataclass(eq=False)
class _Watcher:
    """The watcher of another node, with the last message of each kind."""

    name: str
    has_ranks: bool
    socket: socket.socket
    connection: Connection[Any, Any]
    messages: dict[str, Any] = field(default_factory=dict)
    heard_at: float = 0.0

    def table(self) -> list[Standing]:
        """Return where its ranks stand; they are silent since its last message, as it may be stopped with them."""
        silent_s = time.monotonic() - self.heard_at
        table: list[Standing] = self.messages.get("table", [])
        return [replace(standing, silent_s=standing.silent_s + silent_s) for standing in table]


class OtherWatchers:
    """Connections of this watcher with others; none where a run has one node.

    Other nodes send node 0 their `table` of standings, and after an order to `dump` their `stacks`: a table with calls, and
    other processes. Node 0 sends the orders `dump` and `end`, the latter with a verdict.
    """

    def __init__(self, settings: WatcherSettings) -> None:
        self._settings = settings
        self._half_s = settings.deadlines.collective_s / 2
        self._question_s = min(LONGEST_QUESTION_S, max(1, int(self._half_s / QUESTIONS)))
        self._watchers: dict[int, _Watcher] = {}
        self._seen: set[int] = set()  # nodes with ranks whose watcher has ever been connected
        self.lost: str | None = None
        """What happened, once a machine with ranks is given up."""
        if settings.listener is not None:
            listener = socket.socket(fileno=settings.listener)
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        self._joining = threading.Thread(target=self._join, daemon=True)
        self._joining.start()

    @property
    def judges(self) -> bool:
        """Whether this watcher decides: it is node 0's, or is not connected with that."""
        return self._settings.master is None or not self._watchers

    @property
    def some_unknown(self) -> bool:
        """Whether there are ranks of which this watcher has not heard."""
        if self._settings.master is not None:
            return not self._watchers
        return len(self._seen) < self._settings.num_nodes - 1

    @property
    def is_alone(self) -> bool:
        """Whether this watcher is not connected with node 0's, and will not be."""
        return not self._joining.is_alive() and not self._watchers

    def send(self, kind: str, content: Any = None) -> None:
        """Send a message to all connected watchers."""
        for node, watcher in list(self._watchers.items()):
            try:
                watcher.connection.send((kind, content))
            except ConnectionError:
                continue  # `receive` takes what came before this
            except OSError as error:
                self._drop(node, watcher, error)

    def receive(self) -> None:
        """Take the messages that have come."""
        for node, watcher in list(self._watchers.items()):
            try:
                while watcher.connection.poll():
                    kind, watcher.messages[kind] = watcher.connection.recv()
                    watcher.heard_at = time.monotonic()
            except (EOFError, OSError) as error:
                self._drop(node, watcher, error)

    def _drop(self, node: int, watcher: _Watcher, error: EOFError | OSError) -> None:
        """Forget a watcher that has ended, or whose machine is lost."""
        if isinstance(error, OSError) and not isinstance(error, ConnectionError):
            if watcher.has_ranks:
                self.lost = (
                    f"no way to the machine of {watcher.name} for {self._half_s:g} s, half of "
                    f"trainer.collective_timeout_s = {2 * self._half_s:g} ({error.strerror})"
                )
        elif self._settings.master is not None:  # node 0's ranks have ended, or another watcher takes the place of this one
            self._joining = threading.Thread(target=self._join, daemon=True)
            self._joining.start()
        watcher.connection.close()
        watcher.socket.close()
        if self._watchers.get(node) is watcher:  # else the one that takes its place is here already
            del self._watchers[node]

    def silent(self) -> list[str]:
        """Return the machines that have left the last question of the kernel unanswered so far."""
        names = []
        for watcher in list(self._watchers.values()):
            info = watcher.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_HEARD.size)
            if min(LAST_HEARD.unpack(info)) > 1000 * (self._question_s + 1):
                names.append(watcher.name)
        return names

    def tables(self) -> list[Standing]:
        """Return where the ranks of other nodes stand."""
        return [standing for watcher in self._watchers.values() for standing in watcher.table()]

    def wait_for(self, kind: str, timeout_s: float) -> list[Any]:
        """Return the messages of a kind, when all connected watchers have sent one or `timeout_s` have passed."""
        end = time.monotonic() + timeout_s
        self.receive()
        while time.monotonic() < end and any(kind not in watcher.messages for watcher in self._watchers.values()):
            time.sleep(0.05)
            self.receive()
        return [watcher.messages[kind] for watcher in self._watchers.values() if kind in watcher.messages]

    def stacks(self, timeout_s: float) -> tuple[list[Standing], list[OtherProcess]]:
        """Return what the processes of all other nodes say; of nodes that are late, where their ranks stood."""
        table: list[Standing] = []
        processes: list[OtherProcess] = []
        for node_table, node_processes in self.wait_for("stacks", timeout_s + NEWS_S):
            table += node_table
            processes += node_processes
        known = {standing.rank for standing in table}
        return table + [standing for standing in self.tables() if standing.rank not in known], processes

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            # A thread for each: a stranger may say nothing.
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _join(self) -> None:
        if self._settings.master is not None:
            with contextlib.suppress(OSError):  # the ranks are about to learn it, too
                self._greet(socket.create_connection(self._settings.master, CONNECT_S))

    def _greet(self, connected: socket.socket) -> None:
        """Show each other that both know the token, and say who they are."""
        settings, key = self._settings, self._settings.token.encode()
        connected.setblocking(True)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self._question_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self._question_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self._half_s))
        connection: Connection[Any, Any] = Connection(os.dup(connected.fileno()))
        name_here = f"rank {settings.ranks[0].rank}" if settings.ranks else f"node {settings.node}"
        try:
            address = connected.getpeername()[0]
            if settings.master is None:
                deliver_challenge(connection, key)
            else:
                answer_challenge(connection, key)
            connection.send((settings.node, name_here, bool(settings.ranks)))
            node, name, has_ranks = connection.recv()
        except (OSError, EOFError, AuthenticationError):  # it has ended, or is no watcher of this run
            connection.close()
            return connected.close()
        if has_ranks:
            self._seen.add(node)
        self._watchers[node] = _Watcher(f"{name} at {address}", has_ranks, connected, connection, heard_at=time.monotonic())
