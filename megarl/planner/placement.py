"""Which node and which devices every engine gets. No torch: the launcher asks before there is a device.

Trainer ranks fill nodes in order, `ranks_per_node` each, the first rank of a node on its device 0. An engine lies on
consecutive devices of one node: what its workers send each other in every layer does not leave the node.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.recipe.recipe import Recipe


class PlacementError(ValueError):
    """A recipe that does not fit the nodes it is to run on, with the arithmetic and a way out."""


@dataclass(frozen=True)
class Cluster:
    """Nodes that are alike. On CPUs `shared` is true and `devices_per_node` is `ranks_per_node`: processes share cores, so
    that engines are dealt over nodes, and any number of them fits."""

    num_nodes: int
    devices_per_node: int
    ranks_per_node: int  # trainer ranks of each node that has any
    shared: bool = False


@dataclass(frozen=True)
class EnginePlace:
    """An engine's node in the job, from 0, and its workers' devices there, in the order of the workers."""

    node: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class NodesNeeded:
    """The smallest job that holds a run: trainer ranks on the first nodes, and engines on `rollout_nodes` behind them, or
    on the trainer's where that is 0."""

    trainer_nodes: int
    rollout_nodes: int
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        return self.trainer_nodes + self.rollout_nodes

    def cluster(self, devices_per_node: int) -> Cluster:
        """These nodes, with so many GPUs each, or of CPUs where that is 0."""
        shared = devices_per_node == 0
        return Cluster(self.num_nodes, self.ranks_per_node if shared else devices_per_node, self.ranks_per_node, shared)


def place_engines(recipe: Recipe, cluster: Cluster) -> tuple[EnginePlace, ...]:
    """The place of each engine by its number; none where rollouts are replayed.

    `colocated` takes the trainer's nodes, `separate` all others, or where there are none the devices behind the trainer's.
    Engines go around these nodes. On GPUs none shares a device with another: two engines would halve its cache to do what
    one does with `phases.rollout.max_concurrent`. Raises PlacementError where the trainer or an engine has no room.
    """
    trainer_nodes = _trainer_nodes(recipe, cluster)
    if recipe.rollout.replay is not None:
        return ()
    first_node, first_device = 0, 0
    if recipe.rollout.placement == "separate":
        first_node = trainer_nodes if cluster.num_nodes > trainer_nodes else 0
        first_device = 0 if first_node else cluster.ranks_per_node
    end_node = trainer_nodes if first_node == 0 else cluster.num_nodes
    if cluster.shared:
        first_device = 0
    else:
        _check_room(recipe, cluster, end_node - first_node, first_device)
    places = []
    for engine in range(recipe.rollout.engines):
        turn, node = divmod(engine, end_node - first_node)
        start = first_device + turn * recipe.rollout.layout.workers
        devices = range(start, start + recipe.rollout.layout.workers)
        # Only of a shared node do devices come again: elsewhere there was room.
        places.append(EnginePlace(first_node + node, tuple(device % cluster.devices_per_node for device in devices)))
    return tuple(places)


def visible_devices(listed: str | None, devices: tuple[int, ...]) -> str:
    """The list of devices that a process is to see: some of those that its node `listed`, None for all of them. Raises
    PlacementError where the node lists fewer."""
    if listed is None:
        return ",".join(map(str, devices))
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if max(devices) >= len(names):
        raise PlacementError(
            f"device {max(devices)} of a node, from 0, is not among the {len(names)} that it lists: {listed}"
        )
    return ",".join(names[device] for device in devices)


def nodes_needed(recipe: Recipe, devices_per_node: int) -> NodesNeeded:
    """The fewest nodes for a recipe, each with as many trainer ranks. `separate` takes one node for all where trainer and
    engines fit beside each other, else nodes of their own. Raises PlacementError where no number of nodes would do."""
    ranks, rollout = recipe.trainer.ranks, recipe.rollout
    counts = [nodes for nodes in range(1, ranks + 1) if ranks % nodes == 0 and ranks // nodes <= devices_per_node]
    if rollout.replay is not None:
        return NodesNeeded(counts[0], 0, ranks // counts[0])
    per_node = devices_per_node // rollout.layout.workers
    if per_node == 0:
        raise PlacementError(_straddles(recipe, devices_per_node))
    if rollout.placement == "separate":
        if ranks + rollout.engines * rollout.layout.workers <= devices_per_node:
            return NodesNeeded(1, 0, ranks)
        return NodesNeeded(counts[0], -(-rollout.engines // per_node), ranks // counts[0])
    for nodes in counts:
        if nodes * per_node >= rollout.engines:
            return NodesNeeded(nodes, 0, ranks // nodes)
    raise PlacementError(
        f"{_demand(recipe)}, and trainer.ranks = {ranks} spread over {ranks} nodes of {devices_per_node}, a rank each, have "
        f"room for {ranks * per_node} engines: rollout.engines: {ranks * per_node}, or rollout.placement: separate"
    )


def nodes_with(recipe: Recipe, devices_per_node: int, ranks_per_node: int) -> NodesNeeded:
    """The fewest nodes where each of the trainer's takes just so many ranks; of CPUs where `devices_per_node` is 0. Raises
    PlacementError where no number of nodes would do."""
    trainer_nodes = -(-recipe.trainer.ranks // ranks_per_node)
    apart = recipe.rollout.replay is None and recipe.rollout.placement == "separate"
    failure: PlacementError | None = None
    for rollout_nodes in range(1 + (recipe.rollout.engines if apart else 0)):
        needed = NodesNeeded(trainer_nodes, rollout_nodes, ranks_per_node)
        try:
            place_engines(recipe, needed.cluster(devices_per_node))
            return needed
        except PlacementError as error:
            failure = error
    assert failure is not None
    raise failure


def _trainer_nodes(recipe: Recipe, cluster: Cluster) -> int:
    ranks, each = recipe.trainer.ranks, cluster.ranks_per_node
    if ranks % each:
        raise PlacementError(
            f"trainer.ranks = {ranks} cannot be dealt over nodes with {each} ranks each: give each node a divisor of {ranks}"
        )
    if not cluster.shared and each > cluster.devices_per_node:
        raise PlacementError(
            f"{each} trainer ranks a node need {each} devices, and a node has {cluster.devices_per_node}: "
            f"spread trainer.ranks = {ranks} over {-(-ranks // cluster.devices_per_node)} nodes or more, or lower it"
        )
    if ranks // each > cluster.num_nodes:
        raise PlacementError(
            f"trainer.ranks = {ranks}, {each} on each node, need {ranks // each} nodes, and there are {cluster.num_nodes}: "
            f"start {ranks // each} nodes, or trainer.ranks: {cluster.num_nodes * each}"
        )
    return ranks // each


def _check_room(recipe: Recipe, cluster: Cluster, num_nodes: int, taken: int) -> None:
    """Every engine finds devices on `num_nodes` nodes, on each of which the first `taken` are not for engines."""
    workers, free = recipe.rollout.layout.workers, cluster.devices_per_node - taken
    if workers > cluster.devices_per_node:
        raise PlacementError(_straddles(recipe, cluster.devices_per_node))
    room = num_nodes * (free // workers)
    if room >= recipe.rollout.engines:
        return
    nodes = f"{count(num_nodes, 'node')} with {count(free, 'device')}"
    if taken:
        nodes += f" that {count(taken, 'trainer rank')} leave of {cluster.devices_per_node}"
    separate = recipe.rollout.placement == "separate"
    ways = ["more nodes that have no trainer rank" if separate else "more nodes"]
    ways += [f"rollout.engines: {room}"] if room else []
    ways += ["rollout.placement: colocated"] if separate else []
    raise PlacementError(
        f"{_demand(recipe)}, each engine whole on one node and on devices that no other has, and {nodes} "
        f"{'has' if num_nodes == 1 else 'have'} room for {room}: {', or '.join(ways)}"
    )


def count(number: int, what: str) -> str:
    """As "1 node" or "2 nodes"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _demand(recipe: Recipe) -> str:
    rollout, workers = recipe.rollout, recipe.rollout.layout.workers
    return (
        f"rollout.placement = {rollout.placement}: rollout.engines = {rollout.engines} of tensor x pipeline x data = "
        f"{count(workers, 'worker')} need {count(rollout.engines * workers, 'device')}"
    )


def _straddles(recipe: Recipe, devices: int) -> str:
    rollout = recipe.rollout
    return (
        f"rollout.tensor x pipeline x data = {rollout.tensor} x {rollout.pipeline} x {rollout.data} = "
        f"{count(rollout.layout.workers, 'worker')} do not fit a node of {count(devices, 'device')}, and an engine lies "
        f"on one node: at most {count(devices, 'worker')}, and more rollout.engines"
    )
