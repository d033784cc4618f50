"""What the watchers of several nodes tell each other: node 0's judges over all ranks, and has all dump and end theirs.

Lines of JSON over TCP. A watcher that has lost node 0's judges over its own ranks: these are about to end, as node 0's have.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from dataclasses import asdict, replace
from typing import Any

from megarl.cluster.watchdog_judge import OtherProcess, Standing
from megarl.cluster.watchdog_settings import WatcherSettings

CONNECT_S = 60.0
WORD_S = 10.0
# How much longer than the dump itself its news may take.
NEWS_S = 5.0


class OtherWatchers:
    """The other nodes' watchers; none where a run has one node."""

    def __init__(self, settings: WatcherSettings) -> None:
        self._token, self._follows = settings.token, settings.master is not None
        # The watchers of other nodes, which have lost the one before it, judge over their own ranks.
        self._lost_others = settings.num_nodes > 1 and settings.listener is not None and settings.replaces
        self._tables: dict[int, tuple[float, list[Standing]]] = {}  # and when they came
        self._dumped: dict[int, tuple[list[Standing], list[OtherProcess]]] = {}
        self._followers: dict[int, socket.socket] = {}
        self._orders: list[dict[str, Any]] = []
        self._master: socket.socket | None = None
        self._news = threading.Condition()
        if settings.listener is not None:
            listener = socket.socket(fileno=settings.listener)
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        elif settings.master is not None:
            try:
                self._master = socket.create_connection(settings.master, CONNECT_S)
            except OSError:  # its ranks are about to learn it, too
                return
            self._master.settimeout(None)
            _send(self._master, {"token": settings.token, "node": settings.node})
            threading.Thread(target=self._obey, args=(self._master,), daemon=True).start()

    @property
    def judges(self) -> bool:
        """Whether this one decides."""
        return self._master is None

    @property
    def is_alone(self) -> bool:
        """Whether this one knows its own ranks alone: it is not node 0's and has lost that, or is in place of that."""
        return self._lost_others or (self._follows and self._master is None)

    def tell(self, table: list[Standing]) -> None:
        """Where this node's ranks stand, to node 0."""
        master = self._master  # the thread that obeys it may lose it meanwhile
        if master is not None and not _send(master, {"table": [asdict(one) for one in table]}):
            self._master = None

    def tables(self) -> list[Standing]:
        """Where the other nodes' ranks stand, as their watchers have said; those of a watcher that says nothing more, as it
        is stopped with its ranks, have been silent since."""
        with self._news:
            return self._aged(self._tables)

    def order(self, content: dict[str, Any]) -> None:
        """Have all other watchers do something."""
        for follower in list(self._followers.values()):
            _send(follower, content)

    def orders(self) -> list[dict[str, Any]]:
        """What node 0 has ordered, and not been asked for yet."""
        with self._news:
            orders, self._orders = self._orders, []
        return orders

    def wait_for_orders(self, timeout_s: float) -> list[dict[str, Any]]:
        """The same, as soon as there are any."""
        with self._news:
            self._news.wait_for(lambda: bool(self._orders) or self._master is None, timeout_s)
        return self.orders()

    def say_dumped(self, table: list[Standing], others: list[OtherProcess]) -> None:
        """What this node's processes have said, to node 0."""
        master = self._master
        if master is not None:
            _send(master, {"dumped": [asdict(one) for one in table], "others": [asdict(one) for one in others]})

    def dumped(self, timeout_s: float) -> tuple[list[Standing], list[OtherProcess]]:
        """What the processes of all other nodes have said; of nodes that are late, where their ranks stood."""
        end = time.monotonic() + timeout_s + NEWS_S
        with self._news:
            self._news.wait_for(lambda: self._dumped.keys() >= self._followers.keys(), max(0.0, end - time.monotonic()))
            late = self._aged({node: known for node, known in self._tables.items() if node not in self._dumped})
            table = [one for known, _ in self._dumped.values() for one in known]
            return table + late, [one for _, known in self._dumped.values() for one in known]

    def _aged(self, tables: dict[int, tuple[float, list[Standing]]]) -> list[Standing]:
        now = time.monotonic()
        return [replace(one, silent_s=one.silent_s + now - came) for came, table in tables.values() for one in table]

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def _listen(self, connection: socket.socket) -> None:
        """On node 0, to one other watcher."""
        connection.settimeout(WORD_S)
        lines = connection.makefile("r", encoding="utf-8")
        node: int | None = None
        try:
            for line in lines:
                content = json.loads(line)
                with self._news:
                    if node is None:
                        if not secrets.compare_digest(str(content.get("token")), self._token):
                            return connection.close()
                        node = int(content["node"])
                        connection.settimeout(None)
                        self._followers[node] = connection
                    elif "table" in content:
                        self._tables[node] = time.monotonic(), [Standing(**one) for one in content["table"]]
                    elif "dumped" in content:
                        others = [OtherProcess(**one) for one in content["others"]]
                        self._dumped[node] = [Standing(**one) for one in content["dumped"]], others
                        self._news.notify_all()
        except (OSError, ValueError):  # it has ended, or is no watcher of this run
            connection.close()
        if node is not None:
            with self._news:  # its ranks have ended, and it with them: they hang no more
                self._followers.pop(node, None)
                self._tables.pop(node, None)

    def _obey(self, connection: socket.socket) -> None:
        """On another node, to node 0's."""
        try:
            for line in connection.makefile("r", encoding="utf-8"):
                with self._news:
                    self._orders.append(json.loads(line))
                    self._news.notify_all()
        except (OSError, ValueError):
            pass
        with self._news:
            self._master = None
            self._news.notify_all()


def _send(connection: socket.socket, content: dict[str, Any]) -> bool:
    try:
        connection.sendall(json.dumps(content).encode() + b"\n")
    except OSError:
        return False
    return True
