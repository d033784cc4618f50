"""The process that watches the ranks of a node. When a run hangs, it writes all stacks, names the culprit, and ends the run.

The first rank of a node starts the watcher as `python -m megarl.cluster.watchdog`, with the settings on standard input. On
Ray nodes without trainer ranks the watcher is an actor, because engines and reward workers there have stacks too.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from megarl.cluster.processes import end_at_once
from megarl.cluster.watchdog_judge import ENDED, GONE, RUNNING, STOPPED, HangVerdict, OtherProcess, Standing, judge, overdue
from megarl.cluster.watchdog_network import OtherWatchers, WatchedRank, WatcherSettings
from megarl.telemetry import exit_status
from megarl.telemetry.disk import endure_output
from megarl.telemetry.exit_status import FAILED, HUNG
from megarl.telemetry.stacks import busy_call, marked_processes, read_stacks, threads

POLL_S = 0.5
# After a pause this long the whole job, including this process, was stopped; earlier silence means nothing.
PAUSE_S = 5.0
# How long ranks may take to write their flight recorder and end, before they are killed.
END_S = 4.0
# How long writing the stacks may take.
FILES_S = 20.0
# How long the processes of a killed rank may take to end on their own.
LEFT_S = 10.0


class _Rank:
    """A rank of this node."""

    def __init__(self, handle: WatchedRank) -> None:
        self.process = psutil.Process(handle.pid)
        self.is_reported = False
        self._page = os.open(f"/proc/{handle.pid}/fd/{handle.page}", os.O_RDONLY)
        self._pipe = os.open(f"/proc/{handle.pid}/fd/{handle.pipe}", os.O_WRONLY | os.O_NONBLOCK)

    def standing(self, awake_since: float) -> Standing:
        """Return the rank's standing; silence counts from `awake_since` at the earliest."""
        text, before = os.pread(self._page, 1 << 16, 0), b""
        while text != before:  # a read during a write may be torn
            text, before = os.pread(self._page, 1 << 16, 0), text
        page = json.loads(text.partition(b"\n")[0])
        silent_s = time.monotonic() - max(page.pop("since"), awake_since)
        state = ENDED if page.pop("ended") else state_of(self.process)
        return Standing(**page, silent_s=silent_s, state=state)

    def order_end(self, status: int, folder: Path | None) -> None:
        """Tell the rank to end with an exit status, after it has written its flight recorder to the folder of a hang."""
        with contextlib.suppress(OSError):  # the rank has ended
            os.write(self._pipe, os.fsencode(f"{status} {folder or ''}\n"))


@dataclass(frozen=True)
class Dump:
    """The stacks of a node: standings of ranks, other processes, and texts by file name."""

    table: list[Standing]
    processes: list[OtherProcess]
    texts: dict[str, str]


class Watcher:
    """Watches the ranks of a node."""

    def __init__(self, settings: WatcherSettings) -> None:
        self._settings = settings
        self._ranks = [_Rank(handle) for handle in settings.ranks]
        self._network = OtherWatchers(settings)
        self._awake_since = self._looked_at = time.monotonic()
        self._silent: set[str] = set()

    def watch(self) -> None:
        """Watch until all ranks of this node have ended: on their own, in a hang, or because a machine is lost. On a node
        without ranks, watch until node 0's watcher ends."""
        network, deadlines = self._network, self._settings.deadlines
        while True:
            time.sleep(POLL_S)
            network.receive()
            table = self._look()
            if self._ranks and all(standing.state in (ENDED, GONE) for standing in table):
                break
            if not self._ranks and network.is_alone:
                return
            if network.lost is not None and self._ranks:
                _say(f"error on {self._where(table)}: {network.lost}")
                return self._end_processes(FAILED)
            silent = set(network.silent())
            for machine in silent - self._silent:
                _say(f"on {self._where(table)}: no answer from the machine of {machine}")
            self._silent = silent
            if network.judges:
                # The ranks of a silent machine only seem to hang, until the machine is given up.
                if not silent and overdue(table + network.tables(), deadlines, network.some_unknown):
                    return self._end_hang()
            elif network.wait_for("dump", 0.0):
                return self._follow()
            else:
                network.send("table", table)
        if any(standing.state == GONE for standing in table):
            # vLLM's processes outlive a killed engine.
            _wait(lambda: not self._marked_processes(), LEFT_S)
            end_at_once(self._marked_processes())

    def _look(self) -> list[Standing]:
        """Return the standings of this node's ranks, and report ranks that are gone."""
        now = time.monotonic()
        if now - self._looked_at > PAUSE_S:
            self._awake_since = now
        self._looked_at = now
        table = [rank.standing(self._awake_since) for rank in self._ranks]
        for rank, standing in zip(self._ranks, table, strict=True):
            if standing.state == GONE and not rank.is_reported:
                rank.is_reported = True
                _say(standing.accusation)
        return table

    def _where(self, table: list[Standing]) -> str:
        """Name this node by its first rank and that rank's phase."""
        if not table:
            return f"node {self._settings.node}"
        return f"rank {table[0].rank}, " + ("between two phases" if table[0].phase is None else f"in phase {table[0].phase}")

    def _end_hang(self) -> None:
        """Collect all stacks, decide, and end the run, on the judging node."""
        self._network.send("dump")
        dump = self._dump()
        table, processes = self._network.stacks(self._settings.deadlines.stacks_s)
        table = sorted(dump.table + table, key=lambda standing: standing.rank)
        verdict = judge(Path(self._settings.run), table, self._settings.deadlines, dump.processes + processes)
        self._network.send("end", verdict)
        self._finish(dump, verdict, speaks=True)

    def _follow(self) -> None:
        """Send the stacks to node 0 and wait for its verdict, on another node."""
        dump = self._dump()
        self._network.send("stacks", (dump.table, dump.processes))
        verdicts = self._network.wait_for("end", self._settings.deadlines.stacks_s + LEFT_S)
        if verdicts:
            self._finish(dump, verdicts[0], speaks=False)
        elif self._ranks:  # node 0 is gone
            verdict = judge(Path(self._settings.run), dump.table, self._settings.deadlines, dump.processes)
            self._finish(dump, verdict, speaks=True)

    def _dump(self) -> Dump:
        """Collect the stacks of all processes of this run on this node."""
        marked = marked_processes(self._settings.token)
        stacks = read_stacks({pid: file for pid, (_, file) in marked.items()}, self._settings.deadlines.stacks_s)
        dump = Dump([], [], {})
        for rank in self._ranks:
            standing, text = rank.standing(self._awake_since), stacks.get(rank.process.pid, "")
            calls = threads(text)
            if calls and calls[-1]:
                standing = replace(standing, call=str(calls[-1][0]), waits=calls[-1][0].waits)
            dump.table.append(standing)
            title = f"{standing.name}: {standing.where}"
            dump.texts[f"rank-{standing.rank:05d}.txt"] = _page(title, rank.process.pid, standing.state, text)
            marked.pop(rank.process.pid, None)
        for pid, (name, _) in sorted(marked.items()):
            state, text = state_of(pid), stacks.get(pid, "")
            busy = busy_call(text)
            dump.processes.append(OtherProcess(name, pid, state, None if busy is None else str(busy)))
            dump.texts[f"{name.replace(' ', '-')}-{pid}.txt"] = _page(name, pid, state, text)
        return dump

    def _finish(self, dump: Dump, verdict: HangVerdict, speaks: bool) -> None:
        """Write the stacks and end the run's processes on this node. The node that `speaks` prints the verdict."""
        texts = dict(dump.texts)
        if speaks:
            texts["verdict.txt"] = "\n".join(verdict.lines) + "\n"
            for line in verdict.lines:
                _say(line)
            _say(f"the stacks of all processes go to {verdict.folder}; the ranks end with exit status {HUNG}")
        # Write in a thread, because a hanging disk must not keep the run alive.
        writing = threading.Thread(target=self._write, args=(verdict, texts), daemon=True)
        writing.start()
        writing.join(FILES_S)
        self._end_processes(HUNG, verdict.folder)

    def _write(self, verdict: HangVerdict, texts: dict[str, str]) -> None:
        exit_status.record_end(Path(self._settings.run), HUNG, verdict.lines[0], verdict.rank)
        try:
            verdict.folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (verdict.folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            _say(f"{verdict.folder} is not whole: {error}")

    def _end_processes(self, status: int, folder: Path | None = None) -> None:
        """End the ranks of this node with an exit status, by force if necessary, and then all their processes. `folder` is
        that of a hang."""
        family = self._marked_processes()
        for rank in self._ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                family += rank.process.children(recursive=True)
        for rank in self._ranks:  # at once: a rank that loses a peer first would report a failed peer
            rank.order_end(status, folder)
        _wait(lambda: all(state_of(rank.process) != RUNNING for rank in self._ranks))
        end_at_once({process for process in family if process.pid != os.getpid()} | {rank.process for rank in self._ranks})

    def _marked_processes(self) -> list[psutil.Process]:
        """Return the marked processes of this machine except ranks, which may belong to another node of the job."""
        processes = []
        for pid, (name, _) in marked_processes(self._settings.token).items():
            if not name.startswith("rank-"):
                with contextlib.suppress(psutil.NoSuchProcess):
                    processes.append(psutil.Process(pid))
        return processes


class NodeWatcher:
    """A Ray actor that is the watcher of a node without ranks."""

    def watch(self, settings: WatcherSettings) -> None:
        """Watch until the run is over or hangs, and end this actor."""
        import ray  # here, because ray is large and the watchers of ranks do not need it

        try:
            Watcher(settings).watch()
        finally:
            ray.actor.exit_actor()


def _wait(condition: Callable[[], bool], timeout_s: float = END_S) -> None:
    """Wait until the condition holds, or for `timeout_s`."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and not condition():
        time.sleep(POLL_S / 10)


def state_of(process: psutil.Process | int) -> str:
    """Return the state of a process, or of the process with an id."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        status = process.status() if process.is_running() else psutil.STATUS_DEAD
    except psutil.NoSuchProcess:
        return GONE
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return STOPPED
    return GONE if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else RUNNING


def _page(title: str, pid: int, state: str, text: str) -> str:
    """Return the text of a process's file, with the kernel function in which it waits."""
    try:
        function = Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8") or "none"
    except OSError:
        function = "unknown"
    reasons = {STOPPED: "it is stopped (SIGSTOP), and can write no stack", GONE: "its process is gone"}
    body = text or reasons.get(state, "it has written no stack in time") + "\n"
    return f"{title}\nprocess {pid}, {state}, kernel function {function}\n\n{body}"


def _say(line: str) -> None:
    sys.stderr.write(f"watchdog: {line}\n")  # in one piece: other ranks write to the same terminal
    sys.stderr.flush()


def main() -> None:
    endure_output()
    # A signal that ends the ranks must not end the watcher first.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    try:
        watcher = Watcher(pickle.load(sys.stdin.buffer))
    except (OSError, psutil.NoSuchProcess) as error:  # usually the ranks ended before this process started
        _say(f"cannot look at the ranks of this node ({error}): nobody watches them")
    else:
        watcher.watch()


if __name__ == "__main__":
    main()
