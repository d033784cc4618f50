"""An event loop on a thread of its own; calls from another thread end with a name if it ends or stands still."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from megarl.rollout import RolloutError, StreamStalled

T = TypeVar("T")
LOOP_ENDED = "phase rollout: the thread of the rollout stream has ended; its traceback is in the log of rank 0"


def collect_seldom() -> None:
    """Leave what exists out of garbage collections, and make them rare.

    A collection stops the loop: by 0.3 s where it looks at all objects of rank 0, and by 50 ms each second with a thousand
    requests of agents in flight (CPython 3.11). Objects in reference cycles live longer in turn.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # a library whose objects are never freed would print that they leak
    gc.set_threshold(100_000, 50, 100)  # of objects made and not freed that may form cycles; 700 by default


class LoopThread:
    """Runs coroutines for one other thread, whose calls may be nested."""

    def __init__(self, name: str, timeout_s: float) -> None:
        """A loop may stand still for half of `timeout_s`."""
        self._limit_s = timeout_s / 2
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()  # the waiting call: True if it is over
        self._has_ended = self._is_stalled = False
        self.loop = uvloop.new_event_loop()  # takes less processor time than asyncio's for each answer from Ray
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], meanwhile: Callable[[], None] = lambda: None) -> T:
        """Run a coroutine in the loop and return its result; `meanwhile` is called here at first, and after each `wake`."""
        wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        before, self._wakes = self._wakes, wakes
        try:
            if self._has_ended:
                work.close()
                raise RolloutError(LOOP_ENDED)
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
            future.add_done_callback(lambda _: wakes.put(True))
            while True:
                meanwhile()
                try:
                    is_over = wakes.get(timeout=self._limit_s)
                except queue.Empty:
                    self._refuse_stalled()
                    continue
                if is_over:
                    if not future.done():
                        raise RolloutError(LOOP_ENDED)
                    return future.result()
        finally:
            self._wakes = before

    def wake(self) -> None:
        """Let the waiting call do what it does meanwhile."""
        self._wakes.put(False)

    def close(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a last coroutine and end the loop; a loop that stands still ends with the process."""
        if self._has_ended or self._is_stalled:
            work.close()
        else:
            try:
                with contextlib.suppress(RolloutError):
                    self.call(work)
            finally:
                if not (self._has_ended or self._is_stalled):
                    self.loop.call_soon_threadsafe(self.loop.stop)
        if not self._is_stalled:
            self._thread.join()
            self.loop.close()

    def _refuse_stalled(self) -> None:
        """Raise StreamStalled, with the place where it stands, if the loop does not turn within its limit."""
        turned = threading.Event()
        if self._has_ended:
            return
        self.loop.call_soon_threadsafe(turned.set)
        if not turned.wait(self._limit_s) and not self._has_ended:
            self._is_stalled = True
            frame = sys._current_frames()[self._thread.ident or 0]
            stands = "".join(traceback.format_stack(frame)[-4:])
            raise StreamStalled(
                f"phase rollout: the loop of the stream has stood still for {self._limit_s:g} s in\n{stands}"
            )

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:  # also if some code asks the process to exit
            self._has_ended = True
            self._wakes.put(True)
