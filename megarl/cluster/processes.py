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
ORPHAN_S = 1.0
KILL_S = 10.0


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


class Descendants:
    """The processes below this one, and the files in /dev/shm that they map or have mapped: a killed engine leaves its files
    and, as orphans, processes that keep their memory. Orphans become children of this process."""

    def __init__(self) -> None:
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        self._files: set[str] = set()
        self._listing: set[str] = set()
        self._has_changed = False
        self._orphans: list[psutil.Process] = []
        self._orphans_since = 0.0

    def tend(self, known_children: Collection[int]) -> None:
        """End orphans, which are all children except `known_children`, and note files. Call it repeatedly.

        It kills the newest orphan with its descendants once no orphan has come or ended for ORPHAN_S. The oldest is
        multiprocessing's resource tracker, which ends itself.
        """
        orphans = [child for child in psutil.Process().children() if child.pid not in known_children]
        for orphan in orphans:
            with contextlib.suppress(psutil.TimeoutExpired):
                orphan.wait(0)
        if orphans != self._orphans:
            self._orphans, self._orphans_since = orphans, time.monotonic()
        elif orphans and time.monotonic() - self._orphans_since > ORPHAN_S:
            newest = max(orphans, key=psutil.Process.create_time)
            with contextlib.suppress(psutil.NoSuchProcess):
                end_at_once([newest, *newest.children(recursive=True)])
        # Scan when a file has come or gone since the last call, and once more in the next call: mapping follows creation.
        listing, had_changed = set(os.listdir(SHARED_MEMORY)), self._has_changed
        self._has_changed, self._listing = listing != self._listing, listing
        if self._has_changed or had_changed:
            self._files |= _mapped(psutil.Process().children(recursive=True))

    def end(self) -> None:
        """Kill all descendants, and remove the noted files that no process maps any more."""
        end = time.monotonic() + KILL_S
        while (descendants := psutil.Process().children(recursive=True)) and time.monotonic() < end:
            end_at_once(descendants)  # orphans arrive here while others end
        _remove(self._files)


def end_at_once(processes: Iterable[psutil.Process]) -> None:
    """Kill processes, including stopped processes, and remove shared memory that no process maps any more."""
    family = list(processes)
    files = _mapped(family)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=KILL_S)  # reaps children
    _remove(files)


def _remove(files: set[str]) -> None:
    """Remove files that no process maps any more. Files of another user stay."""
    for file in files - _mapped(psutil.process_iter()):
        with contextlib.suppress(OSError):
            Path(file).unlink()


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
