"""Spans for the work of Megatron and torch.distributed inside a phase.

Megatron-core starts and stops its timers around micro-batches, messages between pipeline stages, and the reduction of
gradients (checked with 0.16 and 0.19). On a GPU they time the host, which runs ahead of the device: such a span shows when
work was queued, and the phase's span `device` what the device still had to do.

Every collective and message of torch.distributed ends in a call of `Work.wait` (torch 2.13), so `timed_waits` times this
method. With gloo the host waits there for the slowest rank and the transfer. With NCCL the device waits as part of its work,
in `forward` and `backward`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import Work

from megarl.telemetry.clock import PhaseClock, start_span, stop_span
from megarl.telemetry.progress import advance_work

_SPANS = {"forward-compute": "forward", "backward-compute": "backward", "forward-backward": "pipeline"}
MICRO_BATCH = ("forward", "backward")  # once each for every micro-batch and chunk
LAYERS, GRADIENTS, RANKS, PIPELINE = "wait_layers", "wait_gradients", "wait_ranks", "wait_pipeline"
# The span of a wait, by the span that it begins in. Tensor-, context- and expert-parallel collectives are in layers.
_CAUSES = {"forward": LAYERS, "backward": LAYERS, "pipeline": LAYERS, "optimizer": GRADIENTS}


@contextmanager
def timed_waits(clock: PhaseClock) -> Iterator[None]:
    """Record this thread's waits for collectives as spans of `clock`; a wait inside another wait is part of it."""
    wait, owner = Work.wait, threading.get_ident()

    def timed(work: Work, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != owner:  # a clock belongs to one thread; autograd has another one for a GPU
            return wait(work, *arguments, **options)
        with clock.span(RANKS if clock.inside is None else _CAUSES.get(clock.inside, RANKS)):
            return wait(work, *arguments, **options)

    Work.wait = timed  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Work.wait = wait  # type: ignore[method-assign]


def span_of(timer: str) -> str:
    """Return the span of a megatron-core timer."""
    if timer in _SPANS:
        return _SPANS[timer]
    if timer.endswith(("-recv", "-send")):
        return PIPELINE
    return GRADIENTS


class Timer:
    """A timer that megatron-core starts and stops."""

    def __init__(self, name: str) -> None:
        self._span = span_of(name)

    def start(self, barrier: bool = False) -> None:
        """Start the span, without the `barrier` that Megatron's own timer would add."""
        start_span(self._span)

    def stop(self, barrier: bool = False) -> None:
        """End the span."""
        stop_span(self._span)
        if self._span in MICRO_BATCH:
            advance_work()


class MegatronTimers:
    """The value of `TransformerConfig.timers`."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        return self._timers.setdefault(name, Timer(name))
