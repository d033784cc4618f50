"""Start processes that die with this process, and end a node's processes together with their shared memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import IO

import psutil

from megarl.cluster.preemption import hold_signals

# prctl(2)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHARED_MEMORY = "/dev/shm/"
# Enough for multiprocessing's resource tracker, which unlinks shared memory after its program ends.
TERM_S, KILL_S = 10.0, 10.0


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose parent ends, so that it can find and end the descendant."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def start_tied(
    command: list[str],
    environment: Mapping[str, str],
    death_signal: signal.Signals,
    output: IO[bytes] | int | None = None,
    block_signals: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a program that gets `death_signal` when this process dies.

    The program leads its own session, so that a terminal signals only this process. Its stderr goes to `output`,
    too. `block_signals` blocks preemption signals in the program and its children: Slurm sends them to all processes.
    """
    library = ctypes.CDLL(None)  # before the fork, because loading takes locks

    def tie() -> None:
        library.prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if block_signals:  # not ignored, because Ray's programs set handlers
            hold_signals()

    return subprocess.Popen(
        command,
        env=dict(environment),
        start_new_session=True,
        preexec_fn=tie,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
    )


class SharedMemory:
    """The files in /dev/shm that descendants of this process map or have mapped; a killed engine leaves its files."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._listing: set[str] = set()
        self._has_changed = False

    def scan_changes(self) -> None:
        """Scan if a file has come or gone since the last call, and once more in the next call: mapping follows creation."""
        listing, had_changed = set(os.listdir(SHARED_MEMORY)), self._has_changed
        self._has_changed, self._listing = listing != self._listing, listing
        if self._has_changed or had_changed:
            self.scan()

    def scan(self) -> None:
        """Add the files that descendants map now."""
        self._files |= _mapped(psutil.Process().children(recursive=True))

    def remove(self) -> None:
        """Remove the files that no process maps any more."""
        _remove(self._files)


def end_descendants() -> None:
    """End all descendants by SIGTERM, then SIGKILL. A process that blocks SIGTERM gets SIGKILL at once."""
    this = psutil.Process()
    for number, wait_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        for process in this.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL if _blocks_sigterm(process.pid) else number)
        end = time.monotonic() + wait_s
        # Orphans arrive here while others end.
        while (descendants := this.children(recursive=True)) and time.monotonic() < end:
            psutil.wait_procs(descendants, timeout=0.2)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


class Orphans:
    """The descendants whose parent has ended: processes of a killed engine keep their memory. Needs `adopt_orphans`."""

    def __init__(self) -> None:
        self._since: dict[psutil.Process, float] = {}

    def end(self, known_children: Collection[int]) -> None:
        """End all children except `known_children`, with their descendants: by SIGTERM, and by SIGKILL after `TERM_S`.
        Returns at once; call it repeatedly."""
        orphans = [child for child in psutil.Process().children() if child.pid not in known_children]
        self._since = {orphan: self._since.get(orphan, time.monotonic()) for orphan in orphans}
        for orphan, since in self._since.items():
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if os.waitpid(orphan.pid, os.WNOHANG)[0]:
                    continue
                is_late = time.monotonic() - since > TERM_S
                family = [orphan, *orphan.children(recursive=True)]
                files = _mapped(family)
                for process in family:
                    process.send_signal(signal.SIGKILL if is_late or _blocks_sigterm(process.pid) else signal.SIGTERM)
                psutil.wait_procs(family, timeout=0.1)
                _remove(files)


def end_at_once(processes: Iterable[psutil.Process]) -> None:
    """Kill processes, including stopped processes, and remove shared memory that no process maps any more."""
    family = list(processes)
    files = _mapped(family)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=KILL_S)
    _remove(files)


def _remove(files: set[str]) -> None:
    """Remove files that no process maps any more. Files of another user stay."""
    for file in files - _mapped(psutil.process_iter()):
        with contextlib.suppress(OSError):
            Path(file).unlink()


def _blocks_sigterm(pid: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:  # the process has ended
        return False
    blocked = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:"))
    return bool(blocked >> (signal.SIGTERM - 1) & 1)


def _mapped(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the files in /dev/shm that some of `processes` map.

    The search compares inodes: glibc maps a semaphore under a temporary name, and a container may have its own /dev/shm.
    """
    device = os.stat(SHARED_MEMORY).st_dev
    device_text, inodes = f"{os.major(device):02x}:{os.minor(device):02x}", set()
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines()
        except OSError:  # the process has ended, or belongs to another user
            continue
        for line in lines:
            if SHARED_MEMORY in line:
                _, _, _, mapped_device, inode, _ = line.split(maxsplit=5)
                if mapped_device == device_text:
                    inodes.add(int(inode))
    return {entry.path for entry in os.scandir(SHARED_MEMORY) if entry.inode() in inodes}
