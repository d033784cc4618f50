"""Waits for collectives that nothing else times, as spans of the phase that runs.

Every collective and message of torch.distributed ends in a call of `Work.wait` (torch 2.13: a blocking one makes the call
itself, one of the layers' asynchronous ones is waited for by megatron-core), so this one method is timed. With gloo the host
waits there until the slowest rank has come and the bytes have moved. With NCCL it is the device that waits, as part of what
it computes, and the span is next to nothing: there such waits are in `forward` and `backward`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._distributed_c10d import Work

from megarl.telemetry.clock import PhaseClock

LAYERS, GRADIENTS, RANKS = "wait_layers", "wait_gradients", "wait_ranks"
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
