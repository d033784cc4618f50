"""torchrun in this process, with the exit status of the ranks and with signals that let them save.

    python -m megarl.agent TORCHRUN_OPTIONS -m megarl.train RECIPE [key=value ...] [--resume | --resume-if-saved]

Every option of torchrun holds. What differs (torch 2.13 ends the ranks 30 s after a signal, stops all others as soon as the
first one ends with another status than 0, and says 1 for everything):

- SIGTERM and SIGUSR1 go on to the rank processes, and to them alone: Ray's processes, in the same process group, are needed
  until the ranks have saved. The ranks have `run.grace_s` to leave; then they are killed.
- A rank that ends with REQUEUE or BAD_INPUT stops nobody: the others are about to do the same. Neither is restarted.
- The exit status is that of the ranks (`megarl/exit_status.py`), and a sentence says which of them ended how.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api as launcher

from megarl.exit_status import BAD_INPUT, COMPLETE, FAILED, REQUEUE
from megarl.preemption import SIGNALS
from megarl.recipe import Recipe, RecipeError, load_recipe
from megarl.recipe.sections import RunSection
from megarl.telemetry import starts
from megarl.telemetry.run_directory import RunDirectory

# Not SIGTERM, which asks a rank to save first.
STOP = signal.SIGINT
# Ranks refuse bad input side by side; one that waits for another that has refused never ends by itself.
REFUSAL_S = 10.0
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


@dataclass(frozen=True)
class Verdict:
    """How the ranks of this node ended."""

    status: int
    sentence: str
    rank: int | None = None
    signal: str | None = None


def judge(ended: Mapping[int, int], killed: Collection[int], asked: Collection[int], can_resume: bool) -> Verdict:
    """`ended`: exit codes, as Python gives them, by rank, of those that ended before the agent stopped any; `killed`: those
    that did not leave in time; `asked`: the signals passed on; `can_resume`: there is a checkpoint, or no step yet."""
    # Before its own handler is there, a rank ends by the signal, or by Ray's handler, which makes it an exit status.
    left = {rank for rank, code in ended.items() if abs(code) in asked}
    codes = {rank: code for rank, code in sorted(ended.items()) if rank not in left}
    for rank, code in codes.items():
        if code < 0:
            name = signal.Signals(-code).name
            return Verdict(FAILED, f"rank {rank} was killed by {name}", rank, name)
    refused = [rank for rank, code in codes.items() if code == BAD_INPUT]
    failed = [rank for rank, code in codes.items() if code not in (COMPLETE, REQUEUE)]
    for rank in (refused or failed)[:1]:
        status = BAD_INPUT if refused else FAILED
        return Verdict(status, f"rank {rank} ended with exit status {codes[rank]}", rank)
    if killed:
        stands = "what was saved before stands" if can_resume else "there is no checkpoint to go on from"
        sentence = f"ranks {_named(killed)} did not leave within run.grace_s and were killed; {stands}"
        return Verdict(REQUEUE if can_resume else FAILED, sentence, min(killed), signal.SIGKILL.name)
    if left:
        return Verdict(REQUEUE, f"ranks {_named(left)} left before they had begun")
    if REQUEUE in codes.values():
        return Verdict(REQUEUE, "the ranks ask to be started again")
    return Verdict(COMPLETE, "complete")


def _named(ranks: Collection[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))


class Agent(LocalElasticAgent):
    """torch's agent of one node, which watches its ranks as the page above says."""

    def __init__(self, leaving: Leaving, run: RunDirectory | None, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._leaving, self._run = leaving, run
        self._refused_since: float | None = None
        self.verdict = Verdict(FAILED, "no rank was started")

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
        if running:
            failed = {code for code in ended.values() if code}
            if not overdue and (not failed or self._others_follow(failed)):
                return RunResult(state=WorkerState.HEALTHY)
            assert self._pcontext is not None
            self._pcontext.close(signal.SIGKILL if overdue else STOP, self._shutdown_timeout)
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            can_resume = self._run is not None and self._run.can_go_on
            self.verdict = judge(ended, running if overdue else (), self._leaving.received, can_resume)
            if self.verdict.status != FAILED or self._leaving.received:
                self._remaining_restarts = 0
            if self._run is not None and self.verdict.status in (FAILED, REQUEUE):
                how = starts.REQUEUED if self.verdict.status == REQUEUE else starts.FAILED
                starts.record_end(self._run.path, how, self.verdict.sentence, self.verdict.rank, self.verdict.signal)
        return result

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

    def _processes(self) -> list[Any]:
        handlers = cast(SubprocessContext, self._pcontext).subprocess_handlers
        return [handlers[rank].proc for rank in sorted(handlers)]

    def _ended(self, worker_group: WorkerGroup) -> dict[int, int]:
        codes = [process.poll() for process in self._processes()]
        ranks = [worker.global_rank for worker in worker_group.workers]
        return {rank: code for rank, code in zip(ranks, codes, strict=True) if code is not None}

    def _shutdown(self, death_sig: signal.Signals = STOP, timeout: int = 30) -> None:
        super()._shutdown(death_sig, timeout)
        if self._pcontext is not None:
            self._sweep()

    def _sweep(self) -> None:
        """End what the ranks left behind; each of them led a process group of its own."""
        for process in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Exit status of the ranks; BAD_INPUT for a recipe with violations, before anything starts."""
    options = torchrun.parse_args(arguments)
    try:
        recipe = _recipe(options)
    except RecipeError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    # Another module than megarl.train has no recipe, and gets the default.
    leaving = Leaving(RunSection.model_fields["grace_s"].default if recipe is None else recipe.run.grace_s)
    run = None if recipe is None else RunDirectory.of(recipe)
    for number in SIGNALS:
        signal.signal(number, leaving.note)
    kept = [name for name in options.signals_to_handle.split(",") if name not in {one.name for one in SIGNALS}]
    options.signals_to_handle = ",".join(kept)
    agents: list[Agent] = []

    def make(*arguments: Any, **settings: Any) -> Agent:
        agents.append(Agent(leaving, run, *arguments, **settings))
        return agents[0]

    # torch's launcher makes the agent itself and has no place to name another one (2.13).
    launcher.LocalElasticAgent = make  # type: ignore[assignment,misc]
    try:
        torchrun.run(options)
    except ChildFailedError:
        verdict = agents[0].verdict
        print(f"megarl.agent: {verdict.sentence} (exit status {verdict.status})", file=sys.stderr, flush=True)
        return verdict.status
    except SignalException as error:
        print(f"megarl.agent: ended by {error.sigval.name}", file=sys.stderr, flush=True)
        return REQUEUE if error.sigval in SIGNALS else FAILED
    return COMPLETE


def _recipe(options: Any) -> Recipe | None:
    if not options.module or options.training_script != "megarl.train":
        return None
    words = [word for word in options.training_script_args if not word.startswith("--")]
    return load_recipe(words[0], words[1:]) if words else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
