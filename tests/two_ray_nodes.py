"""A real Ray cluster of two nodes: joined, refused for its version, and given an engine on each node.

`rollout/test_nodes.py` runs this file in a process of its own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from megarl.cluster import engine_nodes as nodes
from megarl.cluster.ray_cluster import ClusterError, join_cluster, numbered_nodes
from megarl.cluster.watchdog_judge import Deadlines
from megarl.cluster.watchdog_network import OtherWatchers, WatcherSettings
from megarl.cluster.watched import nodes_without_ranks, watch_nodes
from megarl.models.layout import RolloutLayout
from megarl.planner.placement import EnginePlace
from megarl.rollout import RolloutError
from megarl.rollout import handle as handle_module
from megarl.rollout.handle import EngineHandle
from tests.sink_cases import wait_for

DEADLINE_S = 240.0


@pytest.fixture
def two_nodes() -> Iterator[tuple[RayCluster, Any]]:
    """Ray nodes 0 and 1 of a job, both on this machine; this process has not joined."""
    # These daemons have no token, and would end the actors of a driver that has one.
    assert os.environ["RAY_AUTH_MODE"] == "disabled", "started by rollout/test_nodes.py"
    sizes = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = RayCluster(initialize_head=True, head_node_args=sizes | {"resources": {"megarl_node_0": 1}})
    try:
        yield cluster, cluster.add_node(num_cpus=1, object_store_memory=80 << 20, resources={"megarl_node_1": 1})
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_a_ray_cluster_over_two_nodes(two_nodes: tuple[RayCluster, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, second = two_nodes
    with monkeypatch.context() as patch:
        patch.setattr("ray._private.utils.compute_version_info", lambda: ("1.9.0", "3.9.2"))
        with pytest.raises(ClusterError, match=r"Ray: 2\..* Ray: 1.9.0 .*ray stop"):
            join_cluster(cluster.address)
    cluster_nodes = nodes.ray_nodes(cluster.address)
    assert [node["Resources"].get(f"megarl_node_{number}") for number, node in enumerate(cluster_nodes)] == [1, 1]

    class Placed:
        """In place of vLLM: says on which Ray node it is. A class of this function, which Ray sends along."""

        def __init__(self, settings: Any) -> None:
            self.settings = settings

        def start(self, version: int | None) -> str:
            return ray.get_runtime_context().get_node_id()

    monkeypatch.setattr(handle_module, "RolloutEngine", Placed)
    for node in (0, 1):
        settings: Any = SimpleNamespace(
            name=f"engine {node}", index=node, teacher="", layout=RolloutLayout(), place=EnginePlace(node, (0,))
        )
        engine = EngineHandle(settings, DEADLINE_S, 4)
        assert engine.get(engine.begin_start(), "start") == cluster_nodes[node]["NodeID"]
    _watch(1)
    cluster.remove_node(second)
    wait_for(lambda: 1 not in numbered_nodes())  # its daemons are gone, and the head hears of it
    with pytest.raises(RolloutError, match=r"node 1 is gone from the Ray cluster, which has the nodes \[0\] left"):
        engine.begin_start()


def _watch(node: int) -> None:
    """A watcher on this node follows that of node 0."""
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    settings = WatcherSettings("run", 0, 1, (), Deadlines(*[8.0] * 7), "token", listener=server.detach())
    master = OtherWatchers(settings)
    assert nodes_without_ranks(1) == [node]
    watch_nodes(replace(settings, master=address, listener=None), [node])
    wait_for(lambda: node in master._watchers)
