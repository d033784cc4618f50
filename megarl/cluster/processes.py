"""Processes of a node: started so that none outlives this one, and ended without touching any other."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

from megarl.cluster.preemption import hold_signals

# prctl(2)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHARED_MEMORY = "/dev/shm/"
# Long enough for Python to unlink what it shares: multiprocessing's resource tracker does it after its program has ended.
TERM_S, KILL_S = 10.0, 10.0
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Signalled(Exception):
    """A signal came while nothing was there that it could be passed on to."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """Passes signals on to `target` once there is one; before, the first ends what is under way with `Signalled`."""

    target: Callable[[int], None] | None = None

    def handle(self, number: int, frame: object) -> None:
        if self.target is None:
            self.ignore()  # a second one must not keep this process from tidying up
            raise Signalled(number)
        self.target(number)

    def ignore(self) -> None:
        """From here on this process ends anyway; it must not be kept from tidying up."""
        self.target = lambda number: None


@contextmanager
def catch_signals() -> Iterator[Signals]:
    signals = Signals()
    ignored = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else []  # under nohup
    before = {number: signal.signal(number, signals.handle) for number in FORWARDED if number not in ignored}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def adopt_orphans() -> None:
    """From here on a descendant whose parent has ended is a child of this process, and so is found and ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def start_tied(
    command: list[str],
    environment: Mapping[str, str],
    end: signal.Signals,
    output: IO[bytes] | int | None = None,
    merged: bool = True,
    deaf: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, so that a terminal's signals reach it through this process alone. It gets
    `end` where this process ends without a word. Its errors go to `output`, too, where they are `merged`. A `deaf` one, and
    what it starts, does not hear the signals of `megarl.cluster.preemption`: Slurm sends them to all processes of a step."""
    library = ctypes.CDLL(None)  # before the fork: loading it takes locks

    def tie() -> None:
        library.prctl(PR_SET_PDEATHSIG, int(end), 0, 0, 0)
        if deaf:  # to ignore them is not enough: Ray's programs set handlers of their own
            hold_signals()

    return subprocess.Popen(
        command,
        env=dict(environment),
        start_new_session=True,
        preexec_fn=tie,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None and merged else None,
    )


class SharedMemory:
    """The files in /dev/shm that descendants of this process map, also those of descendants that have ended since: an engine
    whose rank ends without a word is killed, and leaves them."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._listed: set[str] = set()
        self._changed = False

    def look(self) -> None:
        """Cheap where no file has come or gone. A file that has come is mapped a moment later, so it is looked at twice."""
        before, self._listed = self._listed, set(os.listdir(SHARED_MEMORY))
        changed_before, self._changed = self._changed, self._listed != before
        if self._changed or changed_before:
            self.look_closely()

    def look_closely(self) -> None:
        """Whatever has come or gone."""
        self.files |= _mapped(psutil.Process().children(recursive=True))

    def remove(self) -> None:
        """Those that nobody maps any more."""
        _remove(self.files)


def end_descendants() -> None:
    """End every process that began here: in good order, then by force. One that is deaf to SIGTERM is ended by force at
    once."""
    me = psutil.Process()
    for number, wait_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        processes = me.children(recursive=True)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL if _is_deaf(process.pid) else number)
        _wait_for_end(me, wait_s)


class Orphans:
    """Descendants whose parent has ended while the job goes on: vLLM's processes outlive an engine that was killed, as with
    the rank 0 that it served, and keep their memory. Needs `adopt_orphans`."""

    def __init__(self) -> None:
        self._since: dict[psutil.Process, float] = {}

    def end(self, known: Collection[int]) -> None:
        """End children of this process but the `known`, and theirs: in good order, or, `TERM_S` later, by force. Returns at
        once; to be called again and again."""
        orphans = [child for child in psutil.Process().children() if child.pid not in known]
        self._since = {orphan: self._since.get(orphan, time.monotonic()) for orphan in orphans}
        for orphan, since in self._since.items():
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if os.waitpid(orphan.pid, os.WNOHANG)[0]:
                    continue
                late = time.monotonic() - since > TERM_S
                family = [orphan, *orphan.children(recursive=True)]
                shared = _mapped(family)
                for process in family:
                    process.send_signal(signal.SIGKILL if late or _is_deaf(process.pid) else signal.SIGTERM)
                psutil.wait_procs(family, timeout=0.1)
                _remove(shared)


def end_at_once(processes: Iterable[psutil.Process]) -> None:
    """End processes by force, stopped ones too, and remove the shared memory that nobody maps any more then."""
    family = list(processes)
    shared = _mapped(family)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=KILL_S)
    _remove(shared)


def _remove(files: set[str]) -> None:
    """Remove those that no process maps any more. Of another user's processes nobody sees what they map: theirs stay."""
    for file in files - _mapped(psutil.process_iter()):
        with contextlib.suppress(OSError):
            Path(file).unlink()


def _is_deaf(pid: int) -> bool:
    """Whether a process of this machine has SIGTERM held back."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:  # it has ended
        return False
    blocked = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:"))
    return bool(blocked >> (signal.SIGTERM - 1) & 1)


def _wait_for_end(me: psutil.Process, wait_s: float) -> None:
    """Until no descendant is left, also none that came to this process as an orphan in the meantime."""
    end = time.monotonic() + wait_s
    while (left := me.children(recursive=True)) and time.monotonic() < end:
        psutil.wait_procs(left, timeout=0.2)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _mapped(processes: Iterable[psutil.Process]) -> set[str]:
    """Files in this process's /dev/shm that some of `processes` map: by numbers, as a semaphore is mapped under another
    name than the one that it then gets (glibc), and a container may have a /dev/shm of its own."""
    device = os.stat(SHARED_MEMORY).st_dev
    here, numbers = f"{os.major(device):02x}:{os.minor(device):02x}", set()
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines()
        except OSError:  # it has ended, or belongs to somebody else, who shares nothing with ours
            continue
        # proc(5): address, permissions, offset, device, number, name
        mapped = [line.split(maxsplit=5) for line in lines if SHARED_MEMORY in line]
        numbers |= {int(words[4]) for words in mapped if words[3] == here}
    return {entry.path for entry in os.scandir(SHARED_MEMORY) if entry.inode() in numbers}
