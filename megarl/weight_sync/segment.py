"""Named shared memory of this machine, and the removal of segments that dead runs left behind."""

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

    Segments are plain files in /dev/shm, not `multiprocessing.shared_memory`: its resource tracker unlinks a segment when
    any process that only attached to it ends.
    """

    def __init__(self, name: str, descriptor: int, num_bytes: int, owner: bool) -> None:
        self.name, self.num_bytes, self._owner, self._descriptor = name, num_bytes, owner, descriptor
        # Populated at once: the first touch of shared memory is ten times slower than every later one.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.data: np.ndarray = np.frombuffer(mmap.mmap(descriptor, num_bytes, flags), dtype=np.uint8)

    @classmethod
    def create(cls, name: str, num_bytes: int, way_out: str = "") -> SharedSegment:
        """Create a zeroed segment that lives until `close` or the end of this process.

        Raises ValueError where shared memory is too small; the message suggests more shared memory, or the `way_out`.
        """
        hidden = ROOT / f".{PREFIX}{name}"
        while True:
            descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # tells `sweep` that the owner lives
            if os.fstat(descriptor).st_nlink:
                break
            os.close(descriptor)  # swept before it was locked: create it again
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
        """Map a segment that another process of this machine created. Raises FileNotFoundError."""
        descriptor = os.open(ROOT / f"{PREFIX}{name}", os.O_RDWR | os.O_CLOEXEC)
        return cls(name, descriptor, os.fstat(descriptor).st_size, owner=False)

    def close(self) -> None:
        """Release the mapping; the owner also removes the name, and other processes keep their mappings."""
        if self._descriptor < 0:
            return
        if self._owner:
            (ROOT / f"{PREFIX}{self.name}").unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1
        self.data = np.empty(0, dtype=np.uint8)


def sweep() -> list[str]:
    """Remove every segment whose owner is gone, unfinished segments too; returns their names."""
    removed = []
    for file in [*ROOT.glob(f"{PREFIX}*"), *ROOT.glob(f".{PREFIX}*")]:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):  # removed by another sweeper, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:  # otherwise another sweeper removed it, and the name may be a new file's
                file.unlink(missing_ok=True)
                removed.append(file.name.removeprefix(".").removeprefix(PREFIX))
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return removed


def machine() -> str:
    """An identity that is equal for processes that share memory: host name, boot and the device of /dev/shm."""
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as boot:
        return f"{platform.node()} {boot.read().strip()} {os.stat(ROOT).st_dev}"
