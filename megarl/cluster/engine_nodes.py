"""The nodes that a job has, and whether its recipe fits them: asked on trainer rank 0 before any process group is made."""

from __future__ import annotations

import platform as python_platform
from collections.abc import Mapping
from typing import Any, NamedTuple

import ray

from megarl.cluster.job_environment import package_versions
from megarl.cluster.ray_cluster import ClusterError, join_cluster, node_share, numbered_nodes, own_node
from megarl.planner.placement import Cluster, EnginePlace, PlacementError, place_engines
from megarl.platform import current as platform
from megarl.recipe.recipe import Recipe
from megarl.weight_sync.choice import choose_transport

# A first task on a node starts a Python there.
NODE_ANSWER_S = 120.0
WAY_OUT = "end that Ray on every node (ray stop) and start the job again through launch/node.sh"


class Stage(NamedTuple):
    """Where a run takes place: each engine's place, and how weights reach them; "" where nothing is synced."""

    engines: tuple[EnginePlace, ...]
    transport: str


def set_stage(recipe: Recipe, variables: Mapping[str, str]) -> Stage:
    """Find the nodes of this job and place the engines there. `variables` are torchrun's and the launcher's.

    Raises ValueError (PlacementError, ClusterError) where recipe, nodes and Ray cluster do not fit, with the numbers.
    """
    cluster = find_cluster(recipe, variables)
    places = place_engines(recipe, cluster)
    if recipe.rollout.replay is not None:
        return Stage(places, "")
    one_node = int(variables["WORLD_SIZE"]) == cluster.ranks_per_node and all(place.node == 0 for place in places)
    separate = recipe.rollout.placement == "separate"
    devices = {*range(cluster.ranks_per_node), *(device for place in places for device in place.devices)}
    no_peer_access = platform.pair_without_peer_access(devices) if one_node else None
    transport = choose_transport(recipe.weight_sync.transport, platform.kind, one_node, separate, no_peer_access)
    _check_master(variables["MASTER_ADDR"], places)
    return Stage(places, transport)


def find_cluster(recipe: Recipe, variables: Mapping[str, str]) -> Cluster:
    """The job's nodes: those of the Ray cluster at MEGARL_RAY_ADDRESS, else those that torchrun has ranks on.

    Joins that Ray cluster. Raises PlacementError for ranks on several nodes without one, ClusterError for one that this
    process does not fit.
    """
    ranks, each = int(variables["WORLD_SIZE"]), int(variables["LOCAL_WORLD_SIZE"])
    if ranks != recipe.trainer.ranks:
        raise PlacementError(f"trainer.ranks = {recipe.trainer.ranks}, but {ranks} ranks were started; start as many")
    address = variables.get("MEGARL_RAY_ADDRESS")
    devices = platform.num_devices
    if address is not None and recipe.rollout.replay is None:
        nodes = ray_nodes(address)
        if devices is not None:
            devices = _fewest_devices(nodes)
        return Cluster(len(nodes), devices or each, each, shared=devices is None)
    num_nodes = ranks // each
    if num_nodes > 1 and recipe.rollout.replay is None:
        raise PlacementError(
            f"{ranks} trainer ranks are on {num_nodes} nodes, and MEGARL_RAY_ADDRESS names no Ray cluster over these for "
            f"the engines: start the job through launch/node.sh, which makes one"
        )
    return Cluster(num_nodes, devices or each, each, shared=devices is None)


def one_machine(recipe: Recipe) -> Cluster:
    """This machine alone, for a pool without torchrun."""
    ranks = recipe.trainer.ranks
    return Cluster(1, platform.num_devices or ranks, ranks, shared=platform.num_devices is None)


def ray_nodes(address: str) -> list[dict[str, Any]]:
    """Join the launcher's Ray cluster; its nodes by their numbers, as `ray.nodes` has them. Raises ClusterError for one that
    no launcher made, or that has other versions than this process."""
    join_cluster(address)
    nodes = numbered_nodes()
    alive = [node for node in ray.nodes() if node["Alive"]]
    if not nodes and len(alive) == 1:
        return alive
    if sorted(nodes) != list(range(len(alive))):
        raise ClusterError(
            f"the Ray cluster at {address} has {len(alive)} nodes, and those with a number of this job's "
            f"(resource megarl_node_<number>) are {sorted(nodes)}: {WAY_OUT}"
        )
    if own_node() != 0:
        raise ClusterError(f"trainer rank 0 is on node {own_node()} of the Ray cluster at {address}, not on 0: {WAY_OUT}")
    _compare(address, sorted(nodes))
    return [nodes[number] for number in sorted(nodes)]


def _compare(address: str, numbers: list[int]) -> None:
    """Every node's Python sees the versions that this one sees."""
    remote = ray.remote(package_versions)
    answers = [remote.options(num_cpus=0, resources=node_share(number)).remote() for number in numbers]
    own = package_versions()
    for number, answer in zip(numbers, answers, strict=True):
        try:
            theirs = ray.get(answer, timeout=NODE_ANSWER_S)
        except (ray.exceptions.RayError, ImportError) as error:
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise ClusterError(
                f"node {number} of the Ray cluster at {address} cannot run megarl {own['megarl']}: {reason}; {WAY_OUT}"
            ) from error
        unlike = [f"{name} {theirs.get(name, 'none')}, not {version}" for name, version in own.items()
                  if theirs.get(name) != version]  # fmt: skip
        if unlike:
            raise ClusterError(f"node {number} of the Ray cluster at {address} has {'; '.join(unlike)}: {WAY_OUT}")


def _fewest_devices(nodes: list[dict[str, Any]]) -> int:
    """GPUs that every node has. Raises ClusterError for a node without any."""
    counts = {number: int(node["Resources"].get("GPU", 0)) for number, node in enumerate(nodes)}
    fewest = min(counts, key=lambda number: counts[number])
    if not counts[fewest]:
        raise ClusterError(f"node {fewest} has no GPU for Ray, and trainer rank 0 has some: GPUs by node are {counts}")
    return counts[fewest]


def _check_master(address: str, places: tuple[EnginePlace, ...]) -> None:
    """Engines of other nodes must find what rank 0 offers them."""
    away = next((number for number, place in enumerate(places) if place.node), None)
    if away is not None and (address == "localhost" or address.startswith("127.")):
        raise PlacementError(
            f"rollout engine {away} is on node {places[away].node}, and MASTER_ADDR = {address} leads nowhere from there: "
            f"give torchrun an address of node 0 that the others reach (MASTER_ADDRESS in launch/node.sh)"
        )


def check_local_device(variables: Mapping[str, str]) -> None:
    """This rank has a device. Raises PlacementError with the numbers, of a node's ranks without one on the first alone."""
    devices, each = platform.num_devices, int(variables["LOCAL_WORLD_SIZE"])
    if devices is not None and int(variables["LOCAL_RANK"]) == devices:
        raise PlacementError(
            f"{each} trainer ranks were started on this node ({python_platform.node()}), which has {devices} GPUs: start as "
            f"many ranks as GPUs on each node, and more nodes"
        )
