"""Trainer ranks that are made to hang: processes of a fork server, so that a case does not wait for everybody's imports."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.ports import unused_port

CASE = "MEGARL_TEST_CASE"
# Deadlines of the watchdog in these runs, and what the rest of a machine under load may add to them in a test.
STEP_S, FIRST_STEP_S, STACKS_S = 8.0, 60.0, 5.0
DETECTION_S = 10.0
END_S = 120.0
SLEEP, STOP, KILL = "sleep", "SIGSTOP", "SIGKILL"


@dataclass(frozen=True)
class Fault:
    """What happens to a rank when it enters a phase, or the first span of that name in it, in a step."""

    rank: int
    phase: str
    kind: str
    span: str | None = None
    nodes: int = 1
    step: int = 2

    @property
    def name(self) -> str:
        return (
            f"{self.kind}-rank{self.rank}-{self.phase}"
            + (f"-{self.span}" if self.span else "")
            + (f"-{self.nodes}nodes" if self.nodes > 1 else "")
        )


@dataclass(frozen=True)
class Outcome:
    """Exit codes by rank, what was said, seconds from the fault until all processes had ended."""

    codes: list[int | None]
    said: str
    seconds: float
    left: list[str]


def run_with_fault(recipe: Path, ranks: int, fault: Fault, folder: Path) -> Outcome:
    """A run with a fault, to the end of all of its processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.hang_preload"])
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks // fault.nodes), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(unused_port()), CASE: str(folder)}  # fmt: skip
    processes: list[Any] = [
        context.Process(target=_rank, args=(rank, str(recipe), environment, fault)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        reached = folder / "reached"
        _wait(
            lambda: reached.exists() or any(one.exitcode is not None for one in processes),
            END_S,
            f"{fault.name}: the fault's place",
        )
        begun = time.monotonic()
        if fault.kind != SLEEP and reached.exists():
            os.kill(processes[fault.rank].pid, getattr(signal, fault.kind))
        _wait(lambda: all(one.exitcode is not None for one in processes), END_S, f"{fault.name}: the end of all ranks")
        _wait(
            lambda: not case_processes(folder), DETECTION_S, f"{fault.name}: the end of all that they started", fails=False
        )
        seconds = time.monotonic() - begun
        left = [" ".join(one.cmdline()) for one in case_processes(folder)]
    finally:
        for process in [*processes, *case_processes(folder)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    for process in processes:
        process.join()
    said = "\n".join((folder / f"output-{rank}").read_text() for rank in range(ranks))
    return Outcome([process.exitcode for process in processes], said, seconds, left)


def case_processes(folder: Path) -> list[psutil.Process]:
    """Programs that a case has started and that run still."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(CASE) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _wait(condition: Callable[[], bool], deadline_s: float, what: str, fails: bool = True) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            assert not fails, f"{what} not within {deadline_s} s"
            return
        time.sleep(0.05)


def _rank(rank: int, recipe: str, environment: dict[str, str], fault: Fault) -> None:
    node, local_rank = divmod(rank, int(environment["LOCAL_WORLD_SIZE"]))
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(local_rank), GROUP_RANK=str(node))
    os.environ["GROUP_WORLD_SIZE"] = str(fault.nodes)
    folder = Path(environment[CASE])
    output = os.open(folder / f"output-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.setpgid(0, 0)
    if rank == fault.rank:
        _plant(fault, folder / "reached")
    from megarl.run import main

    status = main([recipe])
    sys.stdout.flush()
    os._exit(status)


def _plant(fault: Fault, reached: Path) -> None:
    """Have this rank come to the fault's place and stay there: asleep, or at work until the test's signal."""
    from megarl.telemetry.clock import PhaseClock

    beat, steps, before = PhaseClock._beat, 0, [""]

    def beat_and_stay(clock: PhaseClock) -> None:
        nonlocal steps, before
        beat(clock)
        names = [one.name for one in clock._open]
        steps += names == ["agree"] and not before
        before = names
        wanted = [fault.phase] if fault.span is None else [fault.phase, fault.span]
        if (names[:1] + names[-1:] if fault.span else names) == wanted and steps == fault.step:
            reached.touch()
            if fault.kind == SLEEP:
                time.sleep(1e6)
            while True:
                sum(range(1000))

    PhaseClock._beat = beat_and_stay  # type: ignore[method-assign,assignment]


def named(said: str) -> list[tuple[int, int, str]]:
    """Rank, step and phase of whom the watchdog has named as the one who did not arrive."""
    found = re.findall(r"watchdog: rank (\d+) .*did not arrive: step (\d+), in phase (\w+)", said)
    return [(int(rank), int(step), phase) for rank, step, phase in found]
