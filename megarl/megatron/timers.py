"""Megatron-core's own timers, as spans of the phase that runs.

Megatron starts and stops them around micro-batches, what pipeline stages send each other, and the reduction of
gradients (checked with 0.16 and 0.19). On a GPU they time the host, which runs ahead of the device:
there a span is when the work was queued, and what the device still had to do is in the phase's span `device`. Collectives of
layers are timed in `collectives.py`.
"""

from __future__ import annotations

from typing import Any

from megarl.telemetry.clock import start_span, stop_span
from megarl.telemetry.progress import advance_work

_SPANS = {"forward-compute": "forward", "backward-compute": "backward", "forward-backward": "pipeline"}
MICRO_BATCH = ("forward", "backward")  # once each for every micro-batch and chunk
GRADIENTS, PIPELINE = "wait_gradients", "wait_pipeline"


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
