"""SIGTERM, SIGUSR1 and SIGHUP ask a run to save and to leave.

A signal may reach one rank alone. So its handler only sets a flag, and the ranks agree at points that all of them pass:
after each step, and with `run.preemption: abandon` before each phase too. No rank is left waiting in a collective.
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
# A launcher, the agent and Slurm may each pass on one signal; a signal that comes later than this is a second one.
SECOND_AFTER_S = 5.0
UPDATES = ("critic_update", "actor_update")


def handle_signals(handler: Callable[[int, Any], None]) -> None:
    """Set the handler of SIGNALS, except of a SIGHUP that is ignored."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def hold_signals() -> None:
    """Block SIGNALS until `take_held_signals`, also in a program that takes the place of this one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def take_held_signals() -> None:
    """Unblock SIGNALS, once there are handlers; these run now for signals that came in the meantime."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def holds_signals() -> bool:
    """Return whether this thread blocks SIGNALS, as all processes of Ray do in a job (`launch/node.sh`)."""
    return signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def keep_holding_signals() -> None:
    """Start multiprocessing's resource tracker now, with SIGNALS blocked as they are: Python 3.11 unblocks SIGTERM in the
    thread that starts it, and so in all that this thread starts later."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, held)


class LeaveNow(BaseException):
    """The handler raises this where nothing could be saved yet, and at the second signal."""


class Abandoned(Exception):
    """All ranks leave the step before this phase. `moved`: some weights have already been updated in it."""

    def __init__(self, phase: str, moved: bool) -> None:
        super().__init__(phase)
        self.phase, self.moved = phase, moved


class Asked:
    """The request of a signal to this process; `name` is that of the signal, None without one."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.name: str | None = None
        self._now, self._since = now, 0.0
        self._watching = False
        self._at_once = False

    def watch(self) -> None:
        """Handle SIGNALS; in the main thread."""
        self._watching = True
        handle_signals(self.note)
        # SIGTERM still ends a forked child, as reward workers are.
        os.register_at_fork(after_in_child=self._forget)

    def watch_again(self) -> None:
        """Handle SIGTERM again after `ray.init`, which sets its own handler (2.60); nothing where `watch` was not called."""
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
        """Inside, already the first signal raises LeaveNow: engines take minutes to start."""
        if self.name is not None:
            raise LeaveNow
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _forget(self) -> None:
        if self._watching:
            self._watching = False
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)


ASKED = Asked()


class Preemption:
    """Decides when the ranks of a run leave, and what the run says then."""

    def __init__(self, abandons: bool, grace_s: float, gather: Callable[[str | None], list[str | None]]) -> None:
        """`gather` brings the signal of every rank to every rank."""
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
        """Begin a step."""
        self._step, self._moved = step, False

    def boundary(self, phase: str) -> None:
        """Call this on every rank before it enters `phase`. Raises Abandoned on all ranks, or on none."""
        # A sync is short, and completes the step.
        if not self.abandons or phase == "weight_sync":
            return
        # Where weights have moved and there is no checkpoint, finished steps would be lost: then this step is finished too.
        loses_nothing = not self._moved or self.saved is not None or self._step == 1
        if loses_nothing and self.agreed():
            raise Abandoned(phase, self._moved)
        self._moved |= phase in UPDATES

    def left(self, done: int, steps: int, where: str) -> Preempted:
        """Return how the run ends after `done` steps, when all that could be saved is saved."""
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
