"""Whether the machines of other ranks can still be reached: asked of their kernels, not of the ranks, which may be busy.

A cut cable shows late and without a name: ranks wait for rank 0 as long as a rollout may take, and rank 0 for its engines.
So rank 0 holds a connection with each other rank. Nothing is said over it, but the kernels at its ends ask each other
whether they are there, and a thread at each end waits for their verdict.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

from megarl.megatron.parallel import broadcast_from_first
from megarl.platform.messages import address_towards
from megarl.telemetry.exit_status import FAILED

# Who connects says which rank it is, and a word that rank 0 has told the ranks: others may find the port too.
TOKEN_BYTES = 16
GREETING = struct.Struct(f"!I{TOKEN_BYTES}s")
GREETING_S = 10.0
# A kernel that has heard nothing asks once, and again until so many questions are without an answer; Linux counts to 127.
# Often enough that no firewall on the way forgets the connection.
FEWEST_QUESTIONS, MOST_QUESTIONS = 3, 127
QUESTION_S = 60
# In tcp_info of <linux/tcp.h>: milliseconds since the other kernel last answered.
LAST_ANSWER = struct.Struct("56xI")


class Peers:
    """Connections with other ranks, and the thread that watches them."""

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        timeout_s: float,
        phase: Callable[[], str | None],
        end: Callable[[int], None] = os._exit,
    ) -> None:
        """`connections` by rank, which are this object's from here on; `phase` is the one that this rank is in. A machine
        that is silent for half of `timeout_s`, 4 s at least, ends this process with FAILED: nothing else breaks off a wait
        in gloo, NCCL or Ray. So it comes before the end of a collective, which names nobody."""
        self._rank, self._phase, self._end, self._timeout_s = rank, phase, end, timeout_s
        half_s = timeout_s / 2
        often_s = min(QUESTION_S, max(1, int(half_s / (1 + FEWEST_QUESTIONS))))
        self._question_s = max(often_s, math.ceil(half_s / (1 + MOST_QUESTIONS)))
        self._num_questions = max(FEWEST_QUESTIONS, int(half_s / self._question_s) - 1)
        self._names = {peer: f"rank {peer} at {one.getpeername()[0]}" for peer, one in connections.items()}
        self._connections = dict(connections)
        for connection in connections.values():
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self._question_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self._question_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, self._num_questions)
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        """In the thread. A rank that ends is watched no more: whoever needs it learns of that at once."""
        poll = select.poll()
        poll.register(self._stopped, select.POLLIN)
        ranks = {connection.fileno(): rank for rank, connection in self._connections.items()}
        for number in ranks:
            poll.register(number, select.POLLIN)
        while True:
            for number, _ in poll.poll():
                if number == self._stopped.fileno():
                    return
                try:
                    self._connections[ranks[number]].recv(1)
                except BlockingIOError:
                    continue
                except ConnectionResetError:
                    pass
                except OSError as error:
                    return self._give_up(ranks[number], error)
                poll.unregister(number)
                self._connections.pop(ranks[number]).close()

    def _give_up(self, rank: int, error: OSError) -> None:
        phase = self._phase()
        where = "between two phases" if phase is None else f"in phase {phase}"
        print(
            f"error on rank {self._rank}, {where}: no way to the machine of {self._names[rank]} for "
            f"{self._question_s * (1 + self._num_questions)} s, half of trainer.collective_timeout_s = {self._timeout_s:g} "
            f"({error.strerror})",
            file=sys.stderr,
            flush=True,
        )
        self._end(FAILED)

    def silent(self) -> list[str]:
        """Machines that have left the last question without an answer so far, in words."""
        found = []
        for rank, connection in list(self._connections.items()):
            try:
                (silent_ms,) = LAST_ANSWER.unpack(
                    connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_ANSWER.size)
                )
            except OSError:  # closed a moment ago, as the rank has ended
                continue
            if silent_ms > 1000 * (self._question_s + 1):
                found.append(f"no answer from the machine of {self._names[rank]} for {silent_ms / 1000:.0f} s")
        return found

    def close(self) -> None:
        if self._thread.is_alive():
            self._stop.send(b"x")
        self._thread.join()
        for connection in (self._stop, self._stopped, *self._connections.values()):
            connection.close()


@contextmanager
def watch_peers(timeout_s: float, phase: Callable[[], str | None]) -> Iterator[None]:
    """Within this rank 0 watches all other ranks, and they watch it: see `Peers`. An error that leaves it gets a note with
    the machines that do not answer. Collective of all ranks. Raises OSError where they cannot connect within `timeout_s`."""
    peers = Peers(dist.get_rank(), _connect(timeout_s), timeout_s, phase)
    try:
        yield
    except Exception as error:  # whatever a lost machine makes of a collective: it gets the note, and goes on
        for note in peers.silent():
            error.add_note(note)
        raise
    finally:
        peers.close()


def _connect(timeout_s: float) -> dict[int, socket.socket]:
    """Rank 0's connections with all others; of the others, theirs with rank 0."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return {}
    if rank != 0:
        (host, port), token = broadcast_from_first((("", 0), b""))
        connection = socket.create_connection((host, port), timeout_s)
        connection.sendall(GREETING.pack(rank, token))
        return {0: connection}
    own, token = address_towards(os.environ["MASTER_ADDR"]), secrets.token_bytes(TOKEN_BYTES)
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.create_server((own, 0), family=family, backlog=size) as listener:
        broadcast_from_first((listener.getsockname()[:2], token))
        return _greeted(listener, set(range(1, size)), token, timeout_s)


def _greeted(listener: socket.socket, ranks: set[int], token: bytes, timeout_s: float) -> dict[int, socket.socket]:
    """A connection with each of `ranks`. Raises TimeoutError naming those that do not come."""
    found: dict[int, socket.socket] = {}
    end = time.monotonic() + timeout_s
    while len(found) < len(ranks):
        try:
            listener.settimeout(max(0.01, end - time.monotonic()))
            connection, _ = listener.accept()
        except TimeoutError:
            late = ", ".join(str(rank) for rank in sorted(ranks - found.keys()))
            raise TimeoutError(f"ranks {late} did not connect to rank 0 within {timeout_s:g} s") from None
        rank, word = _greeting(connection)
        if secrets.compare_digest(word, token) and rank in ranks:
            found[rank] = connection
        else:
            connection.close()
    return found


def _greeting(connection: socket.socket) -> tuple[int, bytes]:
    """Rank and word of who has connected."""
    connection.settimeout(GREETING_S)
    try:
        said = connection.recv(GREETING.size, socket.MSG_WAITALL)
    except OSError:  # silent, or gone
        said = b""
    rank, word = GREETING.unpack(said) if len(said) == GREETING.size else (0, b"")
    return rank, word
