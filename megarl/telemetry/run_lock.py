"""`run.lock` of a run directory: one run at a time writes there, and the next one learns which host and process has it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

import psutil

# The holder touches its lock this often; who finds the lock of another host waits for three touches that do not come.
BEAT_S = 10.0
SILENT_BEATS = 3
LONGEST_BYTES = 4096


class RunLock:
    """The lock, from `take` until `release` or the end of this process.

    The kernel's record lock, which ends with its process, also on a node that dies, holds on one host and on file systems
    that carry it from host to host (NFS 4, GPFS, Lustre with `flock`). The kernel also drops it when the holder closes any
    other descriptor of the file. So where the lock is free, but the file names a process, this process looks whether the
    holder lives: on this host by its process, on another by the file's time, which a live holder touches. A record lock and
    not `flock`, which forked children of the holder would keep.
    """

    def __init__(self, path: Path, beat_s: float = BEAT_S) -> None:
        self.path, self._beat_s = path, beat_s
        self._descriptor = -1
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)

    def take(self) -> dict[str, Any] | None:
        """Take the lock; None, or the holder that has it: `host`, `process`, `since`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked, has_locks = False, True
        except OSError as error:
            is_locked, has_locks = error.errno in (errno.EACCES, errno.EAGAIN), False
        # Read only now: a holder that has left in between has emptied the file.
        holder = _holder(os.pread(self._descriptor, LONGEST_BYTES, 0))
        # With locks, this process may take its own again: it has executed another program, or a run in it has failed.
        is_own = has_locks and holder is not None and holder["process"] == os.getpid()
        is_alive = is_locked or (not is_own and _runs_here(holder))
        if not is_alive and holder is not None and holder["host"] != platform.node():
            is_alive = self._touches()
        if is_alive:
            os.close(self._descriptor)
            self._descriptor = -1
            return holder or {"host": "unknown", "process": "unknown", "since": "unknown"}  # it is about to say
        own = {"host": platform.node(), "process": os.getpid(), "created": psutil.Process().create_time(),
               "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}  # fmt: skip
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(own).encode(), 0)
        self._thread.start()
        return None

    def release(self) -> None:
        """Give the lock up. The file stays, empty: a name that comes and goes would be a lock of its own."""
        self._released.set()
        if self._descriptor >= 0:
            self._thread.join(self._beat_s)  # a touch may hang with its file system
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1

    def _beat(self) -> None:
        while not self._released.wait(self._beat_s):
            with contextlib.suppress(OSError):  # a file system that is away for a while
                os.utime(self.path)

    def _touches(self) -> bool:
        """Whether the holder touches the file while this process watches."""
        before = self.path.stat().st_mtime_ns
        for _ in range(SILENT_BEATS):
            time.sleep(self._beat_s)
            if self.path.stat().st_mtime_ns != before:
                return True
        return False


def running_here(path: Path) -> dict[str, Any] | None:
    """The holder of a lock, where it is a living process of this host; for a look before any process starts."""
    try:
        holder = _holder(path.read_bytes())
    except OSError:
        return None
    return holder if _runs_here(holder) else None


def _holder(content: bytes) -> dict[str, Any] | None:
    """Whom the file names; None for an empty or torn one."""
    try:
        found = json.loads(content)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"host", "process", "created", "since"} <= found.keys() else None


def _runs_here(holder: dict[str, Any] | None) -> bool:
    if holder is None or holder["host"] != platform.node():
        return False
    try:
        process = psutil.Process(holder["process"])
        return abs(process.create_time() - holder["created"]) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
