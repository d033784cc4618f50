"""Where the tokens of a rollout wait for the ranks that need them: in Ray's object store, found by name.

An ObjectRef that a process sends to another outside of Ray is pinned for the life of its owner, so every step would
leak its batch. A small named actor hands the references out inside Ray instead, and its forgetting frees them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray

from megarl.cluster.ray_cluster import NAMESPACE
from megarl.data.sample import Sample
from megarl.rollout.batch import GroupResult


class GroupStore:
    """Ray actor: references to the groups of the last batches."""

    def __init__(self, kept_batches: int) -> None:
        """`kept_batches`: as many as a step makes at most, and one more: one is in use until the next is trained on."""
        self._kept = kept_batches
        self._batches: dict[str, list[Any]] = {}

    def add(self, batch: str, references: list[Any]) -> None:
        """Keep a batch, and drop the oldest beyond `kept_batches`."""
        self._batches[batch] = references
        while len(self._batches) > self._kept:
            del self._batches[next(iter(self._batches))]

    def references(self, batch: str, positions: list[int]) -> list[Any]:
        """Raises KeyError for a batch that was dropped."""
        return [self._batches[batch][position] for position in positions]


@dataclass(frozen=True)
class StoredPayload:
    """Samples of a live batch; works in every process that is connected to the same Ray cluster."""

    store: str
    batch: str
    group_size: int
    timeout_s: float

    def fetch(self, sample_ids: Iterable[int]) -> dict[int, Sample]:
        """Raises ray.exceptions.GetTimeoutError at the deadline, KeyError for a batch that was dropped."""
        wanted = list(sample_ids)
        positions = sorted({s // self.group_size for s in wanted})
        store = ray.get_actor(self.store, namespace=NAMESPACE)
        references = ray.get(store.references.remote(self.batch, positions), timeout=self.timeout_s)
        results: list[GroupResult] = ray.get(references, timeout=self.timeout_s)
        groups = dict(zip(positions, results, strict=True))
        return {s: groups[s // self.group_size].sample(s % self.group_size) for s in wanted}
