"""Find a job's nodes, place the engines and choose the weight transport, on rank 0 before any process group exists."""

from __future__ import annotations

import platform as python_platform
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray

from megarl.cluster.ray_cluster import ClusterError, join_cluster, numbered_nodes
from megarl.planner.placement import (
    Cluster,
    EnginePlace,
    PlacementError,
    Transport,
    choose_transport,
    place_engines,
    place_teachers,
)
from megarl.platform import current as platform
from megarl.recipe.recipe import Recipe
from megarl.recipe.weight_sync_section import obstacle_to_mapping


class Stage(NamedTuple):
    """The place of each engine, and the weight transport (None if no weights are synced). `servers`, by engine and worker,
    are the trainer ranks on the device of each worker if trainer and engines share devices. `teachers` are the places of the
    engines of `recipe.served`."""

    engines: tuple[EnginePlace, ...]
    transport: Transport | None
    servers: tuple[tuple[int, ...], ...] = ()
    teachers: tuple[EnginePlace, ...] = ()


def set_stage(recipe: Recipe, variables: Mapping[str, str]) -> Stage:
    """Find this job's nodes, place the engines, and choose a transport. `variables` come from torchrun and the launcher.

    Raises PlacementError or ClusterError with the numbers if recipe, nodes and Ray cluster do not fit.
    """
    cluster = find_cluster(recipe, variables)
    places = place_engines(recipe, cluster)
    if not recipe.has_engines:
        return Stage(places, None)
    one_node = int(variables["WORLD_SIZE"]) == cluster.ranks_per_node and all(place.node == 0 for place in places)
    separate = recipe.rollout.placement == "separate"
    devices = {*range(cluster.ranks_per_node), *(device for place in places for device in place.devices)}
    no_peer_access = platform.pair_without_peer_access(devices) if one_node else None
    obstacle = obstacle_to_mapping(recipe, platform.kind == "cpu")
    transport = choose_transport(recipe.weight_sync.transport, one_node, obstacle, no_peer_access)
    servers = () if separate else servers_of(places, int(variables["WORLD_SIZE"]), cluster.ranks_per_node)
    return Stage(places, transport, servers, place_teachers(recipe, cluster, places))


def servers_of(places: Sequence[EnginePlace], ranks: int, ranks_per_node: int) -> tuple[tuple[int, ...], ...]:
    """Return the trainer rank on the device of each worker, by engine; empty if a node has no trainer rank."""
    if any((place.node + 1) * ranks_per_node > ranks for place in places):
        return ()
    return tuple(
        tuple(place.node * ranks_per_node + device % ranks_per_node for device in place.devices) for place in places
    )


def find_cluster(recipe: Recipe, variables: Mapping[str, str]) -> Cluster:
    """Join the Ray cluster at MEGARL_RAY_ADDRESS and return its nodes; without one, return the nodes of torchrun's ranks.

    Raises PlacementError for ranks on several nodes without a Ray cluster, ClusterError for an unsuitable cluster.
    """
    ranks, ranks_per_node = int(variables["WORLD_SIZE"]), int(variables["LOCAL_WORLD_SIZE"])
    if ranks != recipe.trainer.ranks:
        raise PlacementError(f"trainer.ranks = {recipe.trainer.ranks}, but {ranks} ranks were started; start as many")
    address = variables.get("MEGARL_RAY_ADDRESS")
    devices = platform.num_devices
    if address is not None and recipe.has_engines:
        nodes = ray_nodes(address)
        if devices is not None:
            devices_by_node = {number: int(node["Resources"].get("GPU", 0)) for number, node in enumerate(nodes)}
            number, devices = min(devices_by_node.items(), key=lambda item: item[1])
            if not devices:
                raise ClusterError(
                    f"node {number} has no GPU for Ray, and trainer rank 0 has some: GPUs by node are {devices_by_node}"
                )
        return Cluster(len(nodes), devices or ranks_per_node, ranks_per_node, shared=devices is None)
    num_nodes = ranks // ranks_per_node
    if num_nodes > 1 and recipe.has_engines:
        raise PlacementError(
            f"{ranks} trainer ranks are on {num_nodes} nodes, and MEGARL_RAY_ADDRESS names no Ray cluster over these for "
            f"the engines: start the job through launch/node.sh, which makes one"
        )
    return Cluster(num_nodes, devices or ranks_per_node, ranks_per_node, shared=devices is None)


def one_machine(recipe: Recipe) -> Cluster:
    """Return this machine as the whole cluster, for a pool without torchrun."""
    ranks = recipe.trainer.ranks
    return Cluster(1, platform.num_devices or ranks, ranks, shared=platform.num_devices is None)


def ray_nodes(address: str) -> list[dict[str, Any]]:
    """Join the launcher's Ray cluster and return its nodes in order, as `ray.nodes` describes them. Raises ClusterError for
    a cluster without numbered nodes. The doctor has compared the nodes' package versions (`launch/node.sh`)."""
    join_cluster(address)
    nodes = numbered_nodes()
    alive = [node for node in ray.nodes() if node["Alive"]]
    if not nodes and len(alive) == 1:
        return alive
    numbers = sorted(nodes)
    if numbers != list(range(len(alive))):
        raise ClusterError(
            f"the Ray cluster at {address} has {len(alive)} nodes, and those with a number of this job's "
            f"(resource megarl_node_<number>) are {numbers}: end that Ray on every node (ray stop) and start the job again "
            "through launch/node.sh"
        )
    return [nodes[number] for number in numbers]


def check_local_device(variables: Mapping[str, str]) -> None:
    """Check that this rank has a device. Raises PlacementError on a node's first rank without one."""
    devices, ranks = platform.num_devices, int(variables["LOCAL_WORLD_SIZE"])
    if devices is not None and int(variables["LOCAL_RANK"]) == devices:
        raise PlacementError(
            f"{ranks} trainer ranks were started on this node ({python_platform.node()}), which has {devices} GPUs: start "
            f"as many ranks as GPUs on each node, and more nodes"
        )
