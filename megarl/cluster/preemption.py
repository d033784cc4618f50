"""SIGTERM, SIGUSR1 and SIGHUP ask a run to save and leave.

A signal may reach only one rank. The handler sets a flag, and the ranks agree at common points: after each step, and with
`run.preemption: abandon` also before each phase. So no rank is left waiting in a collective.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from megarl.telemetry.exit_status import FAILED, REQUEUE, Preempted

# A process under nohup ignores SIGHUP, and so do its children.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# A launcher, the agent and Slurm may each forward one signal; a later signal counts as the second.
SECOND_AFTER_S = 5.0
UPDATES = ("critic_update", "actor_update")


def handle_signals(handler: Callable[[int, Any], None] | signal.Handlers) -> None:
    """Set the handler of SIGNALS, except for a SIGHUP that the process ignores."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def hold_signals() -> None:
    """Block SIGNALS until `take_held_signals`, also across an exec."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def take_held_signals() -> None:
    """Unblock SIGNALS once they have handlers, which run now for pending signals."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def holds_signals() -> bool:
    """Return whether this thread blocks SIGNALS, as all processes of Ray do in a job (`launch/node.sh`)."""
    return signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def keep_holding_signals() -> None:
    """Start multiprocessing's resource tracker now and restore the blocked signals: Python 3.11 unblocks SIGTERM in
    the thread that starts the tracker, and so in that thread's later children."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, held)


class LeaveNow(BaseException):
    """The process must leave at once: there is nothing to save yet, or this is the second signal."""


class Abandoned(Exception):
    """All ranks leave the step before this phase. `moved`: the step has already updated some weights."""

    def __init__(self, phase: str, moved: bool) -> None:
        super().__init__(phase)
        self.phase, self.moved = phase, moved


class Asked:
    """The request to leave that signals make to this process; `name` is the first signal's name, or None."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.name: str | None = None
        self._now, self._since = now, 0.0
        self._watching = False
        self._at_once = False

    def watch(self) -> None:
        """Handle SIGNALS. Call it in the main thread."""
        self._watching = True
        handle_signals(self.note)

        def forget() -> None:  # SIGTERM must still end forked children such as reward workers
            if self._watching:
                self._watching = False
                handle_signals(signal.SIG_DFL)

        os.register_at_fork(after_in_child=forget)

    def watch_again(self) -> None:
        """Handle SIGTERM again after `ray.init`, which replaces the handler (2.60), if `watch` was called."""
        if self._watching:
            signal.signal(signal.SIGTERM, self.note)

    def note(self, number: int, frame: Any) -> None:
        """Handle a signal."""
        if self.name is None:
            self.name, self._since = signal.Signals(number).name, self._now()
            if not self._at_once:
                return
        elif self.seconds() < SECOND_AFTER_S:
            return
        raise LeaveNow

    def seconds(self) -> float:
        """Return the seconds since the first signal."""
        return self._now() - self._since

    @contextmanager
    def nothing_begun(self) -> Iterator[None]:
        """Let the first signal raise LeaveNow inside this context, because engines take minutes to start."""
        if self.name is not None:
            raise LeaveNow
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False


ASKED = Asked()


class Preemption:
    """Decides when the ranks of a run leave, and with which message."""

    def __init__(self, abandons: bool, grace_s: float, gather: Callable[[str | None], list[str | None]]) -> None:
        """`gather` returns the signals of all ranks on each rank."""
        self.abandons, self._grace_s, self._gather = abandons, grace_s, gather
        self.saved: int | None = None
        """The step of the last complete checkpoint."""
        self._step = 0
        self._moved = False
        self._by: str | None = None

    def agreed(self) -> bool:
        """Return whether some rank was asked to leave; the same on every rank. Collective."""
        self._by = next((name for name in self._gather(ASKED.name) if name is not None), None)
        return self._by is not None

    def begin(self, step: int) -> None:
        """Note the start of a step."""
        self._step, self._moved = step, False

    def boundary(self, phase: str) -> None:
        """Check for a request before every rank enters `phase`. Raises Abandoned on all ranks, or on none. Collective."""
        # A sync is short and completes the step.
        if not self.abandons or phase == "weight_sync":
            return
        # Once weights have moved, leaving without a checkpoint would lose earlier steps: finish this step first.
        loses_nothing = not self._moved or self.saved is not None or self._step == 1
        if loses_nothing and self.agreed():
            raise Abandoned(phase, self._moved)
        self._moved |= phase in UPDATES

    def left(self, done: int, steps: int, where: str) -> Preempted:
        """Return the exception that ends the run after `done` steps, once everything possible is saved."""
        late = ""
        if ASKED.name is not None and ASKED.seconds() > self._grace_s:
            late = f"; that took {ASKED.seconds():.0f} s, more than run.grace_s = {self._grace_s:g}"
        if self.saved is None:
            lost = "nothing was saved" if done == 0 else f"{done} finished steps are lost"
            message = f"{self._by} before the first checkpoint: {lost}{late}; start the run again"
            return Preempted(message, REQUEUE if done == 0 else FAILED)
        message = (
            f"{self._by} after step {done} of {steps}: step {self.saved} is saved in {where}{late}; "
            "go on with --resume (or --resume-if-saved)"
        )
        return Preempted(message, REQUEUE)
