"""Keep standard output and error from ending a run: drop text that a full disk, closed pipe or lost terminal refuses."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import TextIO


class EnduringOutput(io.RawIOBase):
    """Writes to a file descriptor and drops refused text. The descriptor `report_to` gets the first reason."""

    def __init__(self, descriptor: int, name: str, report_to: int | None) -> None:
        self._descriptor, self._name, self._report_to = descriptor, name, report_to

    def write(self, content: bytes) -> int:  # type: ignore[override]
        """Write all of `content`, or drop the rest."""
        left = memoryview(content)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # another program made the terminal or pipe non-blocking
                select.select([], [self._descriptor], [])
            except OSError as error:
                if self._report_to is not None:
                    text = f"megarl: {self._name} cannot be written ({error.strerror}): the run goes on without it\n"
                    with contextlib.suppress(OSError):
                        os.write(self._report_to, text.encode())
                    self._report_to = None
                break
        return len(content)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


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
