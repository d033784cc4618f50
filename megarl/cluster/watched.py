"""A rank's part of the watchdog: it says where it stands, and ends when the watching process tells it to."""

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
from megarl.cluster.watchdog import EXIT, HANG, RECORDER, NodeWatcher
from megarl.cluster.watchdog_judge import Deadlines
from megarl.cluster.watchdog_network import WatchedRank, WatcherSettings
from megarl.megatron.parallel import Place, broadcast_from_first, gather_to_all
from megarl.platform.diagnostics import dump_flight_recorder
from megarl.platform.messages import address_towards, deadline_passed, peer_lost
from megarl.telemetry.stacks import MARK, mark, unmark

TOKEN_BYTES = 16
MOST_NOTE_CHARACTERS = 2048
# How long a rank that has reported a deadline waits to be ended, beyond the time for stacks.
END_S = 30.0
# How long a rank that has lost a peer waits to hear, beyond the time for stacks, that this is the end of a hang.
LOST_S = 3.0
# The watcher sees within half a second that all ranks of its node have ended.
WATCHER_S = 5.0
MOST_WATCHERS = 3
CLOSE = "close"


class Watch:
    """This rank as the watcher sees it.

    Its page is a file in memory. The watcher opens it under /proc, and can read it also when this process has been killed;
    nothing of it is ever left behind.
    """

    def __init__(self, token: str, rank: int, place: str, stacks_s: float) -> None:
        self._stacks_s = stacks_s
        self._page = os.memfd_create("megarl-watch")
        self._standing: dict[str, Any] = {"rank": rank, "place": place, "phases": 0, "ended": False}
        self._first_step: int | None = None
        self.beat(None, None)
        mark(f"{token}/rank-{rank:05d}")
        self._ear, self.pipe = os.pipe()
        self.handle = WatchedRank(rank, os.getpid(), self._page, self.pipe)
        self._hangs = threading.Event()
        self._some_ended = threading.Event()  # or the run hangs
        # The main thread may wait for ever in C.
        self._thread = threading.Thread(target=self._listen, name="watchdog", daemon=True)
        self._thread.start()

    def _write(self, **changes: Any) -> None:
        self._standing |= changes
        self._standing["since"] = time.monotonic()  # the same clock in all processes of a machine
        os.pwrite(self._page, json.dumps(self._standing).encode() + b"\n", 0)

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._first_step = step if self._first_step is None else self._first_step
        self._write(step=step, first=step == self._first_step, phase=None, span=None)

    def beat(self, phase: str | None, span: str | None) -> None:
        """Say that this rank is in a phase and, inside it, in a span; None between phases, or in no span."""
        begins = phase is not None and self._standing.get("phase") is None
        self._write(phase=phase, span=span, phases=self._standing["phases"] + begins)

    @contextmanager
    def deadlines(self, place_of: Callable[[BaseException], tuple[str | None, str | None]]) -> Iterator[None]:
        """Inside, an error that says that a deadline has passed ends the run as a hang, with all stacks: they are gone when
        engines are closed after it. `place_of` gives the phase and the span in which an error was raised."""
        try:
            yield
        except BaseException as error:  # also SystemExit of a rank that is asked to end
            if ASKED.name is None:  # else other ranks are leaving, and so do not answer
                if deadline_passed(error):
                    self.beat(*place_of(error))
                    self._write(note=str(error)[:MOST_NOTE_CHARACTERS])
                    self._hangs.wait(self._stacks_s + END_S)
                elif peer_lost(error):  # by a deadline of that peer's, or as it failed
                    self.beat(*place_of(error))
                    self._some_ended.wait(self._stacks_s + LOST_S)
            if self._hangs.is_set():  # then an error only says that peers end
                time.sleep(END_S)
            raise

    def _listen(self) -> None:
        with os.fdopen(self._ear, "rb") as ear:
            for line in ear:
                word, _, content = os.fsdecode(line).rstrip("\n").partition(" ")
                if word == CLOSE:
                    return
                if word == EXIT:
                    os._exit(int(content))
                if word == HANG:
                    self._hangs.set()
                    with suppress(OSError):  # of a full disk, say: end all the same
                        dump_flight_recorder(Path(content) / f"{RECORDER}{self.handle.rank}")
                self._some_ended.set()

    def close(self) -> None:
        self._write(ended=True)
        os.write(self.pipe, f"{CLOSE}\n".encode())
        self._thread.join()
        unmark()
        os.close(self._page)
        os.close(self.pipe)


@contextmanager
def watched(deadlines: Deadlines, run: Path, place: Place, nodes: Sequence[int] = ()) -> Iterator[Watch]:
    """Within this a process on each node watches its ranks. Collective. `nodes`, on rank 0: those without ranks."""
    token, listener, address = "", None, None
    node, num_nodes = int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if place.rank == 0:
        token = secrets.token_hex(TOKEN_BYTES)
        if num_nodes > 1 or nodes:
            host = address_towards(os.environ["MASTER_ADDR"])
            listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            address = listener.getsockname()[:2]
    token, address = broadcast_from_first((token, address))
    watch = Watch(token, place.rank, place_name(place), deadlines.stacks_s)
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
    """The process that watches this node's ranks. It outlives this rank where this rank hangs. When the process ends too
    early, this rank says so and starts another one."""

    def __init__(self, settings: WatcherSettings) -> None:
        self._settings = settings
        self.may_end = False
        """Whether this rank is about to end, and the process with the last rank of its node."""
        self._process = self._start()
        threading.Thread(target=self._replace, name="watcher", daemon=True).start()

    def wait(self) -> None:
        """Wait for the end of the process, but not where it watches other ranks of this node that have not ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(WATCHER_S)

    def _start(self) -> subprocess.Popen[bytes]:
        listener = self._settings.listener
        with open(os.memfd_create("megarl-watcher"), "w+b") as settings:  # no disk may be full here
            pickle.dump(self._settings, settings)
            settings.seek(0)
            return subprocess.Popen(
                [sys.executable, "-m", "megarl.cluster.watchdog"], stdin=settings, stdout=sys.stderr,
                start_new_session=True, pass_fds=[] if listener is None else [listener],
                env={name: value for name, value in os.environ.items() if name != MARK},
            )  # fmt: skip

    def _replace(self) -> None:
        """In a thread, as long as there is such a process."""
        for left in reversed(range(MOST_WATCHERS)):
            status = self._process.wait()
            if self.may_end or status == 0:
                return
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
            then = "another one takes its place" if left else "nobody watches the ranks of this node from here on"
            print(
                f"watchdog: its process {self._process.pid} on node {self._settings.node} {how}; {then}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            if left:
                self._process = self._start()


def nodes_without_ranks(num_trainer_nodes: int) -> list[int]:
    """Return the job's nodes after those of the trainer; none where this process has joined no Ray, as with replayed
    rollouts."""
    return [number for number in sorted(numbered_nodes()) if number >= num_trainer_nodes] if ray.is_initialized() else []


def watch_nodes(settings: WatcherSettings, nodes: Sequence[int]) -> None:
    """Watch the processes of nodes without ranks until node 0's watcher ends. `settings.master` is that watcher."""
    for node in nodes:
        # Detached: it is to write its stacks also where the ranks, and with them this run's other actors, have ended.
        options = {"num_cpus": 0, "lifetime": "detached", "max_restarts": 0, "resources": node_share(node)}
        actor = ray.remote(NodeWatcher).options(**options).remote()
        actor.watch.remote(replace(settings, node=node, ranks=()))


def place_name(place: Place) -> str:
    """Return a rank's part in the actor's layout, in words."""
    layout = place.layout
    parts = [("pipeline stage", place.pipeline_rank, layout.pipeline), ("data-parallel rank", place.data_rank, layout.data),
             ("tensor rank", place.tensor_rank, layout.tensor)]  # fmt: skip
    return ", ".join(f"{name} {rank} of {size}" for name, rank, size in parts if size > 1)
