"""The watchdog on nodes of the Ray cluster that hold no trainer rank: engines and reward workers there have stacks, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray

from megarl.cluster.ray_cluster import node_share, numbered_nodes
from megarl.cluster.watchdog_settings import WatcherSettings
from megarl.cluster.watcher import Watcher


def nodes_beside(num_trainer_nodes: int) -> list[int]:
    """The job's nodes behind those of the trainer; none where this process has joined no Ray, as for replayed rollouts."""
    return [number for number in sorted(numbered_nodes()) if number >= num_trainer_nodes] if ray.is_initialized() else []


class NodeWatcher:
    """Watches no rank: it follows node 0's watcher, which knows when to dump and when to end."""

    def watch(self, settings: str) -> None:
        """Until the run is over, or hangs; see `WatcherSettings.dump`. Then this actor is no more."""
        try:
            Watcher(WatcherSettings.load(settings)).watch()
        finally:
            ray.actor.exit_actor()


@contextmanager
def watched_nodes(settings: WatcherSettings | None, nodes: Sequence[int]) -> Iterator[None]:
    """On rank 0: within this the processes of these nodes are watched, by `settings` of node 0's own watcher's making."""
    actors: list[Any] = []
    try:
        for node in nodes:
            assert settings is not None, "given where there are such nodes"
            # Detached: it is to write its stacks also where the ranks, and with them this run's other actors, have ended.
            options = {"num_cpus": 0, "lifetime": "detached", "max_restarts": 0, "resources": node_share(node)}
            actors.append(ray.remote(NodeWatcher).options(**options).remote())
            actors[-1].watch.remote(replace(settings, node=node).dump())
        yield
    finally:
        for actor in actors if ray.is_initialized() else ():  # else it would start a Ray
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor, no_restart=True)
