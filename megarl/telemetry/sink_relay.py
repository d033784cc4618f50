"""Steps on their way to the sinks, each sink in a thread of its own: no step waits for one, and none ends a run.

A service may be slow, away, or its disk full. What a sink did not take is counted and said once; metrics.jsonl has it.
"""

from __future__ import annotations

import importlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from megarl.recipe import Recipe
from megarl.recipe.telemetry_section import SinkSection
from megarl.telemetry.exit_status import REQUEUE, Preempted
from megarl.telemetry.sink import FOLDER, Memory, Row, Sink, Start
from megarl.telemetry.starts import COMPLETE, FAILED, REQUEUED

logger = logging.getLogger(__name__)
MOST_WAITING = 512  # calls that wait for a sink; further ones are left out
# How long the end of a run waits for what is still on its way; and where it ends by an error, or is told to leave.
CLOSE_S, HURRY_S = 30.0, 5.0
# Kinds that forget by themselves what an earlier start wrote of steps that are done again; others keep the first.
REWINDS = ("tensorboard",)
Call = Callable[[Sink], None]


class Relay:
    """Hands calls to one sink, which is opened in the relay's own thread, and again with the next call where that failed."""

    def __init__(self, key: str, kind: str, memory: Memory, open_sink: Callable[[], Sink]) -> None:
        """`key` is the sink's in the recipe, for what is said of it."""
        self._key, self._kind, self._memory, self._open_sink = key, kind, memory, open_sink
        self._behind = 0 if kind in REWINDS else memory.step
        self._calls: queue.Queue[tuple[int, str, Call] | str] = queue.Queue(MOST_WAITING)
        self._lock = threading.Lock()
        self._failures = 0
        self._has_warned = False
        self._sink: Sink | None = None
        # A daemon: a sink that hangs does not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"sink {kind}", daemon=True)
        self._thread.start()

    def hand(self, step: int, what: str, call: Call) -> None:
        """Have the sink take `what` of a step, soon; one that it has from an earlier start is not given again."""
        if step <= self._behind:
            return
        try:
            self._calls.put_nowait((step, what, call))
        except queue.Full:
            self._fail(f"step {step}: {what} left out: {MOST_WAITING} calls wait for it")

    def take_failures(self) -> int:
        """Calls that failed since this was last asked."""
        with self._lock:
            failures, self._failures = self._failures, 0
        return failures

    def end(self, end: str) -> None:
        """No call comes after this one. Does not wait."""
        try:
            self._calls.put_nowait(end)
        except queue.Full:
            self._fail(f"its end left out: {MOST_WAITING} calls wait for it")

    def wait(self, timeout_s: float) -> None:
        """Wait for what was handed before the end."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._fail(f"still at work after {timeout_s:.0f} s; what it has not taken is left out")

    def _work(self) -> None:
        try:
            self._sink = self._open_sink()
        except Exception as error:  # whatever a service's library raises: the run goes on, and it is said and counted
            self._fail(f"not opened: {type(error).__name__}: {error}")
        while not isinstance(taken := self._calls.get(), str):
            step, what, call = taken
            try:
                if self._sink is None:
                    self._sink = self._open_sink()
                if step > self._memory.step:
                    self._memory.keep(step=step)
                call(self._sink)
            except Exception as error:  # the same: one call that fails leaves out none of those behind it
                self._fail(f"step {step}: {what} not written: {type(error).__name__}: {error}")
        try:
            if self._sink is not None:
                self._sink.close(taken)
        except Exception as error:  # the same: the run has ended, and nothing of it is lost
            self._fail(f"not closed: {type(error).__name__}: {error}")

    def _fail(self, said: str) -> None:
        with self._lock:
            self._failures += 1
            first, self._has_warned = not self._has_warned, True
        if first:
            logger.warning("%s (%s): %s; the run goes on, and metrics.jsonl has every step (said once; further ones are "
                           "counted in telemetry/sink_failures)", self._key, self._kind, said)  # fmt: skip


class Sinks:
    """All sinks of a run. A context manager: leaving it waits for what is on its way, within bounds."""

    def __init__(self, relays: Sequence[Relay]) -> None:
        self._relays = relays

    def write(self, step: int, figures: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """Hand on a step: its figures, and its sample table unless that is empty. Returns at once."""
        for relay in self._relays:
            relay.hand(step, "figures", lambda sink: sink.write(step, figures))
            if rows:
                relay.hand(step, "samples", lambda sink: sink.samples(step, rows))

    def figures(self) -> dict[str, int]:
        """`telemetry/sink_failures`: calls that failed since the last step; nothing where there are no sinks."""
        return {"telemetry/sink_failures": sum(relay.take_failures() for relay in self._relays)} if self._relays else {}

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        goes_on = isinstance(error, Preempted) and error.status == REQUEUE
        end = COMPLETE if kind is None else REQUEUED if goes_on else FAILED
        for relay in self._relays:
            relay.end(end)
        deadline = time.monotonic() + (CLOSE_S if kind is None else HURRY_S)
        for relay in self._relays:
            relay.wait(max(0.0, deadline - time.monotonic()))


def open_sinks(recipe: Recipe, run: Path, done: int) -> Sinks:
    """The recipe's sinks, to go on behind step `done`; 0 for a new run. Their libraries are imported here, which takes
    seconds: in a thread it would be the first steps that take longer."""
    plain = recipe.model_dump(mode="json")
    return Sinks([
        _relay(number, section, run, recipe.run.name, plain, done) for number, section in enumerate(recipe.telemetry.sinks)
    ])  # fmt: skip


def _relay(number: int, section: SinkSection, run: Path, name: str, plain: dict[str, Any], done: int) -> Relay:
    memory = Memory(run / FOLDER / f"{section.kind}.json", new=done == 0)
    start = Start(run, name, plain, done, memory)
    module = importlib.import_module(f"megarl.telemetry.{section.kind}_sink")
    return Relay(f"telemetry.sinks.{number}", section.kind, memory, lambda: module.open_sink(section, start))
