"""The process that watches the ranks of a node, dumps the stacks of all of a run that hangs, and ends it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from megarl.cluster.beats import BeatsReader
from megarl.cluster.processes import end_at_once
from megarl.cluster.watchdog_judge import (
    ENDED,
    GONE,
    RUNNING,
    STOPPED,
    OtherProcess,
    Standing,
    Verdict,
    folder_of,
    judge,
    missed,
    overdue,
    where,
)
from megarl.cluster.watchdog_settings import ENDING, OVER, RECORDER, TOLD, WatchedRank, WatcherSettings
from megarl.cluster.watcher_wire import OtherWatchers
from megarl.telemetry import starts
from megarl.telemetry.exit_status import HUNG
from megarl.telemetry.stacks import busy_call, marked_processes, read_stacks, threads

POLL_S = 0.5
# This process was not running either, as the whole job was stopped: then silence says nothing.
PAUSE_S = 5.0
# How long ranks may take to write what they know, and then to end, before they are killed.
END_S = 2.0
# How long a disk may take for the stacks.
FILES_S = 20.0
# Bytes; a pipe takes them without a reader.
LAST_WORDS = 4000
# How long what a killed rank leaves may take to end by itself.
LEFT_S = 10.0


class _Rank:
    """A rank of this node."""

    def __init__(self, known: WatchedRank) -> None:
        self.known = known
        self._reader = BeatsReader(known.pid, known.beats)
        self._ear = os.open(f"/proc/{known.pid}/fd/{known.ear}", os.O_WRONLY | os.O_NONBLOCK)
        self.process = psutil.Process(known.pid)
        self.is_missed = False

    @property
    def state(self) -> str:
        return state_of(self.process)

    def standing(self, awake_since: float) -> Standing:
        """Where it stands; silent since `awake_since` at most."""
        beat = self._reader.read()
        return Standing(
            rank=self.known.rank, place=self.known.place, step=beat.step, first=beat.first, phase=beat.phase, span=beat.span,
            phases=beat.phases, beats=beat.beats, silent_s=time.monotonic() - max(beat.since, awake_since),
            state=ENDED if beat.ended else self.state, note=beat.note,
        )  # fmt: skip

    def tell(self, word: bytes) -> None:
        """Raises nothing where it does not listen any more."""
        with contextlib.suppress(OSError):
            os.write(self._ear, word)


@dataclass(frozen=True)
class Dump:
    """What the processes of a node say when they are asked: texts by file name, and where they stand."""

    texts: dict[str, str]
    table: list[Standing]
    others: list[OtherProcess]


class Watcher:
    """Watches until the ranks of this node have ended, or hang. On a node without ranks, which never judges, until node 0's
    have."""

    def __init__(self, settings: WatcherSettings) -> None:
        self._settings, self._run = settings, Path(settings.run)
        self._ranks = [_Rank(one) for one in settings.ranks]
        self._wire = OtherWatchers(settings)
        self._awake_since = self._looked = time.monotonic()
        self._some_ended = False

    def say_last(self, error: BaseException) -> None:
        """Leave word of what ends this process, to the rank that has started it."""
        if self._settings.words is not None:
            with contextlib.suppress(OSError):
                os.write(self._settings.words, "".join(traceback.format_exception(error)).encode()[-LAST_WORDS:])

    def watch(self) -> None:
        """To the end of this node's ranks."""
        while True:
            time.sleep(POLL_S)
            table = self._look()
            if self._is_over(table):
                break
            self._wire.tell(table)
            if self._wire.orders():
                return self._follow()
            if self._wire.judges and overdue(table + self._wire.tables(), self._settings.deadlines, self._wire.is_alone):
                return self._decide()
        if any(one.state == GONE for one in table):
            self._tidy()

    def _is_over(self, table: list[Standing]) -> bool:
        """Whether the ranks of this node have ended; where it has none, those of node 0."""
        return all(one.state in (ENDED, GONE) for one in table) if self._ranks else self._wire.judges

    def _look(self) -> list[Standing]:
        now = time.monotonic()
        if now - self._looked > PAUSE_S:
            self._awake_since = now
        self._looked = now
        table = [rank.standing(self._awake_since) for rank in self._ranks]
        for rank, one in zip(self._ranks, table, strict=True):
            if one.state == GONE and not rank.is_missed:
                rank.is_missed = True
                _say(missed(one))
        if not self._some_ended and any(one.state in (ENDED, GONE) for one in table):
            self._some_ended = True
            for rank in self._ranks:
                rank.tell(ENDING)
        return table

    def _decide(self) -> None:
        """On the node that judges: stacks of all nodes, the verdict, and the end."""
        self._wire.order({"do": "dump"})
        own = self._dump()
        table, others = self._wire.dumped(self._settings.stacks_s)
        verdict = judge(sorted(own.table + table, key=lambda one: one.rank), self._settings.deadlines, own.others + others)
        folder = folder_of(self._run, verdict)
        order = {"do": "end", "folder": str(folder), "verdict": asdict(verdict)}
        self._wire.order(order)
        self._finish(own, folder, verdict, says=True)

    def _follow(self) -> None:
        """On another node: node 0 has asked for a dump, and says then where it goes."""
        own = self._dump()
        self._wire.say_dumped(own.table, own.others)
        orders = self._wire.wait_for_orders(self._settings.stacks_s + LEFT_S)
        if orders:
            verdict, folder = Verdict(**orders[-1]["verdict"]), Path(orders[-1]["folder"])
        elif not self._ranks:
            return
        else:  # node 0 has gone in the middle of it
            verdict = judge(own.table, self._settings.deadlines, own.others)
            folder = folder_of(self._run, verdict)
        self._finish(own, folder, verdict, says=not orders)

    def _dump(self) -> Dump:
        """Ask all processes of this run on this node where they are."""
        found = marked_processes(self._settings.token)
        files = {pid: number for pid, (_, number) in found.items()}
        texts = read_stacks(files, self._settings.stacks_s)
        written: dict[str, str] = {}
        table: list[Standing] = []
        for rank in self._ranks:
            one = rank.standing(self._awake_since)
            text = texts.get(rank.known.pid, "")
            calls = threads(text)
            if calls and calls[-1]:
                one = replace(one, call=str(calls[-1][0]), waits=calls[-1][0].waits)
            table.append(one)
            written[f"rank-{one.rank:05d}.txt"] = _page(where(one), rank.known.pid, one.state, text)
        others: list[OtherProcess] = []
        for pid, (name, _) in sorted(found.items()):
            if pid in {rank.known.pid for rank in self._ranks}:
                continue
            text = texts.get(pid, "")
            state, busy = _state_of_number(pid), busy_call(text)
            others.append(OtherProcess(name, pid, state, None if busy is None else str(busy)))
            written[f"{name.replace(' ', '-')}-{pid}.txt"] = _page(name, pid, state, text)
        return Dump(written, table, others)

    def _finish(self, dump: Dump, folder: Path, verdict: Verdict, says: bool) -> None:
        """Write, say, and end all processes of the run on this node."""
        if says:
            for line in verdict.lines:
                _say(line)
            _say(f"the stacks of all processes go to {folder}; the ranks end with exit status {HUNG}")
        # A full disk, or one that does not answer, must not keep a run that hangs.
        writing = threading.Thread(target=self._write, args=(dump, folder, verdict, says), daemon=True)
        writing.start()
        writing.join(FILES_S)
        family = self._family()
        running = [rank for rank in self._ranks if rank.state == RUNNING]
        for rank in running:
            rank.tell(TOLD + os.fsencode(folder) + b"\n")
        records = [folder / f"{RECORDER}{rank.known.rank}.json" for rank in running]
        _wait(lambda: all(record.exists() for record in records))
        for rank in running:
            rank.tell(OVER)
        _wait(lambda: all(rank.state != RUNNING for rank in running))
        end_at_once([*(rank.process for rank in self._ranks), *family])

    def _write(self, dump: Dump, folder: Path, verdict: Verdict, says: bool) -> None:
        starts.record_end(self._run, starts.HUNG, verdict.lines[0], verdict.rank)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in dump.texts.items():
                (folder / name).write_text(text, encoding="utf-8")
            if says:
                (folder / "verdict.txt").write_text("\n".join(verdict.lines) + "\n", encoding="utf-8")
        except OSError as error:
            _say(f"{folder} is not whole: {error}")

    def _family(self) -> list[psutil.Process]:
        """What the ranks of this node have started, and what is marked as this run's."""
        children: dict[int, list[psutil.Process]] = {}
        for process in psutil.process_iter(["ppid"]):  # once: a machine may have thousands
            children.setdefault(process.info["ppid"], []).append(process)
        found: dict[int, psutil.Process] = {}
        left = [rank.known.pid for rank in self._ranks]
        while left:
            for child in children.get(left.pop(), []):
                found[child.pid] = child
                left.append(child.pid)
        for pid in marked_processes(self._settings.token):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.setdefault(pid, psutil.Process(pid))
        found.pop(os.getpid(), None)
        return list(found.values())

    def _tidy(self) -> None:
        """End what a rank has left that was killed: vLLM's processes outlive the engine that they belong to."""
        end = time.monotonic() + LEFT_S
        while (left := marked_processes(self._settings.token)) and time.monotonic() < end:
            time.sleep(POLL_S)
        found = []
        for pid in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        end_at_once(found)


def _wait(condition: Callable[[], bool]) -> None:
    """Until it holds, or for END_S."""
    end = time.monotonic() + END_S
    while time.monotonic() < end and not condition():
        time.sleep(POLL_S / 10)


def state_of(process: psutil.Process) -> str:
    """Of a process that was there once."""
    try:
        if not process.is_running():
            return GONE
        status = process.status()
    except psutil.NoSuchProcess:
        return GONE
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return STOPPED
    return GONE if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else RUNNING


def _state_of_number(pid: int) -> str:
    try:
        return state_of(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return GONE


def _page(title: str, pid: int, state: str, text: str) -> str:
    why = {STOPPED: "it is stopped (SIGSTOP), and can write no stack", GONE: "its process is gone"}
    body = text or why.get(state, "it has written no stack in time") + "\n"
    return f"{title}\nprocess {pid}, {state}, kernel function {_kernel_function(pid)}\n\n{body}"


def _kernel_function(pid: int) -> str:
    """What the process waits for in the kernel."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8") or "none"
    except OSError:
        return "unknown"


def _say(line: str) -> None:
    print(f"watchdog: {line}", file=sys.stderr, flush=True)
