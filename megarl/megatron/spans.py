"""Spans of the phase that runs for what Megatron and torch.distributed do inside it.

Megatron-core starts and stops its timers around micro-batches, messages between pipeline stages, and the reduction of
gradients (checked with 0.16 and 0.19). On a GPU they time the host, which runs ahead of the device: such a span says when
the work was queued, and the phase's span `device` holds what the device still had to do.

Every collective and message of torch.distributed ends in a call of `Work.wait` (torch 2.13: a blocking one makes the call
itself, and megatron-core waits for the layers' asynchronous ones), so `timed_waits` times this one method. With gloo the
host waits there until the slowest rank has come and the bytes have moved. With NCCL the device waits as part of its work,
and such waits are in `forward` and `backward`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._distributed_c10d import Work

from megarl.telemetry.clock import PhaseClock, start_span, stop_span
from megarl.telemetry.progress import advance_work

_SPANS = {"forward-compute": "forward", "backward-compute": "backward", "forward-backward": "pipeline"}
MICRO_BATCH = ("forward", "backward")  # once each for every micro-batch and chunk
LAYERS, GRADIENTS, RANKS, PIPELINE = "wait_layers", "wait_gradients", "wait_ranks", "wait_pipeline"
# By the open span: what a collective in it is for. Tensor-, context- and expert-parallel ranks meet inside of layers.
_CAUSES = {"forward": LAYERS, "backward": LAYERS, "pipeline": LAYERS, "optimizer": GRADIENTS}


def cause_of(inside: str | None) -> str:
    """The span of a wait that begins inside of span `inside`; None outside of spans."""
    return RANKS if inside is None else _CAUSES.get(inside, RANKS)


@contextmanager
def timed_waits(clock: PhaseClock) -> Iterator[None]:
    """Within this, waits of this thread for collectives are spans of `clock`; those in another wait are part of it."""
    wait, owner = Work.wait, threading.get_ident()

    def timed(work: Work, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != owner:  # a clock is one thread's; autograd has its own for a GPU
            return wait(work, *arguments, **options)
        with clock.span(cause_of(clock.inside)):
            return wait(work, *arguments, **options)

    Work.wait = timed  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Work.wait = wait  # type: ignore[method-assign]


def span_of(timer: str) -> str:
    """The span that a timer of megatron-core times."""
    if timer in _SPANS:
        return _SPANS[timer]
    if timer.endswith(("-recv", "-send")):
        return PIPELINE
    return GRADIENTS


class Timer:
    """One of megatron-core's timers."""

    def __init__(self, name: str) -> None:
        self._span = span_of(name)

    def start(self, barrier: bool = False) -> None:
        """Megatron would have ranks meet at a `barrier` first; that would be a wait of our own making."""
        start_span(self._span)

    def stop(self, barrier: bool = False) -> None:
        """The end of the last start."""
        stop_span(self._span)
        if self._span in MICRO_BATCH:
            advance_work()


class MegatronTimers:
    """What megatron-core asks for as `TransformerConfig.timers`."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        return self._timers.setdefault(name, Timer(name))
