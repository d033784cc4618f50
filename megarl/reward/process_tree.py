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


def is_over(processes: Sequence[int], memory_bytes: int) -> bool:
    """Whether processes hold more together, without the pages of files. Pages that they share are counted once, which takes
    long and is done only where it matters."""
    for path, keys in (
        ("status", ("RssAnon", "RssShmem", "VmSwap")),
        ("smaps_rollup", ("Pss_Anon", "Pss_Shmem", "SwapPss")),
    ):
        held = 0
        for process in processes:
            with suppress(OSError):  # it has ended
                found = sizes(f"/proc/{process}/{path}")
                held += sum(found.get(key, 0) for key in keys)
        if held <= memory_bytes:
            return False
    return True


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
