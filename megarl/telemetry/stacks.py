"""Stacks of a run's processes: written by Python's fault handler in C when a signal asks for them, so that a process blocked
in C, with Python's lock or without, writes them too; and what they say about who waits."""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MARK = "MEGARL_WATCHED"
"""Environment variable of a process that is to be found: its run's token and its name, with a slash between."""
NAME = "megarl-stacks:"
# Python itself, torch, vLLM and Ray leave it alone.
ASK = signal.SIGUSR2
SETTLE_S = 0.1
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
# Functions that do nothing but wait, by the end of their file's path.
WAITS = (
    "torch/distributed/distributed_c10d.py", "/threading.py", "/queue.py", "/selectors.py", "/subprocess.py", "/socket.py",
    "multiprocessing/connection.py", "ray/_private/worker.py", "concurrent/futures/thread.py", "/asyncio/runners.py",
    "zmq/sugar/poll.py",
)  # fmt: skip
WAIT_WORDS = (".wait(", ".poll(", ".recv(", ".get(", ".join(", "run_task_loop", "barrier(", ".synchronize(", ".acquire(")

_file: int | None = None  # of this process
_sees_forks = False


@dataclass(frozen=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"

    @property
    def waits(self) -> bool:
        """Whether a thread that stands here waits for somebody else."""
        return self.file.endswith(WAITS) or any(word in linecache.getline(self.file, self.line) for word in WAIT_WORDS)


def watched_environment(name: str, own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which a process of this run finds its name; empty where nobody watches. Its children inherit it."""
    token, _, _ = own.get(MARK, "").partition("/")
    return {MARK: f"{token}/{name}"} if token else {}


def mark_from_environment(part: str = "") -> None:
    """Let the watcher find this process, if it has a name; `part`: what it is of what has the name."""
    if MARK in os.environ and _file is None:
        mark(" ".join([os.environ[MARK], part]).strip())


def mark(name: str) -> None:
    """Have this process write its stacks when it is asked, to a file that has a `name` alone."""
    global _file, _sees_forks
    _file = os.memfd_create(NAME + name)
    faulthandler.register(ASK, file=_file, all_threads=True)
    if not _sees_forks:
        _sees_forks = True
        os.register_at_fork(after_in_child=_mark_fork)


def _mark_fork() -> None:
    """A process that was forked, as vLLM's are, writes to a file of its own."""
    if _file is not None:
        unmark()
        mark_from_environment()


def unmark() -> None:
    """Undo `mark`."""
    global _file
    assert _file is not None
    faulthandler.unregister(ASK)
    os.close(_file)
    _file = None


def marked_processes(token: str) -> dict[int, tuple[str, int]]:
    """Processes of this machine with the run's token: name and file by process id."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            for number, link in _links(entry.name):
                name = link.removeprefix(f"/memfd:{NAME}{token}/")
                if name != link:
                    found[int(entry.name)] = name.removesuffix(" (deleted)"), number
    return found


def _links(pid: str) -> list[tuple[int, str]]:
    folder, links = f"/proc/{pid}/fd", []
    try:
        for number in sorted(os.listdir(folder), key=int):
            links.append((int(number), os.readlink(f"{folder}/{number}")))
    except OSError:  # it has ended, or is another user's
        pass
    return links


def read_stacks(processes: Mapping[int, int], deadline_s: float) -> dict[int, str]:
    """Ask processes (by id, each with its file) for their stacks, all at once; the texts of those that wrote any in time."""
    files: dict[int, int] = {}
    before: dict[int, int] = {}
    for pid, number in processes.items():
        try:
            if not _answers(pid):
                continue
            files[pid] = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY)
            before[pid] = os.fstat(files[pid]).st_size
            os.kill(pid, ASK)
        except OSError:  # it has ended
            continue
    end = time.monotonic() + deadline_s
    sizes: dict[int, int] = {}
    while time.monotonic() < end:
        last, sizes = sizes, {pid: os.fstat(file).st_size for pid, file in files.items()}
        if last == sizes and all(sizes[pid] > before[pid] for pid in files):
            break
        time.sleep(SETTLE_S)
    texts = {}
    for pid, file in files.items():
        if pid in before and (text := os.pread(file, 1 << 20, before[pid]).decode(errors="replace")):
            texts[pid] = text
        os.close(file)
    return texts


def _answers(pid: int) -> bool:
    """Whether the process would answer the signal: it does not end it, and it is not stopped."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    words = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("State:", "SigCgt:"))}
    return words["State"] not in ("T", "t") and bool(int(words["SigCgt"], 16) >> (ASK - 1) & 1)


def threads(text: str) -> list[list[Frame]]:
    """The calls of each thread in a text, innermost first; the main thread is the last one (Python 3.11)."""
    found: list[list[Frame]] = []
    for line in text.splitlines():
        if "(most recent call first)" in line:
            found.append([])
        elif found and (match := FRAME.match(line)):
            found[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
    return found


def busy_call(text: str) -> Frame | None:
    """Of a process of many threads, the innermost call of one that does not wait for anybody, the main thread's first."""
    for calls in reversed(threads(text)):
        if calls and not calls[0].waits:
            return calls[0]
    return None
