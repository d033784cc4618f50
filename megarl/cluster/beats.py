"""The page in which a process says where it stands. Memory without a file: its reader finds it under /proc and keeps what
the process wrote last, also when that has been killed; nothing of it is ever left behind."""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from functools import cache

NAME = "megarl-beats"
# The count stands at both ends: a reader that finds two different ones has met a write half done.
PAGE = struct.Struct("<QdQQQBB62s64sQ")
NOTE = struct.Struct("<H2048s")
NOTE_AT, PAGE_BYTES = 512, 4096
READS = 50


@dataclass(frozen=True)
class Beat:
    """Where a process stands. `since` is its last beat on CLOCK_MONOTONIC, which all processes of a machine share; `phases`
    counts the phases that it has begun, `beats` those since the phase began; `first`: its first step is not done."""

    since: float
    step: int
    phases: int
    beats: int
    first: bool
    ended: bool
    phase: str | None
    span: str | None
    note: str


class Beats:
    """Writes a process's page."""

    def __init__(self) -> None:
        self.file = os.memfd_create(NAME)
        os.ftruncate(self.file, PAGE_BYTES)
        self._page = mmap.mmap(self.file, PAGE_BYTES)
        self._count = self._phases = self._beats = self._step = 0
        self._first, self._ended = True, False
        self._phase: str | None = None
        self.beat(None, None)

    def begin(self, step: int, first: bool) -> None:
        """A step begins; `first` of this start of the run."""
        self._step, self._first = step, first
        self.beat(None, None)

    def beat(self, phase: str | None, span: str | None) -> None:
        """Stand in a phase and, inside of it, in a span; None between phases, or in no span."""
        if phase is not None and self._phase is None:
            self._phases, self._beats = self._phases + 1, 0
        self._phase = phase
        self._count += 1
        self._beats += 1
        PAGE.pack_into(
            self._page, 0, self._count, time.monotonic(), self._step, self._phases, self._beats, self._first, self._ended,
            _bytes(phase), _bytes(span), self._count,
        )  # fmt: skip

    def note(self, text: str) -> None:
        """Say that a deadline of this process's own has passed, with what the watcher is to print."""
        said = text.encode()[:2048]
        NOTE.pack_into(self._page, NOTE_AT, len(said), said)

    def end(self) -> None:
        """The process needs no watching any more."""
        self._ended = True
        self.beat(None, None)

    def close(self) -> None:
        """Give the page up; a reader that has it keeps it."""
        self._page.close()
        os.close(self.file)


class BeatsReader:
    """Reads the page of another process of this machine; raises OSError where there is none."""

    def __init__(self, pid: int, file: int) -> None:
        number = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
        try:
            self._page = mmap.mmap(number, PAGE_BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(number)

    def read(self) -> Beat:
        """Where it stands; of a process that was killed within a write, as far as that came."""
        for _ in range(READS):
            first, since, step, phases, beats, is_first, ended, phase, span, last = PAGE.unpack_from(self._page, 0)
            if first == last:
                break
        size, note = NOTE.unpack_from(self._page, NOTE_AT)
        said = note[:size].decode(errors="replace")
        return Beat(since, step, phases, beats, bool(is_first), bool(ended), _text(phase), _text(span), said)


@cache
def _bytes(name: str | None) -> bytes:
    return b"" if name is None else name.encode()[:62]


def _text(name: bytes) -> str | None:
    return name.rstrip(b"\0").decode(errors="replace") or None
