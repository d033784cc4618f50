"""SIGTERM, SIGUSR1 and SIGHUP ask a run to save and to leave: what a rank notes of them, and when all ranks act on it.

A signal may reach one rank alone. So it sets a flag there and no more, and the ranks agree at points that all of them pass:
after each step, and with `run.preemption: abandon` before each phase too. Nobody is left waiting in a collective.
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

# A process that is started under nohup ignores SIGHUP, and so do its children.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# A launcher, the agent and Slurm may each send the same one; later than this it is a second one.
SECOND_AFTER_S = 5.0
UPDATES = ("critic_update", "actor_update")


def handle_signals(handler: Callable[[int, Any], None]) -> None:
    """Set the handler of SIGNALS, but for SIGHUP where it is ignored."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def hold_signals() -> None:
    """Have them wait, also for a program that takes the place of this one, until `take_held_signals`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def take_held_signals() -> None:
    """Once there are handlers. They get what came in the meantime, here."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def holds_signals() -> bool:
    """Whether this thread holds them back, as all processes of Ray do in a job (`launch/node.sh`)."""
    return signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def keep_holding_signals() -> None:
    """Where they are held, before the first use of multiprocessing: that starts a tracker of resources, and then lets
    SIGTERM through in the thread that did so, and in what this starts from then on (Python 3.11)."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, held)


class LeaveNow(BaseException):
    """Raised by the handler: nothing has begun that could be saved, or this is the second signal."""


class Abandoned(Exception):
    """All ranks leave the step before this phase. `moved`: some weights are no longer those of the step before."""

    def __init__(self, phase: str, moved: bool) -> None:
        super().__init__(phase)
        self.phase, self.moved = phase, moved


class Asked:
    """What the signals have asked of this process."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.name: str | None = None
        self._now, self._since = now, 0.0
        self._watching = False
        self._at_once = False

    def watch(self) -> None:
        """Take the signals, in the main thread."""
        self._watching = True
        handle_signals(self.note)
        # A child that is forked, as reward workers are, is ended by SIGTERM as it always was.
        os.register_at_fork(after_in_child=self._forget)

    def watch_again(self) -> None:
        """After `ray.init`, which takes SIGTERM for itself (2.60). Nothing in a process that does not watch."""
        if self._watching:
            signal.signal(signal.SIGTERM, self.note)

    def note(self, number: int, frame: Any) -> None:
        """The handler."""
        if self.name is None:
            self.name, self._since = signal.Signals(number).name, self._now()
            if not self._at_once:
                return
        elif self.seconds() < SECOND_AFTER_S:
            return
        raise LeaveNow

    def seconds(self) -> float:
        """Since the first signal."""
        return self._now() - self._since

    @contextmanager
    def nothing_begun(self) -> Iterator[None]:
        """Inside, the first signal already ends what is waited for: engines that start take minutes."""
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
    """When the ranks of one run leave, and what they say then."""

    def __init__(self, abandons: bool, grace_s: float, gather: Callable[[str | None], list[str | None]]) -> None:
        """`gather` brings every rank's word to every rank: the agreement."""
        self.abandons, self._grace_s, self._gather = abandons, grace_s, gather
        self.saved: int | None = None
        """The step of the last complete checkpoint."""
        self._step = 0
        self._moved = False
        self._by: str | None = None

    def agreed(self) -> bool:
        """Whether some rank was asked to leave; collective, and the same on every rank."""
        self._by = next((name for name in self._gather(ASKED.name) if name is not None), None)
        return self._by is not None

    def begin(self, step: int) -> None:
        """A step begins."""
        self._step, self._moved = step, False

    def boundary(self, phase: str) -> None:
        """Every rank is about to enter `phase`. Raises Abandoned on all of them, or on none."""
        # A sync is short, and with it the step is whole.
        if not self.abandons or phase == "weight_sync":
            return
        # Where weights have moved and nothing was saved so far, finished steps would be lost: then this one is finished too.
        stands = not self._moved or self.saved is not None or self._step == 1
        if stands and self.agreed():
            raise Abandoned(phase, self._moved)
        self._moved |= phase in UPDATES

    def left(self, done: int, steps: int, where: str) -> Preempted:
        """What the run says after `done` steps, when all that could be saved is saved."""
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
