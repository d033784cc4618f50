"""Rollout engines: vLLM in Ray actors, the pool over them, and what they return. A reader starts with `pool.py`.

Only the errors live here. They are picklable, so that they keep their type on the way out of a Ray actor. Nothing is
imported: Ray's small actors import this package, and without torch each of them is 200 MB smaller.
"""

from __future__ import annotations


class RolloutError(RuntimeError):
    """A rollout cannot be finished; the message names the engine, the phase and the cause."""


class EngineSilent(RolloutError, TimeoutError):
    """An engine did not answer before its deadline."""


class StreamStalled(RolloutError, TimeoutError):
    """The stream of rollouts, or the store of its tokens, did nothing before its deadline."""


class TokensLost(RolloutError):
    """The tokens of a finished request were lost with their node; they can be sampled again where nothing has used them."""


class EngineDied(RuntimeError):
    """The process of an engine is gone; a new one can take its work."""


class EngineDirty(RuntimeError):
    """The engine's weights are unknown because a sync failed; it answers nothing until a sync succeeds."""
