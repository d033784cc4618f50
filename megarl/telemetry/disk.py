"""Write so that a full disk, dead node or lost terminal costs at most a line, and raise errors that name the full disk."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import select
import shutil
import sys
from pathlib import Path
from typing import Any, TextIO

MIB = 1 << 20
# Messages of torch's writers and Megatron's worker processes, which do not raise OSError.
_FULL = re.compile(r"No space left on device|Disk quota exceeded|iostream error|PytorchStreamWriter failed writing")


class DiskFull(OSError):
    """A file does not fit; the message has the path, the needed bytes and the free bytes."""


class LineFile:
    """Appends lines to a text file, each in one unbuffered write, so that nothing repeats a failed write later."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._is_torn = path, False
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                self._is_torn = file.read(1) != b"\n"
        self._file = path.open("ab", buffering=0)

    def append(self, line: str) -> None:
        """Write a line, after ending a line that was cut short. Raises OSError with the file's name."""
        left = (("\n" if self._is_torn else "") + line + "\n").encode()
        try:
            while left:
                left = left[self._file.write(left) :]
                self._is_torn = bool(left)
        except OSError as error:
            raise type(error)(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects in a file's lines; skip lines that a kill, a dead node or a full disk cut short."""
    objects = []
    for line in path.read_bytes().split(b"\n"):
        try:
            value = json.loads(line)
        except ValueError:  # UnicodeDecodeError too
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects


def write_whole(path: Path, text: str) -> None:
    """Write a text file as a whole, or leave the old file unchanged. Raises OSError with the file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise type(error)(error.errno, error.strerror, str(path)) from error


def no_room(place: Path, content: str, num_bytes: int | None) -> DiskFull:
    """Return the error for `content` that does not fit; the size may be unknown."""
    size = "" if num_bytes is None else f" of {_mib(num_bytes)}"
    return DiskFull(errno.ENOSPC, f"no room for {content}{size}, with {_mib(free_bytes(place))} free", str(place))


def size_bytes(directory: Path | None) -> int | None:
    """Return the size of all files of a directory; None without a directory."""
    return None if directory is None else sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def free_bytes(path: Path) -> int:
    """Return the free bytes of a path's file system for this user. The path need not exist yet."""
    return shutil.disk_usage(nearest_existing(path)).free


def nearest_existing(path: Path) -> Path:
    """Return a path or its nearest visible parent. `Path.exists` raises if this user may not search a parent."""
    place = path.absolute()
    while not os.path.exists(place):
        place = place.parent
    return place


def is_full(error: BaseException | None) -> bool:
    """Return whether an error, or an error that caused it, says that a disk or a quota is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if _FULL.search(str(error)) is not None:
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_full(error: BaseException, place: Path) -> str:
    """Return a sentence about a full disk. The sentence names `place` if the error names no file."""
    if isinstance(error, DiskFull):
        return f"{error.filename}: {error.strerror}"
    path = getattr(error, "filename", None) or place
    cause = "a quota is used up" if getattr(error, "errno", None) == errno.EDQUOT else "no space left on its disk"
    return f"{path} cannot be written: {cause}, which has {_mib(free_bytes(Path(path)))} free"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"


class EnduringOutput(io.FileIO):
    """Writes to a file descriptor and drops refused text. The descriptor `report_to` gets the first reason."""

    def __init__(self, descriptor: int, title: str, report_to: int | None) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._title, self._report_to = title, report_to

    def write(self, content: bytes) -> int:  # type: ignore[override]
        """Write all of `content`, or drop the rest."""
        left = memoryview(content)
        while left:
            try:
                num_written = super().write(left)
            except OSError as error:
                if self._report_to is not None:
                    text = f"megarl: {self._title} cannot be written ({error.strerror}): the run goes on without it\n"
                    with contextlib.suppress(OSError):
                        os.write(self._report_to, text.encode())
                    self._report_to = None
                break
            if num_written is None:  # another program made the terminal or pipe non-blocking
                select.select([], [self], [])
            else:
                left = left[num_written:]
        return len(content)


def endure_output() -> None:
    """Let this process's standard output and error drop text that cannot be written or encoded."""
    sys.stdout = _enduring(sys.stdout, "standard output", 2)
    sys.stderr = _enduring(sys.stderr, "standard error", None)


def _enduring(stream: TextIO, name: str, report_to: int | None) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (io.UnsupportedOperation, AttributeError):  # a stream in memory never fails
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    raw = io.BufferedWriter(EnduringOutput(descriptor, name, report_to))  # type: ignore[type-var]
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)
