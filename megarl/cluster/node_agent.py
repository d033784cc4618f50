"""`python -m megarl.cluster.node_agent`: torchrun's command line and agent, with the exit status of its ranks.

The agent forwards preemption signals to the ranks, gives them `run.grace_s` to leave, and reports why they ended.

Ranks find their peers under the number of the start, so all nodes must count starts alike. The agent whose ranks fail first
publishes the failure in the store of node 0's agent; then all agents restart their ranks together, or all end. torch's c10d
rendezvous does not fit (2.13): it numbers nodes by address, while node 0 must be the head of Ray; each agent counts its own
restarts; and an agent waits without a deadline for a store whose machine is gone.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    from megarl.cluster.preemption import hold_signals

    hold_signals()  # the imports below take seconds
    from megarl.cluster.job_environment import adapt_environment
    from megarl.telemetry.disk import endure_output

    endure_output()
    adapt_environment(os.environ)

import contextlib
import json
import logging
import signal
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, cast

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api as launcher

from megarl.cluster.preemption import SIGNALS, handle_signals, take_held_signals
from megarl.recipe import RecipeError, load_recipe
from megarl.recipe.run_section import RunSection
from megarl.telemetry import exit_status
from megarl.telemetry.exit_status import BAD_INPUT, COMPLETE, FAILED, HUNG, REQUEUE
from megarl.telemetry.run_directory import RunDirectory

# SIGTERM would ask a rank to save first.
STOP = signal.SIGINT
# Ranks that refuse bad input end together. A rank that waits for such a rank never ends.
REFUSAL_S = 10.0
# Ranks usually notice the failure of another node themselves, and report more about it than the agent can.
STRAGGLER_S = 15.0
# How long an agent waits for the store.
ANSWER_S = 30.0
POLL_S = 0.5
# How long node 0's agent keeps the store, so that other nodes read how the job ended.
LINGER_S = 10.0


def main(arguments: list[str]) -> int:
    """Run the ranks and return their exit status; BAD_INPUT for a bad recipe, or for a rendezvous of changing nodes."""
    options = torchrun.parse_args(arguments)
    if options.rdzv_backend != "static" and not options.standalone and options.nnodes not in ("1", "1:1"):
        print(
            f"--rdzv-backend = {options.rdzv_backend}: works on one node only (--nnodes = {options.nnodes}), because each "
            "agent counts its own restarts; name the nodes' master: --master-addr HOST --node-rank N",
            file=sys.stderr,
        )
        return BAD_INPUT
    run, grace_s = None, float(RunSection.model_fields["grace_s"].default)
    words = [word for word in options.training_script_args if not word.startswith("--")]
    if options.module and options.training_script == "megarl" and words:
        try:
            recipe = load_recipe(words[0], words[1:])
        except RecipeError as error:
            print(error, file=sys.stderr)
            return BAD_INPUT
        run, grace_s = RunDirectory.of(recipe), recipe.run.grace_s
    signals = ReceivedSignals(grace_s)
    handle_signals(signals.note)
    handled = {number.name for number in SIGNALS}
    options.signals_to_handle = ",".join(name for name in options.signals_to_handle.split(",") if name not in handled)
    agents: list[Agent] = []
    # torch's launcher constructs the agent and has no option for its class (2.13).
    launcher.LocalElasticAgent = partial(Agent, agents, signals, run)  # type: ignore[assignment,misc]
    # torch logs a rank that asks for a requeue as a failure; the outcome is printed below.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        take_held_signals()  # signals that came during the imports
        torchrun.run(options)
    except ChildFailedError:
        outcome = agents[0].outcome
        print(f"megarl.cluster.node_agent: {outcome.sentence} (exit status {outcome.status})", file=sys.stderr, flush=True)
        return outcome.status
    except SignalException as error:
        print(f"megarl.cluster.node_agent: ended by {error.sigval.name}", file=sys.stderr, flush=True)
        return REQUEUE if error.sigval in SIGNALS else FAILED
    finally:
        for agent in agents:
            if agent.others is not None:
                agent.others.close()
    return COMPLETE


@dataclass
class ReceivedSignals:
    """The signals received so far. The agent forwards them at its next look at the ranks."""

    grace_s: float
    can_forward: bool = False
    since: float | None = None
    numbers: list[int] = field(default_factory=list)
    num_forwarded: int = 0

    def note(self, number: int, frame: Any) -> None:
        """Record a signal. Before the ranks are started, end the wait for other nodes by raising SignalException."""
        self.since = self.since or time.monotonic()
        self.numbers.append(number)
        if not self.can_forward:
            raise SignalException(f"{signal.Signals(number).name} before the ranks were started", signal.Signals(number))

    def is_overdue(self) -> bool:
        """Return whether the ranks have used up their time to leave."""
        return self.since is not None and time.monotonic() - self.since > self.grace_s


class Agent(LocalElasticAgent):
    """torch's agent of one node, which judges its ranks by their exit codes and agrees with the agents of other nodes."""

    def __init__(
        self, agents: list[Agent], signals: ReceivedSignals, run: RunDirectory | None, *arguments: Any, **settings: Any
    ) -> None:
        """Add this agent to `agents`."""
        super().__init__(*arguments, **settings)
        agents.append(self)
        self._signals, self._run = signals, run
        self._previous_end = 0 if run is None else exit_status.ended_at(run.path)
        self._refused_since: float | None = None
        self._alone_since: float | None = None  # when ranks of another node failed without a restart
        self.others: OtherNodes | None = None
        self.outcome = Outcome(FAILED, "no rank was started")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        handler = worker_group.spec.rdzv_handler
        num_nodes, host, port = worker_group.group_world_size, worker_group.master_addr, worker_group.master_port
        if self.others is None and num_nodes is not None and num_nodes > 1 and handler.get_backend() == "static":
            assert host is not None and port is not None
            is_first = worker_group.group_rank == 0
            self.others = OtherNodes(host, port, handler.get_run_id(), num_nodes, is_first)
        self._signals.can_forward = True  # from here on, a handler that raises would lose a started rank
        self._refused_since = None
        return dict(super()._start_workers(worker_group))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the ranks. torch's method ends all ranks when one has failed, so call it only when the ranks must end."""
        for number in self._signals.numbers[self._signals.num_forwarded :]:
            self._signals.num_forwarded += 1
            for process in self._processes():
                if process.poll() is None:
                    process.send_signal(number)
        workers = zip(worker_group.workers, self._processes(), strict=True)
        codes = {worker.global_rank: process.poll() for worker, process in workers}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        running = codes.keys() - ended.keys()
        is_overdue = self._signals.is_overdue()
        start = worker_group.spec.max_restarts - self._remaining_restarts
        if running:
            remote = self._remote_outcome(start)
            failed = {code for code in ended.values() if code}
            if remote is None and not is_overdue and (not failed or self._will_follow(failed)):
                return RunResult(state=WorkerState.HEALTHY)
            assert self._pcontext is not None
            self._pcontext.close(signal.SIGKILL if is_overdue and remote is None else STOP)
            if remote is not None:
                self._publish(start, Outcome(remote.status, f"on another node {remote.sentence}", restarts=remote.restarts))
                # torch's launcher requires a failure of a failed node (2.13).
                failures = {0: ProcessFailure(0, self._processes()[0].pid, FAILED, "")}
                return RunResult(state=WorkerState.FAILED, failures=failures)
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            can_resume = self._run is not None and self._run.can_go_on
            hang = None if self._run is None else exit_status.hang_reason(self._run.path, self._previous_end)
            outcome = judge(ended, running if is_overdue else (), self._signals.numbers, can_resume, hang)
            if outcome.status != FAILED or self._signals.numbers:
                self._remaining_restarts = 0
            if self._run is not None and outcome.status in (FAILED, REQUEUE):
                exit_status.record_end(self._run.path, outcome.status, outcome.sentence, outcome.rank, outcome.signal)
            self._publish(start, replace(outcome, restarts=self._remaining_restarts > 0))
        elif result.state == WorkerState.SUCCEEDED:
            self._publish(start, Outcome(COMPLETE, "complete"))
        return result

    def _remote_outcome(self, start: int) -> Outcome | None:
        """Return the outcome of another node if the ranks of this node must end too, else None."""
        outcome = None if self.others is None else self.others.agreed(start)
        if outcome is None or (outcome.restarts and not self._signals.numbers):
            return outcome
        self._remaining_restarts = 0  # restarted ranks would wait for that node
        if not outcome.ends_job or self._signals.numbers:
            return None
        self._alone_since = self._alone_since or time.monotonic()
        return outcome if time.monotonic() - self._alone_since > STRAGGLER_S else None

    def _publish(self, start: int, outcome: Outcome) -> None:
        """Keep the outcome of the ranks, and agree with the other nodes whether all ranks restart or end."""
        self.outcome = outcome
        if self.others is None:
            return
        if not self.others.publish(start, outcome).restarts:
            self._remaining_restarts = 0
        elif not outcome.restarts:  # the others restart without this node: end their next start too
            self.others.publish(start + 1, outcome)

    def _will_follow(self, failed: set[int]) -> bool:
        """Return whether the running ranks are about to end like the ranks with the exit codes `failed`."""
        if all(code == REQUEUE or abs(code) in self._signals.numbers for code in failed):
            self._signals.since = self._signals.since or time.monotonic()
            return True
        if BAD_INPUT not in failed:
            return False
        self._refused_since = self._refused_since or time.monotonic()
        return time.monotonic() - self._refused_since < REFUSAL_S

    def _processes(self) -> list[Any]:
        handlers = cast(SubprocessContext, self._pcontext).subprocess_handlers
        return [handlers[rank].proc for rank in sorted(handlers)]

    def _shutdown(self, death_sig: signal.Signals = STOP, timeout: int = 30) -> None:
        super()._shutdown(death_sig)  # without `timeout`, which torch 2.11 does not take; torch 2.13 has the same 30 s
        # Each rank leads a process group, which may outlive the rank.
        for process in self._processes() if self._pcontext is not None else ():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def judge(
    ended: Mapping[int, int], killed: Collection[int], signals: Collection[int], can_resume: bool, hang: str | None = None
) -> Outcome:
    """Return the outcome of a node from its ranks.

    `ended`: exit codes by rank, of ranks that ended before the agent stopped any. `killed`: ranks that did not leave in
    time. `signals`: the forwarded signals. `can_resume`: there is a checkpoint or no step yet. `hang`: the watchdog's
    message.
    """
    if hang is not None or HUNG in ended.values():
        return Outcome(HUNG, hang or "the watchdog has ended the run; the first node's output says why")
    # Before a rank has its handler, the signal kills it, or Ray's handler turns the signal into an exit status.
    left = {rank for rank, code in ended.items() if abs(code) in signals}
    codes = {rank: code for rank, code in sorted(ended.items()) if rank not in left}
    for rank, code in codes.items():
        if code < 0:
            name = signal.Signals(-code).name
            return Outcome(FAILED, f"rank {rank} was killed by {name}", rank, name)
    refused = [rank for rank, code in codes.items() if code == BAD_INPUT]
    failed = [rank for rank, code in codes.items() if code not in (COMPLETE, REQUEUE)]
    for rank in (refused or failed)[:1]:
        status = BAD_INPUT if refused else FAILED
        return Outcome(status, f"rank {rank} ended with exit status {codes[rank]}", rank)
    if killed:
        names = ", ".join(map(str, sorted(killed)))
        saved = "the last checkpoint is intact" if can_resume else "there is no checkpoint to resume from"
        sentence = f"ranks {names} did not leave within run.grace_s and were killed; {saved}"
        return Outcome(REQUEUE if can_resume else FAILED, sentence, min(killed), signal.SIGKILL.name)
    if left:
        return Outcome(REQUEUE, f"ranks {', '.join(map(str, sorted(left)))} left before they had begun")
    if REQUEUE in codes.values():
        return Outcome(REQUEUE, "the ranks ask to be started again")
    return Outcome(COMPLETE, "complete")


@dataclass(frozen=True)
class Outcome:
    """How a node's ranks ended: exit status, reason, the rank and signal at fault, and whether the node restarts them."""

    status: int
    sentence: str
    rank: int | None = None
    signal: str | None = None
    restarts: bool = False

    @property
    def ends_job(self) -> bool:
        """Whether ranks of other nodes would wait forever for this node; they can finish after finished ranks."""
        return not self.restarts and self.status not in (COMPLETE, REQUEUE)


STORE_GONE = Outcome(FAILED, "the agent of node 0 is gone, or does not answer")


class OtherNodes:
    """The agents of the other nodes. One thread talks to the store, because torch has no deadline for a store whose machine
    is gone (2.13)."""

    def __init__(self, host: str, port: int, run_id: str, num_nodes: int, keeps_store: bool) -> None:
        """Connect to the store of node 0's agent."""
        store = TCPStore(host, port, None, False, timedelta(seconds=ANSWER_S), wait_for_workers=False)
        self._store = PrefixStore("megarl/ends", PrefixStore(run_id, store))
        self._num_nodes, self._keeps_store = num_nodes, keeps_store
        self._local: dict[int, Outcome] = {}
        self._agreed: dict[int, Outcome] = {}
        self._is_gone = False
        self._news = threading.Condition()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="other nodes", daemon=True)
        self._thread.start()

    def agreed(self, start: int) -> Outcome | None:
        """Return the first outcome that a node published for a start; None if no node has published one."""
        return self._agreed.get(start, STORE_GONE if self._is_gone else None)

    def publish(self, start: int, outcome: Outcome) -> Outcome:
        """Publish this node's outcome; return the first published outcome, which counts for all nodes."""
        with self._news:
            self._local[start] = outcome
            self._news.wait_for(lambda: self.agreed(start) is not None, ANSWER_S)
        return self.agreed(start) or STORE_GONE

    def close(self) -> None:
        """End the thread, because Python aborts at exit while the thread is inside the store."""
        self._closed.set()
        self._thread.join(ANSWER_S)

    def _exchange(self) -> None:
        start = 0
        try:
            while not self._closed.wait(POLL_S):
                # Poll, because torch logs an error for each wait that times out (2.13).
                if start in self._local:
                    text = self._store.compare_set(str(start), "", json.dumps(asdict(self._local[start])))
                elif self._store.check([str(start)]):
                    text = self._store.get(str(start))
                else:
                    continue
                outcome = Outcome(**json.loads(text))
                num_informed = self._store.add(f"informed {start}", 1)
                with self._news:
                    self._agreed[start] = outcome
                    self._news.notify_all()
                if outcome.ends_job:
                    end = time.monotonic() + LINGER_S
                    while self._keeps_store and num_informed < self._num_nodes and time.monotonic() < end:
                        time.sleep(POLL_S / 5)
                        num_informed = self._store.add(f"informed {start}", 0)
                    return
                start += 1
        except DistError:  # node 0's agent has ended, so no node restarts its ranks
            with self._news:
                self._is_gone = True
                self._news.notify_all()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
