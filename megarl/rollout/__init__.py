"""Rollout engines: vLLM in Ray actors, the pool over them, and what they hand back."""

from megarl.rollout.batch import GroupResult, RolloutBatch, dump_rollout
from megarl.rollout.cluster import join_cluster
from megarl.rollout.failure import RolloutError
from megarl.rollout.pool import EnginePool, open_pool
from megarl.rollout.replay import ReplayPool

__all__ = [
    "EnginePool",
    "GroupResult",
    "ReplayPool",
    "RolloutBatch",
    "RolloutError",
    "dump_rollout",
    "join_cluster",
    "open_pool",
]
