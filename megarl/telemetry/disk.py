"""Write files of a run directory so that a full disk or a dead node costs a line at most, and say which disk is full."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

MIB = 1 << 20
# How libraries that raise no OSError of their own (torch's writers, Megatron's worker processes) say it.
_FULL = re.compile(r"No space left on device|Disk quota exceeded|iostream error|PytorchStreamWriter failed writing")


class DiskFull(OSError):
    """A file did not fit; the message names the place, what was needed and what is free."""


class LineFile:
    """Append lines to a text file, each with one unbuffered write: what one write fails to add, no later one adds."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._is_torn = path, _is_torn(path)
        self._file = path.open("ab", buffering=0)

    def append(self, line: str) -> None:
        """Write a line. A line before it that was cut short gets its end first. Raises OSError with the file's name."""
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
    """The JSON object of each line of a file; see `parse_lines`."""
    return parse_lines(path.read_bytes())


def parse_lines(content: bytes) -> list[dict[str, Any]]:
    """The JSON objects of lines, without lines that a kill, a dead node or a full disk cut short."""
    objects = []
    for line in content.split(b"\n"):
        try:
            found = json.loads(line)
        except ValueError:  # UnicodeDecodeError too
            continue
        if isinstance(found, dict):
            objects.append(found)
    return objects


def write_whole(path: Path, text: str) -> None:
    """Write a text file, or leave the file that is there as it is. Raises OSError with the file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise type(error)(error.errno, error.strerror, str(path)) from error


def no_room(place: Path, what: str, num_bytes: int | None) -> DiskFull:
    """The error of `what`, of about so many bytes, that does not fit; None for nobody knows how many."""
    size = "" if num_bytes is None else f" of {_mib(num_bytes)}"
    return DiskFull(errno.ENOSPC, f"no room for {what}{size}, with {_mib(free_bytes(place))} free", str(place))


def size_bytes(directory: Path | None) -> int | None:
    """What the files of a directory hold together; None for no directory."""
    return None if directory is None else sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def free_bytes(path: Path) -> int:
    """What the file system of a path has free for this user; the path need not exist yet."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that a disk or a quota is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if _FULL.search(str(error)) is not None:
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_full(error: BaseException, place: Path) -> str:
    """One sentence; `place` is named where the error names no file."""
    if isinstance(error, DiskFull):
        return f"{error.filename}: {error.strerror}"
    named = getattr(error, "filename", None) or place
    why = "a quota is used up" if getattr(error, "errno", None) == errno.EDQUOT else "no space left on its disk"
    return f"{named} cannot be written: {why}, which has {_mib(free_bytes(Path(named)))} free"


def _is_torn(path: Path) -> bool:
    """Whether the last line has no end."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
