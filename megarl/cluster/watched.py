"""A rank's part of the watchdog (`megarl/watchdog/`): it says where it stands, and ends when it is told to."""

from __future__ import annotations

import os
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

from megarl.cluster.beats import Beats
from megarl.cluster.preemption import ASKED
from megarl.cluster.watchdog_judge import Deadlines
from megarl.cluster.watchdog_limits import Limits
from megarl.cluster.watchdog_settings import ENDING, OVER, RECORDER, TOLD, WatchedRank, WatcherSettings
from megarl.megatron.parallel import Place, broadcast_from_first, gather_to_all
from megarl.platform.flight_recorder import dump_flight_recorder
from megarl.platform.messages import address_towards, deadline_passed, peer_lost
from megarl.telemetry.exit_status import HUNG
from megarl.telemetry.stacks import MARK, mark, unmark

TOKEN_BYTES = 8
# How long a rank that has reported a deadline waits to be ended, beyond the time for stacks.
END_S = 30.0
# How long a rank that has lost a peer waits to be told, beyond the time for stacks, that this is the end of a hang.
LOST_S = 3.0
# The watcher sees within half a second that all ranks of its node have ended.
WATCHER_S = 5.0
MOST_WATCHERS = 3


class Watch:
    """This rank as the watcher sees it."""

    def __init__(self, token: str, rank: int, stacks_s: float) -> None:
        self._rank, self._stacks_s = rank, stacks_s
        self.elsewhere: WatcherSettings | None = None
        """On rank 0: for a watcher on a node without ranks, where there are any."""
        self.beats = Beats()
        mark(f"{token}/rank-{rank:05d}")
        self._ear, self.mouth = os.pipe()
        self._first_step: int | None = None
        self._told = threading.Event()
        self._heard = threading.Event()  # that, or that some rank has ended
        self._thread = threading.Thread(target=self._listen, name="watchdog", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        """A step begins."""
        self._first_step = step if self._first_step is None else self._first_step
        self.beats.begin(step, step == self._first_step)

    def beat(self, phase: str | None, span: str | None) -> None:
        """See `Beats.beat`; for a `PhaseClock`."""
        self.beats.beat(phase, span)

    @contextmanager
    def deadlines(self, place_of: Callable[[BaseException], tuple[str | None, str | None]]) -> Iterator[None]:
        """Inside, an error that says that a deadline has passed ends the run as a hang, with all stacks: they are gone when
        engines are closed behind it. `place_of` gives the phase and the span in which an error was raised."""
        try:
            yield
        except BaseException as error:  # SystemExit of a rank that is asked to end, too: it goes on when all is told
            if deadline_passed(error) and ASKED.name is None:  # else others are leaving, and so do not answer
                self.beats.beat(*place_of(error))
                self.beats.note(str(error))
                self._told.wait(self._stacks_s + END_S)
            elif peer_lost(error) and ASKED.name is None:  # by a deadline of that peer's, or as it failed
                self.beats.beat(*place_of(error))
                self._heard.wait(self._stacks_s + LOST_S)
            if self._told.is_set():  # an error now is only that peers end
                time.sleep(END_S)
            raise

    def _listen(self) -> None:
        """In a thread: the main one may wait for ever in C."""
        with os.fdopen(self._ear, "rb") as ear:
            while (word := ear.read(1)) == ENDING:
                self._heard.set()
            if word != TOLD:
                return
            self._told.set()
            self._heard.set()
            folder = Path(os.fsdecode(ear.readline().strip()))
            with suppress(OSError):  # a disk is full, say: end all the same
                dump_flight_recorder(folder / f"{RECORDER}{self._rank}")
            # Not before all have been told: those that lose a peer would end as if that had failed.
            ear.read(1)
        os._exit(HUNG)

    def close(self) -> None:
        self.beats.end()
        os.write(self.mouth, OVER)
        self._thread.join()
        unmark()
        self.beats.close()
        os.close(self.mouth)


@contextmanager
def watched(
    limits: Limits, engines_s: float, rewards_s: float, run: Path, place: Place, nodes_beside: bool = False
) -> Iterator[Watch]:
    """Within this a process on each node watches its ranks; see the package. Collective of all ranks. `engines_s` and
    `rewards_s`: as in `Deadlines`; `nodes_beside`, on rank 0: whether the job has nodes without ranks."""
    token, listener = "", None
    node, num_nodes = int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if place.rank == 0:
        token = secrets.token_hex(TOKEN_BYTES)
        listener = _listener() if num_nodes > 1 or nodes_beside else None
    address = None if listener is None else listener.getsockname()[:2]
    token, address = broadcast_from_first((token, address))
    watch = Watch(token, place.rank, limits.stacks_s)
    own = WatchedRank(place.rank, place_name(place), os.getpid(), watch.beats.file, watch.mouth)
    everywhere = gather_to_all((node, own))
    watcher: WatcherProcess | None = None
    if os.environ["LOCAL_RANK"] == "0":
        ranks = tuple(one for where, one in everywhere if where == node)
        deadlines = Deadlines(limits.first_step_s, limits.step_s, limits.files_s, engines_s, rewards_s)
        settings = WatcherSettings(
            str(run.absolute()), node, ranks, deadlines, limits.stacks_s, token,
            None if node == 0 else address, None if listener is None else listener.fileno(),
            num_nodes=num_nodes,
        )  # fmt: skip
        watcher = WatcherProcess(settings)
        if nodes_beside:
            watch.elsewhere = replace(settings, ranks=(), master=address, listener=None)
    before = os.environ.get(MARK)
    os.environ[MARK] = f"{token}/child of rank {place.rank}"
    try:
        yield watch
    finally:
        os.environ.pop(MARK, None)
        if before is not None:
            os.environ[MARK] = before
        if watcher is not None:
            watcher.may_end()
        watch.close()
        if watcher is not None:
            watcher.wait()
        if listener is not None:
            listener.close()


def _listener() -> socket.socket:
    own = address_towards(os.environ["MASTER_ADDR"])
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    return socket.create_server((own, 0), family=family)


class WatcherProcess:
    """The process that watches this node's ranks, on its own from its start: it outlives this rank where this rank hangs.
    One that ends too early is said, with its last words, and another one takes its place."""

    def __init__(self, settings: WatcherSettings) -> None:
        self._settings = settings
        self._may_end = False
        self._process, words = self._start()
        threading.Thread(target=self._look, args=(words,), name="watcher", daemon=True).start()

    def may_end(self) -> None:
        """This rank is about to end, and the process with the last one of its node."""
        self._may_end = True

    def wait(self) -> None:
        """For its end; not where another rank of this node has not ended, as it watches on."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(WATCHER_S)

    def _start(self) -> tuple[subprocess.Popen[bytes], int]:
        """The process, and the end of a pipe for its last words, which ends when it does."""
        words, theirs = os.pipe()
        settings = replace(self._settings, words=theirs)
        files: Sequence[int] = (theirs,) if settings.listener is None else (theirs, settings.listener)
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        process = subprocess.Popen(
            [sys.executable, "-m", "megarl.cluster.watchdog"], stdin=subprocess.PIPE, stdout=sys.stderr,
            start_new_session=True, pass_fds=files, env=environment,
        )  # fmt: skip
        os.close(theirs)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which is seen by its words
            process.stdin.write(settings.dump().encode())
            process.stdin.close()
        return process, words

    def _look(self, words: int) -> None:
        """In a thread, as long as there is such a process."""
        for left in reversed(range(MOST_WATCHERS)):
            with os.fdopen(words, "rb") as pipe:
                said = pipe.read().decode(errors="replace").strip()
            code = self._process.wait()
            if self._may_end or code == 0:
                return
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
            then = "another one takes its place" if left else "nobody watches the ranks of this node from here on"
            print(
                f"watchdog: its process {self._process.pid} on node {self._settings.node} {how}"
                + (f", with the words: {said}" if said else "") + f"; {then}", file=sys.stderr, flush=True,
            )  # fmt: skip
            if left:
                self._settings = replace(self._settings, replaces=True)
                self._process, words = self._start()


def place_name(place: Place) -> str:
    """A rank's part in the actor's layout, in words."""
    layout = place.layout
    parts = [("pipeline stage", place.pipeline_rank, layout.pipeline), ("data-parallel rank", place.data_rank, layout.data),
             ("tensor rank", place.tensor_rank, layout.tensor)]  # fmt: skip
    return ", ".join(f"{name} {rank} of {size}" for name, rank, size in parts if size > 1)
