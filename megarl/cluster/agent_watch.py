"""torch's agent of one node, and the signals that it passes on to its ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megarl.cluster.agent_nodes import End, OtherNodes
from megarl.cluster.agent_verdict import Verdict, judge
from megarl.telemetry import starts
from megarl.telemetry.exit_status import BAD_INPUT, COMPLETE, FAILED, REQUEUE
from megarl.telemetry.run_directory import RunDirectory

# Not SIGTERM, which asks a rank to save first.
STOP = signal.SIGINT
# Ranks refuse bad input side by side; one that waits for another that has refused never ends by itself.
REFUSAL_S = 10.0
# Ranks whose peers on another node have failed mostly see it by themselves, and say more about it than this agent could.
STRAGGLER_S = 15.0
# It calls a rank that asks for a requeue a failure, and the ends of ranks are told here in a sentence.
logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)


@dataclass
class Leaving:
    """The signals so far. The handler only notes them; the agent passes them on between two looks at the ranks."""

    grace_s: float
    can_pass_on: bool = False
    since: float | None = None
    received: list[int] = field(default_factory=list)
    num_passed_on: int = 0

    def note(self, number: int, frame: Any) -> None:
        """The handler. Before there are ranks it ends what waits for the other nodes."""
        self.since = self.since or time.monotonic()
        self.received.append(number)
        if not self.can_pass_on:
            raise SignalException(f"{signal.Signals(number).name} before the ranks were started", signal.Signals(number))

    def overdue(self) -> bool:
        """Whether ranks that were asked to leave have had their time."""
        return self.since is not None and time.monotonic() - self.since > self.grace_s


class Agent(LocalElasticAgent):
    """torch's agent of one node, which watches its ranks as `megarl/agent/__init__.py` says."""

    def __init__(self, leaving: Leaving, run: RunDirectory | None, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._leaving, self._run = leaving, run
        self._ended_before = 0 if run is None else starts.ended_at(run.path)
        self._refused_since: float | None = None
        self._others: OtherNodes | None = None
        self._alone_since: float | None = None  # ranks of another node have failed, and are not started again
        self.verdict = Verdict(FAILED, "no rank was started")

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        spec = worker_group.spec
        several = worker_group.group_world_size is not None and worker_group.group_world_size > 1
        # With another rendezvous than that of a fixed master, torch's agents speak to each other themselves.
        if self._others is None and several and spec.rdzv_handler.get_backend() == "static":
            master, port = worker_group.master_addr, worker_group.master_port
            assert worker_group.store is not None and master is not None and port is not None
            self._others = OtherNodes.of(worker_group.store, master, port, spec.rdzv_handler.get_run_id())

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._leaving.can_pass_on = True  # from here on nothing may be raised: a rank that is started would be lost
        self._refused_since = None  # of ranks before a restart; with signals there is none
        return dict(super()._start_workers(worker_group))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """torch's look at the ranks, which ends all of them where one has failed; so it looks when that is right."""
        self._pass_on()
        ended = self._ended(worker_group)
        running = {worker.global_rank for worker in worker_group.workers} - ended.keys()
        overdue = self._leaving.overdue()
        start = worker_group.spec.max_restarts - self._remaining_restarts
        if running:
            elsewhere = self._ended_elsewhere(start)
            if elsewhere is not None:
                assert self._pcontext is not None
                self._pcontext.close(STOP, self._shutdown_timeout)
                self.verdict = Verdict(elsewhere.status, f"on another node {elsewhere.sentence}")
                self._tell(start, elsewhere.again)
                return RunResult(state=WorkerState.FAILED, failures=self._stopped())
            failed = {code for code in ended.values() if code}
            if not overdue and (not failed or self._others_follow(failed)):
                return RunResult(state=WorkerState.HEALTHY)
            assert self._pcontext is not None
            self._pcontext.close(signal.SIGKILL if overdue else STOP, self._shutdown_timeout)
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            can_resume = self._run is not None and self._run.can_go_on
            hung = None if self._run is None else starts.said_of_hang(self._run.path, self._ended_before)
            self.verdict = judge(ended, running if overdue else (), self._leaving.received, can_resume, hung)
            if self.verdict.status != FAILED or self._leaving.received:
                self._remaining_restarts = 0
            if self._run is not None and self.verdict.status in (FAILED, REQUEUE):
                how = starts.REQUEUED if self.verdict.status == REQUEUE else starts.FAILED
                starts.record_end(self._run.path, how, self.verdict.sentence, self.verdict.rank, self.verdict.signal)
        if result.state == WorkerState.SUCCEEDED:
            self.verdict = Verdict(COMPLETE, "complete")
        if result.state in (WorkerState.FAILED, WorkerState.SUCCEEDED):
            self._tell(start, result.state == WorkerState.FAILED and self._remaining_restarts > 0)
        return result

    def _ended_elsewhere(self, start: int) -> End | None:
        """What another node has said of its ranks, once those of this one are to end for it."""
        end = None if self._others is None else self._others.heard(start)
        if end is None:
            return None
        if end.again and not self._leaving.received:
            return end
        self._remaining_restarts = 0  # they would wait for ranks that do not come
        if not end.is_final or self._leaving.received:
            return None
        self._alone_since = self._alone_since or time.monotonic()
        return end if time.monotonic() - self._alone_since > STRAGGLER_S else None

    def _tell(self, start: int, again: bool) -> None:
        """Have all nodes do the same, when the ranks of this one have ended: start theirs again, or not."""
        if self._others is None:
            return
        own = End(again, self.verdict.status, self.verdict.sentence)
        if not self._others.tell(start, own).again:
            self._remaining_restarts = 0
        elif not again:  # the others are about to start again, and this node is not
            start += 1
            self._others.tell(start, own)
        if not again or not self._remaining_restarts:
            if self._worker_group.group_rank == 0 and own.is_final:
                assert self._worker_group.group_world_size is not None
                self._others.wait_until_heard(start, self._worker_group.group_world_size)
            self._others.close()

    def _pass_on(self) -> None:
        waiting = self._leaving.received[self._leaving.num_passed_on :]
        self._leaving.num_passed_on += len(waiting)
        for number in waiting:
            for process in self._processes():
                if process.poll() is None:
                    process.send_signal(number)

    def _others_follow(self, failed: set[int]) -> bool:
        """Whether the ranks that still run are about to end as others did, with these exit codes."""
        if all(code == REQUEUE or abs(code) in self._leaving.received for code in failed):
            self._leaving.since = self._leaving.since or time.monotonic()
            return True
        if BAD_INPUT not in failed:
            return False
        self._refused_since = self._refused_since or time.monotonic()
        return time.monotonic() - self._refused_since < REFUSAL_S

    def _stopped(self) -> dict[int, ProcessFailure]:
        """The ranks that this agent has stopped, as torch's launcher must have them of a node that has failed (2.13)."""
        processes = dict(enumerate(self._processes()))
        return {rank: ProcessFailure(rank, one.pid, one.poll() or 0, "") for rank, one in processes.items()}

    def _processes(self) -> list[Any]:
        handlers = cast(SubprocessContext, self._pcontext).subprocess_handlers
        return [handlers[rank].proc for rank in sorted(handlers)]

    def _ended(self, worker_group: WorkerGroup) -> dict[int, int]:
        codes = [process.poll() for process in self._processes()]
        ranks = [worker.global_rank for worker in worker_group.workers]
        return {rank: code for rank, code in zip(ranks, codes, strict=True) if code is not None}

    def close(self) -> None:
        """Listen to other nodes no more, however this node's part has ended."""
        if self._others is not None:
            self._others.close()

    def _shutdown(self, death_sig: signal.Signals = STOP, timeout: int = 30) -> None:
        super()._shutdown(death_sig, timeout)
        if self._pcontext is not None:
            self._sweep()

    def _sweep(self) -> None:
        """End what the ranks left behind; each of them led a process group of its own."""
        for process in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
