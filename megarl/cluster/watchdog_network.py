"""Connect the watchers of several nodes, and notice machines that can no longer be reached.

Each watcher connects to node 0's watcher, which judges all ranks and tells the other watchers to dump stacks and to end
their ranks. A watcher without this connection judges its own ranks.

Without TCP keepalive, a cut cable would show late and name no machine: ranks wait for rank 0 as long as a rollout may take.
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
# How much longer than a node's dump the message with the dump may take.
NEWS_S = 5.0
# The kernel sends this many keepalive probes within half of a collective's deadline, and at least one a minute, so that no
# firewall forgets the connection.
PROBES, MAX_PROBE_S = 4, 60
# In tcp_info of <linux/tcp.h>: milliseconds since the last data and since the last acknowledgement.
LAST_HEARD = struct.Struct("52xII")


@dataclass(frozen=True)
class WatchedRank:
    """A rank of this node: the process id, and the file numbers of the rank's page and pipe in that process."""

    rank: int
    pid: int
    page: int
    pipe: int


@dataclass(frozen=True)
class WatcherSettings:
    """Settings of a watcher. `num_nodes` counts the nodes that have ranks."""

    run: str
    node: int
    num_nodes: int
    ranks: tuple[WatchedRank, ...]
    deadlines: Deadlines
    token: str
    """Marks the run's processes and authenticates its watchers."""
    master: tuple[str, int] | None = None
    """Address of node 0's watcher, for the others."""
    listener: int | None = None
    """File number of the socket on which node 0's watcher listens for others."""


@dataclass(eq=False)
class _Watcher:
    """The watcher of another node and its last message of each kind."""

    name: str
    has_ranks: bool
    socket: socket.socket
    connection: Connection[Any, Any]
    messages: dict[str, Any] = field(default_factory=dict)
    heard_at: float = 0.0


class OtherWatchers:
    """This watcher's connections to the watchers of other nodes; none in a run on one node.

    Other nodes send node 0 a `table` of standings, and after `dump` they send `stacks`: a table with calls, and other
    processes. Node 0 sends `dump`, and `end` with a verdict.
    """

    def __init__(self, settings: WatcherSettings) -> None:
        self._settings = settings
        self._half_s = settings.deadlines.collective_s / 2
        self._probe_s = min(MAX_PROBE_S, max(1, int(self._half_s / PROBES)))
        self._watchers: dict[int, _Watcher] = {}
        self._seen: set[int] = set()  # nodes with ranks whose watcher has ever connected
        self.lost: str | None = None
        """The reason, once a machine with ranks is given up."""
        if settings.listener is not None:
            listener = socket.socket(fileno=settings.listener)

            def accept() -> None:
                while True:  # a thread for each connection, because a stranger may never answer
                    threading.Thread(target=self._greet, args=listener.accept()[:1], daemon=True).start()

            threading.Thread(target=accept, daemon=True).start()
        self._joining = threading.Thread(target=self._join, daemon=True)
        self._joining.start()

    @property
    def judges(self) -> bool:
        """Whether this watcher decides: it is node 0's watcher, or has no connection to node 0's watcher."""
        return self._settings.master is None or not self._watchers

    @property
    def some_unknown(self) -> bool:
        """Whether some nodes with ranks have never connected."""
        if self._settings.master is not None:
            return not self._watchers
        return len(self._seen) < self._settings.num_nodes - 1

    @property
    def is_alone(self) -> bool:
        """Whether this watcher has no connection to node 0's watcher, and will get none."""
        return not self._joining.is_alive() and not self._watchers

    def send(self, kind: str, content: Any = None) -> None:
        """Send a message to all connected watchers."""
        for node, watcher in list(self._watchers.items()):
            try:
                watcher.connection.send((kind, content))
            except ConnectionError:
                continue  # `receive` reads the last messages and drops the watcher
            except OSError as error:
                self._drop(node, watcher, error)

    def receive(self) -> None:
        """Read all pending messages."""
        for node, watcher in list(self._watchers.items()):
            try:
                while watcher.connection.poll():
                    kind, watcher.messages[kind] = watcher.connection.recv()
                    watcher.heard_at = time.monotonic()
            except (EOFError, OSError) as error:
                self._drop(node, watcher, error)

    def _drop(self, node: int, watcher: _Watcher, error: EOFError | OSError) -> None:
        """Remove a watcher that has ended or whose machine is lost."""
        if isinstance(error, OSError) and not isinstance(error, ConnectionError) and watcher.has_ranks:
            self.lost = (
                f"no way to the machine of {watcher.name} for {self._half_s:g} s, half of "
                f"trainer.collective_timeout_s = {2 * self._half_s:g} ({error.strerror})"
            )
        watcher.connection.close()
        watcher.socket.close()
        del self._watchers[node]

    def silent(self) -> list[str]:
        """Return the machines that have not answered the last keepalive probe."""
        names = []
        for watcher in list(self._watchers.values()):
            info = watcher.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_HEARD.size)
            if min(LAST_HEARD.unpack(info)) > 1000 * (self._probe_s + 1):
                names.append(watcher.name)
        return names

    def tables(self) -> list[Standing]:
        """Return the standings of other nodes' ranks. Silence includes the time since the watcher's last message, because
        the watcher may be stopped together with the ranks."""
        return [
            replace(standing, silent_s=standing.silent_s + time.monotonic() - watcher.heard_at)
            for watcher in self._watchers.values() for standing in watcher.messages.get("table", [])
        ]  # fmt: skip

    def wait_for(self, kind: str, timeout_s: float) -> list[Any]:
        """Return the messages of a kind once all connected watchers have sent one, or after `timeout_s`."""
        end = time.monotonic() + timeout_s
        self.receive()
        while time.monotonic() < end and any(kind not in watcher.messages for watcher in self._watchers.values()):
            time.sleep(0.05)
            self.receive()
        return [watcher.messages[kind] for watcher in self._watchers.values() if kind in watcher.messages]

    def stacks(self, timeout_s: float) -> tuple[list[Standing], list[OtherProcess]]:
        """Return the stacks of all other nodes; for late nodes, the last standings of the ranks."""
        table: list[Standing] = []
        processes: list[OtherProcess] = []
        for node_table, node_processes in self.wait_for("stacks", timeout_s + NEWS_S):
            table += node_table
            processes += node_processes
        known = {standing.rank for standing in table}
        return table + [standing for standing in self.tables() if standing.rank not in known], processes

    def _join(self) -> None:
        if self._settings.master is not None:
            with contextlib.suppress(OSError):  # the ranks will notice the failure too
                self._greet(socket.create_connection(self._settings.master, CONNECT_S))

    def _greet(self, connected: socket.socket) -> None:
        """Authenticate both ends by the token, and exchange names."""
        settings, key = self._settings, self._settings.token.encode()
        connected.setblocking(True)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self._probe_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self._probe_s)
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
        except (OSError, EOFError, AuthenticationError):  # the other end has ended, or is no watcher of this run
            connection.close()
            return connected.close()
        if has_ranks:
            self._seen.add(node)
        self._watchers[node] = _Watcher(f"{name} at {address}", has_ranks, connected, connection, heard_at=time.monotonic())
