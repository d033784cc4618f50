"""Recipe, nodes and Ray cluster fit each other, or it is said before anything starts which of them does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster import engine_nodes as nodes
from megarl.cluster.ray_cluster import ClusterError, join_cluster
from megarl.planner.placement import EnginePlace, PlacementError
from tests.planner.test_placement import of
from tests.ports import unused_port

ADDRESS = "10.0.0.1:6379"
DEADLINE_S = 560.0


def started(ranks: int, each: int, address: str | None = None) -> dict[str, str]:
    """What torchrun and the launcher say to rank 0."""
    variables = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(each), "LOCAL_RANK": "0"}
    return variables if address is None else variables | {"MEGARL_RAY_ADDRESS": address}


def have(monkeypatch: pytest.MonkeyPatch, gpus: list[int] | None, num_nodes: int = 1, are_peers: bool = True) -> None:
    """Ray nodes with so many GPUs, or without any; rank 0 sees those of the first, the last two of which may be no peers."""
    known = [{"Resources": {"GPU": float(count)}} for count in gpus or [0] * num_nodes]

    def pair_without_peer_access(devices: set[int]) -> tuple[int, int] | None:
        return None if are_peers or len(devices) < 2 else (max(devices) - 1, max(devices))

    device = SimpleNamespace(
        kind="cuda" if gpus else "cpu",
        num_devices=gpus[0] if gpus else None,
        pair_without_peer_access=pair_without_peer_access,
    )
    monkeypatch.setattr(nodes, "platform", device)
    monkeypatch.setattr(nodes, "ray_nodes", lambda address: known)


def test_engines_and_transport_follow_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where trainer and engines share devices, the rank on a worker's device serves it."""

    def stage(recipe: Any, *variables: Any) -> tuple[Any, ...]:
        chosen = nodes.set_stage(recipe, started(*variables))
        return chosen.engines, chosen.transport and chosen.transport.name, chosen.servers

    first, second = EnginePlace(0, (0,)), EnginePlace(1, (0,))
    have(monkeypatch, None)
    assert stage(of(2, engines=1), 2, 2) == ((first,), "mapped", ((0,),))
    assert stage(of(4, replay="rollouts"), 4, 2) == ((), None, ())
    have(monkeypatch, None, num_nodes=2)
    assert stage(of(4, engines=2), 4, 2, ADDRESS) == ((first, second), "group", ((0,), (2,)))
    assert stage(of(2, "separate"), 2, 2, ADDRESS) == ((second,), "group", ())
    have(monkeypatch, [4])
    assert stage(of(2, "separate", tensor=2), 2, 2) == ((EnginePlace(0, (2, 3)),), "mapped", ())
    have(monkeypatch, [4], are_peers=False)  # of the devices of ranks and engines, no others
    assert stage(of(2, "separate", tensor=2), 2, 2)[1] == "group"
    assert stage(of(2, engines=2), 2, 2)[1] == "group"
    assert stage(of(1, engines=1), 1, 1)[1] == "mapped"
    have(monkeypatch, [4, 8])  # the fewest count
    assert stage(of(8, tensor=4), 8, 4, ADDRESS) == ((EnginePlace(0, (0, 1, 2, 3)),), "group", ((0, 1, 2, 3),))
    assert stage(of(4, "separate", tensor=4), 4, 4, ADDRESS) == ((EnginePlace(1, (0, 1, 2, 3)),), "group", ())


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, None, num_nodes=2)
    for message, recipe, variables in (
        ("trainer.ranks = 4, but 2 ranks were started", of(4), started(2, 2)),
        ("4 trainer ranks are on 2 nodes, and MEGARL_RAY_ADDRESS names no Ray cluster", of(4), started(4, 2)),
        ("need 3 nodes, and there are 2", of(6), started(6, 2, ADDRESS)),
    ):
        with pytest.raises(PlacementError, match=message):
            nodes.set_stage(recipe, variables)
    have(monkeypatch, [4, 2])
    with pytest.raises(PlacementError, match="4 trainer ranks a node need 4 devices, and a node has 2"):
        nodes.set_stage(of(8), started(8, 4, ADDRESS))
    have(monkeypatch, [4, 0])
    with pytest.raises(ClusterError, match="node 1 has no GPU for Ray"):
        nodes.set_stage(of(8), started(8, 4, ADDRESS))
    have(monkeypatch, [2])
    nodes.check_local_device(started(4, 4) | {"LOCAL_RANK": "1"})
    with pytest.raises(PlacementError, match="4 trainer ranks were started on this node .* which has 2 GPUs"):
        nodes.check_local_device(started(4, 4) | {"LOCAL_RANK": "2"})


def test_an_address_without_ray_is_refused() -> None:
    port = unused_port()
    with pytest.raises(ClusterError, match=f"no Ray answers at 127.0.0.1:{port} within 10 s"):
        join_cluster(f"127.0.0.1:{port}")
    with pytest.raises(ClusterError, match="MEGARL_RAY_ADDRESS = node0 is not HOST:PORT"):
        join_cluster("node0")


def test_a_ray_cluster_over_two_nodes() -> None:
    """In a process of its own: Ray keeps for the life of one whether clusters ask for a token, and these do not."""
    file = Path(__file__).parents[1].joinpath("two_ray_nodes.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout[-8000:]
