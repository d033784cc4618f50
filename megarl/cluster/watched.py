"""A rank's part of the watchdog: publish what the rank does, and end the rank when the watcher says so."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from megarl.cluster.preemption import ASKED
from megarl.cluster.ray_cluster import node_share, numbered_nodes
from megarl.cluster.watchdog import NodeWatcher
from megarl.cluster.watchdog_judge import Deadlines
from megarl.cluster.watchdog_network import WatchedRank, WatcherSettings
from megarl.megatron.parallel import Place, broadcast_from_first, gather_to_all
from megarl.platform.diagnostics import dump_flight_recorder
from megarl.platform.messages import address_towards, deadline_passed, peer_lost
from megarl.telemetry.clock import ClockPlace
from megarl.telemetry.stacks import MARK, mark, unmark

TOKEN_BYTES = 16
MOST_NOTE_CHARACTERS = 2048
# How long a rank that reported a deadline waits to be ended, beyond the time for stacks.
END_S = 30.0
# How long a rank that lost a peer waits, beyond the time for stacks, to hear whether the run hangs.
LOST_S = 3.0
# The watcher notices within half a second that all ranks of its node have ended.
WATCHER_S = 5.0


class Watch:
    """This rank's side of the watchdog.

    The rank's page is a file in memory, which the watcher opens under /proc. The watcher can read the page after this
    process was killed, and the page vanishes with the last process that has it open.
    """

    def __init__(self, token: str, rank: int, place: str, stacks_s: float) -> None:
        self._stacks_s = stacks_s
        self._page = os.memfd_create("megarl-watch")
        self._standing: dict[str, Any] = {"rank": rank, "place": place, "phases": 0, "ended": False}
        self._first_step: int | None = None
        self.beat(None, None)
        mark(f"{token}/rank-{rank:05d}")
        self._orders, self.pipe = os.pipe()
        self.handle = WatchedRank(rank, os.getpid(), self._page, self.pipe)
        self._is_ending = threading.Event()  # on the watcher's order
        # Listen in a thread, because the main thread may wait forever in C.
        self._thread = threading.Thread(target=self._listen, name="watchdog", daemon=True)
        self._thread.start()

    def _write(self, **changes: Any) -> None:
        self._standing |= changes
        self._standing["since"] = time.monotonic()  # the same clock in all processes of a machine
        os.pwrite(self._page, json.dumps(self._standing).encode() + b"\n", 0)

    def begin(self, step: int, is_new: bool = False) -> None:
        """Publish the start of a step. One that `is_new` does what no step did before, and may take as long as the first."""
        self._first_step = step if self._first_step is None else self._first_step
        self._write(step=step, first=is_new or step == self._first_step, phase=None, span=None)

    def beat(self, phase: str | None, span: str | None) -> None:
        """Publish the phase and the span inside it; None between phases, or in no span."""
        begins = phase is not None and self._standing.get("phase") is None
        self._write(phase=phase, span=span, phases=self._standing["phases"] + begins)

    @contextmanager
    def deadlines(self, place_of: Callable[[BaseException], ClockPlace]) -> Iterator[None]:
        """End the run as a hang, with all stacks, if the body raises at a deadline. Closing the engines first would lose
        their stacks. `place_of` returns the phase and the span in which an error was raised."""
        try:
            yield
        except BaseException as error:  # SystemExit too
            if ASKED.name is None:  # otherwise other ranks leave and do not answer
                if deadline_passed(error):
                    self.beat(*place_of(error))
                    self._write(note=str(error)[:MOST_NOTE_CHARACTERS])
                    self._is_ending.wait(self._stacks_s + END_S)
                elif peer_lost(error):  # at a deadline of the peer, or because it failed
                    self.beat(*place_of(error))
                    self._is_ending.wait(self._stacks_s + LOST_S)
            if self._is_ending.is_set():  # then the error only shows that peers are ending
                time.sleep(END_S)
            raise

    def _listen(self) -> None:
        """Wait for the watcher's order to end, or for the empty line of `close`."""
        with os.fdopen(self._orders, "rb") as orders:
            status, _, folder = os.fsdecode(orders.readline()).rstrip("\n").partition(" ")
        if status:
            self._is_ending.set()
            if folder:
                with suppress(OSError):  # a full disk must not prevent the end
                    dump_flight_recorder(Path(folder) / f"flight-recorder-{self.handle.rank}")
            os._exit(int(status))

    def close(self) -> None:
        self._write(ended=True)
        with suppress(BrokenPipeError):  # the thread has an order to end, and ends this process
            os.write(self.pipe, b"\n")
        self._thread.join()
        unmark()
        os.close(self._page)
        os.close(self.pipe)


@contextmanager
def watched(deadlines: Deadlines, run: Path, place: Place, nodes: Sequence[int] = ()) -> Iterator[Watch]:
    """Watch the ranks inside this context, with one watching process on each node. Collective. `nodes`, given on rank 0, are
    nodes without ranks."""
    token, listener, address = "", None, None
    node, num_nodes = int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if place.rank == 0:
        token = secrets.token_hex(TOKEN_BYTES)
        if num_nodes > 1 or nodes:
            host = address_towards(os.environ["MASTER_ADDR"])
            listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            address = listener.getsockname()[:2]
    token, address = broadcast_from_first((token, address))
    layout = place.layout
    parts = [("pipeline stage", place.pipeline_rank, layout.pipeline), ("data-parallel rank", place.data_rank, layout.data),
             ("tensor rank", place.tensor_rank, layout.tensor)]  # fmt: skip
    name = ", ".join(f"{part} {rank} of {size}" for part, rank, size in parts if size > 1)
    watch = Watch(token, place.rank, name, deadlines.stacks_s)
    ranks = tuple(rank for rank_node, rank in gather_to_all((node, watch.handle)) if rank_node == node)
    settings = WatcherSettings(str(run.absolute()), node, num_nodes, ranks, deadlines, token, address)
    watch_nodes(settings, nodes)
    if node == 0:
        settings = replace(settings, master=None, listener=None if listener is None else listener.fileno())
    watcher = WatcherProcess(settings) if os.environ["LOCAL_RANK"] == "0" else None
    os.environ[MARK] = f"{token}/child of rank {place.rank}"
    try:
        yield watch
    finally:
        del os.environ[MARK]
        if watcher is not None:
            watcher.may_end = True
        watch.close()
        if watcher is not None:
            watcher.wait()
        if listener is not None:
            listener.close()


class WatcherProcess:
    """The process that watches this node's ranks and outlives a rank that hangs. If it ends too early, this rank says so."""

    def __init__(self, settings: WatcherSettings) -> None:
        self._node = settings.node
        self.may_end = False
        """Whether this rank is ending; the process ends with the last rank of its node."""
        with open(os.memfd_create("megarl-watcher"), "w+b") as file:  # a file in memory, because the disk may be full
            pickle.dump(settings, file)
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megarl.cluster.watchdog"], stdin=file, stdout=sys.stderr, start_new_session=True,
                pass_fds=[] if settings.listener is None else [settings.listener],
                env={name: value for name, value in os.environ.items() if name != MARK},
            )  # fmt: skip
        threading.Thread(target=self._report_end, name="watcher", daemon=True).start()

    def wait(self) -> None:
        """Wait for the process to end, unless it still watches other ranks of this node."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(WATCHER_S)

    def _report_end(self) -> None:
        status = self._process.wait()
        if not self.may_end and status != 0:
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
            text = f"watchdog: its process on node {self._node} {how}: nobody watches the ranks of this node from here on"
            print(text, file=sys.stderr, flush=True)


def nodes_without_ranks(num_trainer_nodes: int) -> list[int]:
    """Return the numbers of the job's nodes after the trainer's nodes; none without Ray, as with replayed rollouts."""
    return [number for number in sorted(numbered_nodes()) if number >= num_trainer_nodes] if ray.is_initialized() else []


def watch_nodes(settings: WatcherSettings, nodes: Sequence[int]) -> None:
    """Watch nodes without ranks until node 0's watcher, `settings.master`, ends."""
    for node in nodes:
        # Detached, so that the actor writes stacks even after the ranks, and with them this run's other actors, have ended.
        options = {"num_cpus": 0, "lifetime": "detached", "max_restarts": 0, "resources": node_share(node)}
        actor = ray.remote(NodeWatcher).options(**options).remote()
        actor.watch.remote(replace(settings, node=node, ranks=()))
