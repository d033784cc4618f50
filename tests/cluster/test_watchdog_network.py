"""Watchers of several nodes follow node 0's watcher, and notice machines that can no longer be reached."""

from __future__ import annotations

import multiprocessing
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster import watchdog
from megarl.cluster.watchdog import Watcher
from megarl.cluster.watchdog_judge import Deadlines, HangVerdict
from megarl.cluster.watchdog_network import OtherWatchers, WatchedRank, WatcherSettings
from megarl.cluster.watched import Watch
from megarl.telemetry.exit_status import FAILED
from megarl.telemetry.stacks import MARK, marked_processes
from tests.networks import Network, two_networks
from tests.sink_cases import wait_for

WAIT_S = 60.0
COLLECTIVE_S = 8.0  # with this deadline the kernels probe each second
LONG = Deadlines(1e6, 1e6, 1e6, 1e6, 1e6, 5.0, COLLECTIVE_S)
TOKEN = f"{os.getpid():x}"
SLEEPER = """
import time
from megarl.telemetry.stacks import mark_from_environment
mark_from_environment()
def nap():
    print("ready", flush=True)
    time.sleep(600)
nap()
"""


def master_settings(ranks: tuple[WatchedRank, ...] = (), host: str = "127.0.0.1") -> tuple[WatcherSettings, Any]:
    """Return the settings of node 0's watcher, and its address."""
    server = socket.create_server((host, 0))
    address = server.getsockname()
    return WatcherSettings("run", 0, 2, ranks, LONG, TOKEN, listener=server.detach()), address


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {MARK: f"{TOKEN}/engine-0"}
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_node_without_ranks_sends_its_stacks_and_ends_its_processes_on_node_0s_order(
    sleeper: subprocess.Popen[str], tmp_path: Path
) -> None:
    settings, address = master_settings()
    master = OtherWatchers(settings)
    follower = Watcher(replace(settings, node=3, master=address, listener=None))
    watching = threading.Thread(target=follower.watch, daemon=True)
    watching.start()
    wait_for(lambda: 3 in master._watchers)
    assert master.tables() == [] and watching.is_alive(), "a node without ranks is never late"
    master.send("dump")
    _, (process,) = master.stacks(WAIT_S)
    assert (process.name, process.pid, process.state) == ("engine-0", sleeper.pid, "running") and "nap" in str(process.call)
    master.send("end", HangVerdict(tmp_path / "hang", None, ("engine-0 hangs",)))
    watching.join(WAIT_S)
    assert not watching.is_alive() and marked_processes(TOKEN) == {}
    assert [file.name for file in (tmp_path / "hang").iterdir()] == [f"engine-0-{sleeper.pid}.txt"]
    assert "in nap" in (tmp_path / "hang" / f"engine-0-{sleeper.pid}.txt").read_text()


def stay(rank: int, handle: Any) -> None:
    """Run as a rank that stays in a phase."""
    watch = Watch("token", rank, "", 5.0)
    watch.beat("rollout", None)
    handle.put(watch.handle)
    time.sleep(2 * WAIT_S)


def in_network(network: Network, make: Callable[[], Any]) -> Any:
    """Call `make` in a thread that has entered a network, and return the result."""
    results: queue.Queue[Any] = queue.Queue()

    def run() -> None:
        network.enter()
        results.put(make())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results.get_nowait()


@pytest.mark.hang
def test_a_cut_cable_ends_the_ranks_of_both_nodes_and_each_names_phase_and_peer(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "end_at_once", lambda processes: None)  # it would reap the processes before this test can
    context = multiprocessing.get_context("fork")
    queues = [context.SimpleQueue() for _ in range(2)]
    processes = [context.Process(target=stay, args=(rank, handle)) for rank, handle in enumerate(queues)]
    with two_networks() as (near, far):
        try:
            for process in processes:
                process.start()
            ranks = [handle.get() for handle in queues]
            settings, address = in_network(near, lambda: master_settings((ranks[0],), near.address))
            master = in_network(near, lambda: Watcher(settings))
            follower_settings = replace(settings, node=1, ranks=(ranks[1],), master=address, listener=None)
            follower = in_network(far, lambda: Watcher(follower_settings))
            for watcher in (master, follower):
                threading.Thread(target=watcher.watch, daemon=True).start()
            wait_for(lambda: master._network.tables() and follower._network._watchers)
            far.switch("down")
            for process in processes:
                process.join(WAIT_S)
            assert [process.exitcode for process in processes] == [FAILED, FAILED]
        finally:
            for process in processes:
                process.kill()
                process.join()
    text = capfd.readouterr().err
    for rank, (peer, address) in enumerate(((1, "10.231.7.2"), (0, "10.231.7.1"))):
        machine = f"the machine of rank {peer} at {address}"
        assert f"watchdog: on rank {rank}, in phase rollout: no answer from {machine}\n" in text
        line = f"watchdog: error on rank {rank}, in phase rollout: no way to {machine} for 4 s, half of "
        assert re.search(re.escape(line) + r"trainer.collective_timeout_s = 8 \(.+\)", text), text
