"""Machines that cannot be reached any more, and ranks that only end."""

from __future__ import annotations

import queue
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megarl.cluster.peers import GREETING, TOKEN_BYTES, Peers, _connect, _greeted, watch_peers
from megarl.megatron.parallel import start_control
from megarl.platform import current as platform
from megarl.telemetry.exit_status import FAILED
from tests.networks import Network, two_networks
from tests.ranks import run_ranks

TIMEOUT_S = 8.0  # questions each second
WAIT_S = 60.0


def in_network(network: Network, made: queue.Queue[socket.socket], address: tuple[str, int] | None) -> None:
    """In a thread of its own: a listener at a free port, or a connection to an address."""
    network.enter()
    made.put(socket.create_server((network.address, 0)) if address is None else socket.create_connection(address))


def socket_in(network: Network, address: tuple[str, int] | None = None) -> socket.socket:
    made: queue.Queue[socket.socket] = queue.Queue()
    thread = threading.Thread(target=in_network, args=(network, made, address))
    thread.start()
    thread.join()
    return made.get_nowait()


@contextmanager
def two_ranks() -> Iterator[tuple[Network, list[Peers], queue.Queue[int]]]:
    """Ranks 0 and 1 in two networks, and the exit statuses with which they end."""
    ended: queue.Queue[int] = queue.Queue()
    with two_networks() as (near, far):
        with socket_in(near) as listener:
            other = socket_in(far, listener.getsockname())
            own, _ = listener.accept()
        ends = [(0, {1: own}, lambda: "rollout"), (1, {0: other}, lambda: None)]
        peers = [Peers(rank, connections, TIMEOUT_S, phase, ended.put) for rank, connections, phase in ends]
        try:
            yield far, peers, ended
        finally:
            for one in peers:
                one.close()


@pytest.mark.hang
def test_a_cut_cable_ends_both_ranks_and_each_names_phase_and_peer(capfd: pytest.CaptureFixture[str]) -> None:
    with two_ranks() as (far, peers, ended):
        assert [one.silent() for one in peers] == [[], []]
        far.switch("down")
        assert [ended.get(timeout=WAIT_S) for _ in peers] == [FAILED, FAILED]
        for one, address in zip(peers, ("rank 1 at 10.231.7.2", "rank 0 at 10.231.7.1"), strict=True):
            assert re.fullmatch(rf"no answer from the machine of {address} for \d+ s", "".join(one.silent()))
    said = capfd.readouterr().err
    assert "error on rank 0, in phase rollout: no way to the machine of rank 1 at 10.231.7.2 for 4 s, half of" in said
    assert "error on rank 1, between two phases: no way to the machine of rank 0 at 10.231.7.1 for 4 s, half of" in said


def test_a_rank_that_ends_is_watched_no_more_and_ends_nobody() -> None:
    with two_ranks() as (far, peers, ended):
        peers[1].close()
        end = time.monotonic() + WAIT_S
        while peers[0]._connections:
            assert time.monotonic() < end, "still watched"
            time.sleep(0.01)
        assert peers[0].silent() == [] and ended.empty()


def test_only_ranks_that_know_the_word_are_taken_and_late_ones_named() -> None:
    word, other = b"w" * TOKEN_BYTES, b"o" * TOKEN_BYTES
    with socket.create_server(("127.0.0.1", 0)) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(4)]
        for client, said in zip(
            clients, (GREETING.pack(1, other), b"", GREETING.pack(7, word), GREETING.pack(1, word)), strict=True
        ):
            client.sendall(said)
            client.shutdown(socket.SHUT_WR)
        found = _greeted(listener, {1}, word, WAIT_S)
        assert list(found) == [1] and found[1].getpeername() == clients[3].getsockname()
        with pytest.raises(TimeoutError, match="ranks 1, 2 did not connect to rank 0 within 0.1 s"):
            _greeted(listener, {1, 2}, word, 0.1)
        for one in (*clients, *found.values()):
            one.close()


def ranks_that_a_rank_watches() -> list[int]:
    platform.start_process_group(0, WAIT_S)
    start_control(WAIT_S)
    connections = _connect(WAIT_S)
    with watch_peers(WAIT_S, lambda: None):
        pass
    for one in connections.values():
        one.close()
    return sorted(connections)


def test_rank_0_watches_all_and_is_watched_by_all() -> None:
    assert run_ranks(ranks_that_a_rank_watches, 3) == [[1, 2], [0], [0]]
