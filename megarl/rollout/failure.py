"""Errors of rollout engines, picklable, so that they keep their type on the way out of a Ray actor."""

from __future__ import annotations


class RolloutError(RuntimeError):
    """A rollout that cannot be finished; the message names the engine, the phase and the cause."""


class EngineSilent(RolloutError, TimeoutError):
    """An engine that has not answered by its deadline."""


class EngineDied(RuntimeError):
    """The process behind an engine is gone; a new one can take its work."""


class EngineDirty(RuntimeError):
    """The engine's weights are unknown since a sync failed; it answers nothing until a sync succeeds."""
