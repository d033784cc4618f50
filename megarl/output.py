"""Standard output and error that never end a run: a full disk, a closed pipe or a lost terminal drops text and no more."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import TextIO


class Enduring(io.RawIOBase):
    """Write to a file descriptor. What it does not take is dropped, and the first time `other` is told why."""

    def __init__(self, descriptor: int, name: str, other: int | None) -> None:
        self._descriptor, self._name, self._other, self._has_told = descriptor, name, other, False

    def write(self, content: bytes) -> int:  # type: ignore[override]
        """Write or drop; always all of it."""
        left = memoryview(content)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # a terminal or pipe that another program has made non-blocking
                select.select([], [self._descriptor], [])
            except OSError as error:
                self._tell(error)
                break
        return len(content)

    def _tell(self, error: OSError) -> None:
        if self._has_told or self._other is None:
            return
        self._has_told = True
        text = f"megarl: {self._name} cannot be written ({error.strerror}): the run goes on without it\n"
        try:
            os.write(self._other, text.encode())
        except OSError:
            self._other = None  # nobody is left to tell

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


def endure_output() -> None:
    """Have this process's standard output and error drop what cannot be written or encoded."""
    sys.stdout = _enduring(sys.stdout, "standard output", 2)
    sys.stderr = _enduring(sys.stderr, "standard error", None)


def endure_errors() -> None:
    """The same of standard error alone: of a command whose output is its result."""
    sys.stderr = _enduring(sys.stderr, "standard error", None)


def _enduring(stream: TextIO, name: str, other: int | None) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (io.UnsupportedOperation, AttributeError):  # kept in memory, or closed from the start: it fails nowhere
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    raw = io.BufferedWriter(Enduring(descriptor, name, other))  # type: ignore[type-var]
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)
