"""Read the stacks of a run's processes, and tell which calls wait.

Python's fault handler writes the stacks in C at a signal. So a process that is blocked in C also writes its stacks, with or
without the GIL.
"""

from __future__ import annotations

import faulthandler
import glob
import linecache
import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "MEGARL_WATCHED"
"""Environment variable of a process that the watchdog must find: the run's token, a slash, and a name."""
NAME = "megarl-stacks:"
# Python, torch, vLLM and Ray do not use this signal.
ASK = signal.SIGUSR2
SETTLE_S = 0.1
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
# A call waits for another thread or process if its file has such an ending, or its line has such a word.
WAITING_FILES = (
    "torch/distributed/distributed_c10d.py", "/threading.py", "/queue.py", "/selectors.py", "/subprocess.py", "/socket.py",
    "multiprocessing/connection.py", "ray/_private/worker.py", "concurrent/futures/thread.py", "/asyncio/runners.py",
    "zmq/sugar/poll.py",
)  # fmt: skip
WAITING_WORDS = (".wait(", ".poll(", ".recv(", ".get(", ".join(", "run_task_loop", "barrier(", ".synchronize(", ".acquire(")

_file: int | None = None  # of this process
_sees_forks = False


@dataclass(frozen=True)
class Frame:
    """A call in a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"

    @property
    def waits(self) -> bool:
        """Whether this call waits for another thread or process."""
        line = linecache.getline(self.file, self.line)
        return self.file.endswith(WAITING_FILES) or any(word in line for word in WAITING_WORDS)


def watched_environment(name: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables that give a new process of this run, and its children, a name; empty if no watchdog runs."""
    token, _, _ = environment.get(MARK, "").partition("/")
    return {MARK: f"{token}/{name}"} if token else {}


def mark_from_environment(part: str = "") -> None:
    """Let the watchdog find this process if the process has a name; `part` tells processes of one name apart."""
    if MARK in os.environ and _file is None:
        mark(" ".join([os.environ[MARK], part]).strip())


def mark(name: str) -> None:
    """Let this process write its stacks at signal ASK, to a file in memory with this name."""
    global _file, _sees_forks
    _file = os.memfd_create(NAME + name)
    faulthandler.register(ASK, file=_file, all_threads=True)
    if not _sees_forks:
        _sees_forks = True

        def mark_fork() -> None:  # vLLM forks: each child needs its own file
            if _file is not None:
                unmark()
                mark_from_environment()

        os.register_at_fork(after_in_child=mark_fork)


def unmark() -> None:
    """Undo `mark`."""
    global _file
    assert _file is not None
    faulthandler.unregister(ASK)
    os.close(_file)
    _file = None


def marked_processes(token: str) -> dict[int, tuple[str, int]]:
    """Return name and file number of each process of this machine with the run's token, by process id."""
    marked = {}
    prefix = f"/memfd:{NAME}{token}/"
    for path in glob.iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended, or is another user's
            link = os.readlink(path)
            if link.startswith(prefix):
                _, _, pid, _, file = path.split("/")
                marked[int(pid)] = link.removeprefix(prefix).removesuffix(" (deleted)"), int(file)
    return marked


def read_stacks(processes: Mapping[int, int], deadline_s: float) -> dict[int, str]:
    """Signal all processes (id to file number) for their stacks; return the texts that they write in time."""
    files = {}
    for pid, number in processes.items():
        with suppress(OSError):  # the process has ended
            lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
            words = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("State:", "SigCgt:"))}
            # A stopped process does not answer, and the signal would kill a process without the handler.
            if words["State"] not in ("T", "t") and int(words["SigCgt"], 16) >> (ASK - 1) & 1:
                files[pid] = open(f"/proc/{pid}/fd/{number}", "rb")  # noqa: SIM115
                files[pid].seek(0, os.SEEK_END)
                os.kill(pid, ASK)
    end = time.monotonic() + deadline_s
    sizes: dict[int, int] = {}
    while time.monotonic() < end:
        before, sizes = sizes, {pid: os.fstat(file.fileno()).st_size for pid, file in files.items()}
        if sizes == before and all(sizes[pid] > file.tell() for pid, file in files.items()):
            break
        time.sleep(SETTLE_S)
    texts = {pid: file.read().decode(errors="replace") for pid, file in files.items()}
    for file in files.values():
        file.close()
    return {pid: text for pid, text in texts.items() if text}


def threads(text: str) -> list[list[Frame]]:
    """Return the calls of each thread in a text, innermost first; the main thread comes last (Python 3.11)."""
    calls: list[list[Frame]] = []
    for line in text.splitlines():
        if "(most recent call first)" in line:
            calls.append([])
        elif calls and (match := FRAME.match(line)):
            calls[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
    return calls


def busy_call(text: str) -> Frame | None:
    """Return the innermost call of a thread that does not wait, the main thread's first."""
    innermost = [calls[0] for calls in reversed(threads(text)) if calls]
    return next((call for call in innermost if not call.waits), None)
