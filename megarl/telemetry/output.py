"""Standard output and error that never end a run: a full disk, a closed pipe or a lost terminal drops text and no more."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import TextIO


class Enduring(io.RawIOBase):
    """Write to a file descriptor. What it does not take is dropped, and the first time `other` is told why.

    With `pipes_alone` only a pipe without a reader drops text, and other errors are raised.
    """

    def __init__(self, descriptor: int, name: str, other: int | None, pipes_alone: bool) -> None:
        self._descriptor, self._name, self._other, self._pipes_alone = descriptor, name, other, pipes_alone
        self._has_told = False

    def write(self, content: bytes) -> int:  # type: ignore[override]
        """Write or drop; always all of it."""
        left = memoryview(content)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # a terminal or pipe that another program has made non-blocking
                select.select([], [self._descriptor], [])
            except OSError as error:
                if self._pipes_alone and not isinstance(error, BrokenPipeError):
                    raise
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


def endure_closed_pipes() -> None:
    """The same of a command whose output is its result: a pipe that is closed (`| head`) wants no more of it, a full disk is
    an error."""
    sys.stdout = _enduring(sys.stdout, "standard output", None, pipes_alone=True)
    sys.stderr = _enduring(sys.stderr, "standard error", None)


def _enduring(stream: TextIO, name: str, other: int | None, pipes_alone: bool = False) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (io.UnsupportedOperation, AttributeError):  # kept in memory, or closed from the start: it fails nowhere
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    raw = io.BufferedWriter(Enduring(descriptor, name, other, pipes_alone))  # type: ignore[type-var]
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)
