"""All processes below one: what they hold, and their end."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megarl.reward.sandbox_keeper import sizes

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
LIBC = ctypes.CDLL(None, use_errno=True)
STOP_TIMEOUT_S = 5.0
# What the policy's words can do to a process that judges or answers them. It is scored, by 0.
SCORED = ("wall_time", "memory", "processes", "crash", "error")


def below(process: int, deep: bool = True) -> list[int]:
    """All processes that a process has started and not waited for, and with `deep` those that they have."""
    found: list[int] = []
    waiting = [process]
    while waiting:
        one = waiting.pop()
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            with suppress(OSError):  # it has ended
                (waiting if deep else found).extend(map(int, children.read_text(encoding="utf-8").split()))
        if one != process:
            found.append(one)
    return found


def is_over(processes: Sequence[int], memory_bytes: int, parent: int | None = None) -> bool:
    """Whether processes hold more together, without the pages of files, and without those that they have from a `parent` by
    fork and that nobody has written since. Pages that they share are counted once, which takes long and is done only where
    it matters."""
    anonymous = ("RssAnon", "RssShmem", "VmSwap")
    if sum(found.get(key, 0) for found in _sizes(processes, "status") for key in anonymous) <= memory_bytes:
        return False
    # A page that several processes map counts for each by its part. Every process has the same part of a page of the
    # parent as the parent has. The parent is read twice, as one that shares its pages may begin or end meanwhile.
    parents = [parent] if parent is not None else []
    before, found, behind = (_sizes(one, "smaps_rollup") for one in (parents, processes, parents))
    inherited = max(map(_shared, before + behind), default=0)
    held = sum(one.get("Pss_Anon", 0) + one.get("Pss_Shmem", 0) + one.get("SwapPss", 0) for one in found)
    return held - sum(min(_shared(one), inherited) for one in found) > memory_bytes


def _sizes(processes: Sequence[int], name: str) -> list[dict[str, int]]:
    """What a file of /proc says of processes, in bytes; of those that are left."""
    found = []
    for process in processes:
        with suppress(OSError):
            found.append(sizes(f"/proc/{process}/{name}"))
    return found


def _shared(rollup: dict[str, int]) -> int:
    """The part that a process has of pages, without those of files, that others map too."""
    return max(0, rollup.get("Pss_Anon", 0) + rollup.get("Pss_Shmem", 0) - rollup.get("Private_Dirty", 0))


def end_all(process: int, itself: bool = False) -> None:
    """End all processes below one, which may go on to start others meanwhile, and with `itself` that one; waits for none."""
    own = {process} if itself else set()
    for last in (signal.SIGSTOP, signal.SIGKILL):
        deadline, stopped = time.monotonic() + STOP_TIMEOUT_S, set[int]()
        while time.monotonic() < deadline and (new := (own | set(below(process))) - stopped):
            for one in new:
                with suppress(ProcessLookupError):
                    os.kill(one, last)
            stopped |= new
