"""Named shared memory of this machine, and the removal of what dead runs left there."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import platform
from pathlib import Path

import numpy as np

ROOT = Path("/dev/shm")
PREFIX = "megarl-"


class SharedSegment:
    """`num_bytes` of shared memory, mapped into this process as `data`, uint8 [num_bytes].

    Plain files in /dev/shm and not `multiprocessing.shared_memory`, whose resource tracker unlinks a segment
    when any process that only attached to it ends.
    """

    def __init__(self, name: str, descriptor: int, num_bytes: int, owner: bool) -> None:
        self.name = name
        self.num_bytes = num_bytes
        self._owner = owner
        self._descriptor = descriptor
        # Populated at once: the first touch of shared memory is ten times slower than every later one.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.data: np.ndarray = np.frombuffer(mmap.mmap(descriptor, num_bytes, flags), dtype=np.uint8)

    @classmethod
    def create(cls, name: str, num_bytes: int, way_out: str = "") -> SharedSegment:
        """A new zeroed segment that lives until `close` or the end of this process.

        Raises ValueError where shared memory is too small for it, with a `way_out` beside more of it.
        """
        hidden = ROOT / f".{PREFIX}{name}"
        descriptor = _locked(hidden)
        try:
            # Reserves the memory now: a later write to a full /dev/shm would end the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, num_bytes)
            os.rename(hidden, ROOT / f"{PREFIX}{name}")
        except OSError as error:
            os.close(descriptor)
            hidden.unlink(missing_ok=True)
            if error.errno == errno.ENOSPC:
                raise ValueError(
                    f"the weight sync's buckets need {num_bytes} bytes more in {ROOT}; enlarge it (docker run --shm-size)"
                    f"{way_out}"
                ) from error
            raise
        return cls(name, descriptor, num_bytes, owner=True)

    @classmethod
    def open(cls, name: str) -> SharedSegment:
        """Map a segment that another process of this machine made. Raises FileNotFoundError."""
        descriptor = os.open(ROOT / f"{PREFIX}{name}", os.O_RDWR | os.O_CLOEXEC)
        return cls(name, descriptor, os.fstat(descriptor).st_size, owner=False)

    def close(self) -> None:
        """Give the mapping up; the owner also removes the name (others keep what they have mapped)."""
        if self._descriptor < 0:
            return
        if self._owner:
            (ROOT / f"{PREFIX}{self.name}").unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1
        self.data = np.empty(0, dtype=np.uint8)


def _locked(hidden: Path) -> int:
    """A new file, open, with the lock that tells `sweep` that its owner lives. One that was swept before it was locked is
    made again."""
    while True:
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def sweep() -> list[str]:
    """Remove every segment whose owner is gone, also one that was not finished; returns their names."""
    removed = []
    for file in [*ROOT.glob(f"{PREFIX}*"), *ROOT.glob(f".{PREFIX}*")]:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):  # another sweeper was faster, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:  # else another sweeper was faster, and the name may be another file's
                file.unlink(missing_ok=True)
                removed.append(file.name.removeprefix(".").removeprefix(PREFIX))
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return removed


def machine() -> str:
    """The same for processes that share memory: host name and boot, as containers may share neither."""
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as boot:
        return f"{platform.node()} {boot.read().strip()} {os.stat(ROOT).st_dev}"
