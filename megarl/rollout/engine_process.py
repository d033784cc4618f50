"""The processes of an engine: which they are, what they leave behind, and what they said last."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

ERROR_LINE = re.compile(r"\b\w*(Error|Exception)\b: ")


@dataclass(frozen=True)
class EngineProcess:
    """A started engine: host name, its processes (id and start time, the actor first), the shared memory files they made,
    and how many sequences it decodes at once."""

    host: str
    pids: tuple[tuple[int, float], ...]
    shared_files: tuple[str, ...]
    max_concurrent: int


def clear_away(process: EngineProcess) -> None:
    """Kill an engine's processes except the actor, and remove their shared memory. Runs on the engine's node."""
    for pid, created in process.pids[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child = psutil.Process(pid)
            if child.create_time() == created:  # else the number belongs to another process by now
                child.kill()
    for file in process.shared_files:
        Path(file).unlink(missing_ok=True)


def own_processes() -> tuple[tuple[tuple[int, float], ...], tuple[str, ...]]:
    """Return id and start time of this process and its children, and the shared memory files that they map: vLLM's, as an
    engine that just started has received no weights. Python's resource trackers are left out: they end by themselves after
    the others, and then remove semaphores and shared memory that a killed process could not."""
    actor = psutil.Process()
    children = [child for child in actor.children(recursive=True) if "resource_tracker" not in " ".join(child.cmdline())]
    pids = tuple((process.pid, process.create_time()) for process in (actor, *children))
    lines = [line for pid, _ in pids for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()]
    files = {line.split(maxsplit=5)[5] for line in lines if " /dev/shm/" in line}
    return pids, tuple(sorted(file for file in files if not file.endswith("(deleted)")))


def log_errors(limit: int = 8) -> str:
    """Return the last errors that this process and its children wrote; only there does vLLM say why an engine core died."""
    errors: list[str] = []
    for stream in (1, 2):
        file = Path(os.readlink(f"/proc/self/fd/{stream}"))
        if file.is_file():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            errors += [line for line in lines if ERROR_LINE.search(line)]
    return "\n".join(errors[-limit:])
