"""On which nodes and devices trainer ranks and engines lie, which transport of weights that allows, and a node's host
memory. No torch: the launcher asks before there is a device.

Trainer ranks fill nodes in order, `ranks_per_node` each, the first rank of a node on its device 0. An engine lies on
consecutive devices of one node: what its workers send each other in every layer does not leave the node.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from megarl.planner.forecast import USUAL_DEVICES, Job, job_of, on_devices, worst_memory
from megarl.planner.memory_estimate import gib, moved_away, optimizer_share
from megarl.planner.roles import adapter_weights, stage_weights
from megarl.recipe.device_section import with_gpus
from megarl.recipe.recipe import Recipe

# torch's pinned allocator rounds each allocation up to a power of two (ATen/core/CachingHostAllocator.h). Sizes that are as
# likely in each octave grow by 1 / ln 2 on average.
PINNED_ROUNDING = 1 / math.log(2)
# As in `cluster/ray_cluster.py`, which is on a higher floor; a test keeps them equal.
OBJECT_STORE_BYTES = 256 << 20
# Resident memory of one process: Python, torch and its libraries, on a GPU those of CUDA too. Not yet measured on a GPU.
PROCESS_BYTES = {"gpu": 4 << 30, "cpu": 1 << 30}


class PlacementError(ValueError):
    """A recipe that does not fit the nodes it is to run on, with the arithmetic and a way out."""


class Transport(NamedTuple):
    """A transport and the reason for it; `is_final` if the run may not take another one where shared memory is too small."""

    name: str
    reason: str
    is_final: bool = True

    @property
    def text(self) -> str:
        return f"{self.name}, because {self.reason}"


def choose_transport(
    wanted: str, one_host: bool, obstacle: str | None = None, no_peer_access: tuple[int, int] | None = None
) -> Transport:
    """Resolve `weight_sync.transport`: `auto` takes `mapped` where trainer ranks and engines are on one host; otherwise
    `group`.

    `obstacle` says what in the recipe rules out mapping. `no_peer_access` names two of the run's devices on one host
    that cannot reach each other's memory. Raises PlacementError where this machine, or this run, cannot have the wanted
    transport.
    """
    if not one_host:
        obstacle = "trainer ranks and engines are on several hosts"
    elif obstacle is None and no_peer_access is not None:
        obstacle = "GPUs {} and {} cannot reach each other's memory (no peer access)".format(*no_peer_access)
    if wanted == "mapped" and obstacle is not None:
        raise PlacementError(f"weight_sync.transport = mapped: {obstacle}; use auto")
    if wanted != "auto":
        return Transport(wanted, "weight_sync.transport says so")
    if obstacle is not None:
        return Transport("group", obstacle)
    return Transport("mapped", "trainer ranks and engines share one host", is_final=False)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes. On CPUs `shared` is true and `devices_per_node` is `ranks_per_node`: processes share cores, so that any
    number of engines fits."""

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
    """The smallest job that holds a run: trainer ranks on the first nodes, and engines on `rollout_nodes` after them, or on
    the trainer's nodes where that is 0."""

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

    `colocated` takes the trainer's nodes, `separate` all others, or, without other nodes, the devices after the trainer's.
    Engines go round-robin over these nodes. On GPUs no two engines share a device: they would halve its cache to do what one
    does with `phases.rollout.max_concurrent`. Raises PlacementError where the trainer or an engine has no room.
    """
    trainer_nodes = _trainer_nodes(recipe, cluster)
    if not recipe.has_engines:
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
        # Devices repeat on shared nodes only; elsewhere there was room.
        places.append(EnginePlace(first_node + node, tuple(device % cluster.devices_per_node for device in devices)))
    return tuple(places)


def place_teachers(recipe: Recipe, cluster: Cluster, engines: Sequence[EnginePlace]) -> tuple[EnginePlace, ...]:
    """The place of each teacher's engine, in the order of `recipe.served`: on the first node with enough devices after those
    of the trainer and of the rollout `engines`. On CPUs on node 0. Raises PlacementError where one has no room."""
    trainer_nodes = _trainer_nodes(recipe, cluster)
    taken = [cluster.ranks_per_node if node < trainer_nodes else 0 for node in range(cluster.num_nodes)]
    for engine in engines:
        taken[engine.node] = max(taken[engine.node], 1 + max(engine.devices))
    places = []
    for name, section in recipe.served.items():
        workers, devices = section.layout.workers, cluster.devices_per_node
        node = 0 if cluster.shared else next((node for node, used in enumerate(taken) if used + workers <= devices), None)
        if node is None:
            raise PlacementError(
                f"teachers.{name}.engine needs {count(workers, 'device')} of one node that neither the trainer nor another "
                f"engine has; no node has as many left ({count(cluster.num_nodes, 'node')} of {count(devices, 'device')}): "
                f"more nodes, a smaller teachers.{name}.engine.tensor, or remove teachers.{name}.engine"
            )
        start = 0 if cluster.shared else taken[node]
        places.append(EnginePlace(node, tuple(device % devices for device in range(start, start + workers))))
        taken[node] += workers
    return tuple(places)


def visible_devices(listed: str | None, devices: tuple[int, ...]) -> str:
    """The list of `devices` for a process, by the names that its node `listed`; None: the node lists no devices. Raises
    PlacementError where the node lists fewer."""
    if listed is None:
        return ",".join(map(str, devices))
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if max(devices) >= len(names):
        raise PlacementError(
            f"device {max(devices)} of a node, from 0, is not among the {len(names)} that it lists: {listed}"
        )
    return ",".join(names[device] for device in devices)


def nodes_needed(recipe: Recipe, devices_per_node: int, ranks_per_node: int | None = None) -> NodesNeeded:
    """The fewest nodes for a recipe, each of the trainer's with `ranks_per_node` ranks, or as many as fit; of CPUs where
    `devices_per_node` is 0. `separate` takes devices of the trainer's nodes where all engines fit there, else nodes for
    engines only. Raises PlacementError where no number of nodes is enough, and where `weight_sync.transport` does not reach
    the engines on these nodes."""
    ranks, failure = recipe.trainer.ranks, PlacementError("")
    apart = recipe.has_engines and recipe.rollout.placement == "separate"
    divisors = [ranks // nodes for nodes in range(1, ranks + 1) if ranks % nodes == 0 and ranks // nodes <= devices_per_node]
    for each in divisors if ranks_per_node is None else [ranks_per_node]:
        for rollout_nodes in range(1 + (recipe.rollout.engines if apart else 0) + len(recipe.served)):
            needed = NodesNeeded(-(-ranks // each), rollout_nodes, each)
            try:
                cluster = needed.cluster(devices_per_node)
                engines = place_engines(recipe, cluster)
                place_teachers(recipe, cluster, engines)
            except PlacementError as error:
                failure = error
                continue
            if recipe.has_engines:
                one_host = needed.trainer_nodes == 1 and all(place.node == 0 for place in engines)
                choose_transport(recipe.weight_sync.transport, one_host)
            return needed
    raise failure


def _trainer_nodes(recipe: Recipe, cluster: Cluster) -> int:
    ranks, each = recipe.trainer.ranks, cluster.ranks_per_node
    if ranks % each:
        raise PlacementError(
            f"trainer.ranks = {ranks} cannot be spread over nodes with {each} ranks each: use a divisor of {ranks}"
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
    """Raise PlacementError unless `num_nodes` nodes have devices for all engines; the first `taken` of each are not free."""
    rollout, workers, devices = recipe.rollout, recipe.rollout.layout.workers, cluster.devices_per_node
    if workers > devices:
        raise PlacementError(
            f"rollout.tensor x pipeline x data = {rollout.tensor} x {rollout.pipeline} x {rollout.data} = "
            f"{count(workers, 'worker')} do not fit a node of {count(devices, 'device')}, and an engine lies on one node: "
            "fewer workers, and more rollout.engines"
        )
    room = num_nodes * ((devices - taken) // workers)
    if room < rollout.engines:
        other = "colocated" if rollout.placement == "separate" else "separate"
        raise PlacementError(
            f"rollout.placement = {rollout.placement}: rollout.engines = {rollout.engines} of {count(workers, 'worker')}, "
            f"each on one node and on devices that no other engine has, and {count(num_nodes, 'node')} with "
            f"{count(devices - taken, 'free device')} each: room for {room}; fewer rollout.engines, more nodes, or "
            f"rollout.placement: {other}"
        )


def count(number: int, noun: str) -> str:
    """As "1 node" or "2 nodes"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class NodeSize:
    """Nodes of `devices` GPUs each, or of CPUs where that is 0, with `ranks` trainer ranks each, or as many as fit. `origin`
    says where the size comes from."""

    devices: int
    ranks: int | None
    origin: str

    @property
    def text(self) -> str:
        return f"of {count(self.devices, 'GPU')}" if self.devices else "of CPUs"


@dataclass(frozen=True)
class PlacedRun:
    """A recipe on the fewest nodes that hold it, the place of each engine by its number and of each teacher's, and the host
    memory of the fullest node; None without a device."""

    size: NodeSize
    needed: NodesNeeded
    engines: tuple[EnginePlace, ...]
    teachers: tuple[EnginePlace, ...] = ()
    host: dict[str, int] | None = None


def local_gpus(directory: Path = Path("/dev")) -> int:
    """GPUs of this machine, by their device files: asking torch would take seconds."""
    return sum(re.fullmatch(r"nvidia\d+", file.name) is not None for file in directory.iterdir())


def node_size(recipe: Recipe, devices: int | None, ranks: int | None, gpus: int) -> NodeSize:
    """The given size, or without `devices` what the recipe's device or this machine, which has `gpus` GPUs, makes likely."""
    if devices is not None:
        return NodeSize(devices, ranks, f"--devices-per-node = {devices}")
    if recipe.device is not None and recipe.device.kind == "cpu":
        return NodeSize(0, ranks, "device.kind = cpu")
    if recipe.device is not None:  # the cluster's, not that of whoever checks the recipe
        return NodeSize(USUAL_DEVICES, ranks, "others with --devices-per-node")
    if gpus:
        return NodeSize(gpus, ranks, "as this machine")
    return NodeSize(0, ranks, "as this machine; GPUs with --devices-per-node")


def refuse_devices(recipe: Recipe, devices_per_node: int) -> None:
    """Raise PlacementError where a recipe cannot run on nodes with so many GPUs, or on those of CPUs where that is 0."""
    if recipe.device is not None and recipe.device.kind == "cpu" and devices_per_node:
        raise PlacementError(
            f"--devices-per-node = {devices_per_node} plans GPUs, and device.kind = cpu: use --devices-per-node 0, or "
            "device.kind: gpu"
        )
    if recipe.device is not None and recipe.device.kind == "gpu" and not devices_per_node:
        raise PlacementError(
            f"--devices-per-node = 0 plans CPUs, and device.kind = gpu: use --devices-per-node {USUAL_DEVICES}, or "
            "device.kind: cpu"
        )
    violation = next(with_gpus(recipe), None) if devices_per_node else None
    if violation is not None:
        raise PlacementError(f"{violation}; on CPUs use --devices-per-node 0")


def find_placement(recipe: Recipe, devices: int | None, ranks: int | None) -> PlacedRun:
    """The placement on the given nodes, or on likely ones. Raises PlacementError, also where a node's host has too little
    memory (`device.host_memory_gib`)."""
    size = node_size(recipe, devices, ranks, local_gpus())
    refuse_devices(recipe, size.devices)
    placed = place(recipe, size)
    return replace(placed, host=host_memory(recipe, placed.needed, placed.engines))


def place(recipe: Recipe, size: NodeSize) -> PlacedRun:
    """Raises PlacementError, with the arithmetic, where no number of such nodes is enough. On CPUs, where nothing says how
    many ranks a node takes, all ranks are on one node, as `megarl train` starts them."""
    try:
        ranks = size.ranks if size.devices else size.ranks or recipe.trainer.ranks
        needed = nodes_needed(recipe, size.devices, ranks)
        cluster = needed.cluster(size.devices)
        engines = place_engines(recipe, cluster)
        return PlacedRun(size, needed, engines, place_teachers(recipe, cluster, engines))
    except PlacementError as error:
        raise PlacementError(f"on nodes {size.text} ({size.origin}): {error}") from error


def placement_lines(recipe: Recipe, placed: PlacedRun) -> list[str]:
    """The placement in words: how many nodes, the trainer ranks of each, and the place of each engine."""
    needed, last = placed.needed, placed.needed.trainer_nodes - 1
    head = f"placement: {count(needed.num_nodes, 'node')} {placed.size.text} ({placed.size.origin})"
    nodes = f"nodes 0-{last}, {needed.ranks_per_node} on each" if last else "node 0"
    lines = [head, f"  {count(recipe.trainer.ranks, 'trainer rank')}: {nodes}"]
    if recipe.has_engines:
        lines[0] += f", rollout.placement = {recipe.rollout.placement}"
    places = {f"engine {number}": engine for number, engine in enumerate(placed.engines)}
    places |= {f"engine of teachers.{name}": engine for name, engine in zip(recipe.served, placed.teachers, strict=True)}
    for name, engine in places.items():
        devices = f", devices {', '.join(map(str, engine.devices))}" if placed.size.devices else ""
        lines.append(f"  {name}: node {engine.node}{devices}")
    if placed.host is not None and recipe.device is not None:
        room = recipe.device.host_memory_gib
        verdict = "device.host_memory_gib is not stated" if room is None else f"of {room:g} GiB: fits"
        lines.append(f"host memory of a node: up to {host_text(placed.host)}; {verdict}")
    return lines


def document(placed: PlacedRun) -> dict[str, Any]:
    """The placement for a program."""
    return {
        "devices_per_node": placed.size.devices,
        "ranks_per_node": placed.needed.ranks_per_node,
        "trainer_nodes": placed.needed.trainer_nodes,
        "rollout_nodes": placed.needed.rollout_nodes,
        "host_memory": None if placed.host is None else placed.host | {"total": sum(placed.host.values())},
        "engines": [{"node": engine.node, "devices": list(engine.devices)} for engine in placed.engines],
        "teachers": [{"node": engine.node, "devices": list(engine.devices)} for engine in placed.teachers],
    }


def host_text(parts: Mapping[str, int]) -> str:
    """The total of a node's host memory and its parts in words."""
    named = ", ".join(f"{name.replace('_', ' ')} {gib(size)}" for name, size in parts.items() if size)
    return f"{gib(sum(parts.values()))} ({named})"


def host_memory(recipe: Recipe, needed: NodesNeeded, engines: tuple[EnginePlace, ...]) -> dict[str, int] | None:
    """Bytes of the fullest node's host by what holds them; None without a device, whose kind says what lies there.

    `devices` is what trainer ranks and engines hold, where their device is a CPU; `offloaded` what roles keep there between
    their phases; `teacher_rows` what teachers gave for each token of a step; `activations` what an update offloads, pinned
    copies as large as torch makes them; `checkpoint` the optimizer states that each rank gathers to save them; `weight_sync`
    the weights that `wire: delta` compares with; `processes` what each process takes before it holds anything.

    Raises PlacementError where it is more than `device.host_memory_gib`.
    """
    if recipe.device is None:
        return None
    job, ranks = job_of(recipe), needed.ranks_per_node
    on_node = Counter(place.node for place in engines)
    trainer = max((number for node, number in on_node.items() if node < needed.trainer_nodes), default=0)
    others = [_host_memory_of(recipe, job, 0, number) for node, number in on_node.items() if node >= needed.trainer_nodes]
    fullest = max([_host_memory_of(recipe, job, ranks, trainer), *others], key=lambda parts: sum(parts.values()))
    room = recipe.device.host_memory_gib
    if room is not None and sum(fullest.values()) > room * 2**30:
        raise PlacementError(
            f"device.host_memory_gib = {room:g}: a node takes up to {host_text(fullest)}: a smaller memory.offload or "
            "memory.offload_activations, smaller engines or roles, fewer trainer ranks a node (--ranks-per-node), or a "
            "larger host"
        )
    return fullest


def _host_memory_of(recipe: Recipe, job: Job, ranks: int, engines: int) -> dict[str, int]:
    """A node with so many trainer ranks and engines."""
    assert recipe.device is not None, "host memory is that of a device"
    kind, workers = recipe.device.kind, engines * recipe.rollout.layout.workers
    teachers = job.teachers.values() if ranks else ()  # counted on nodes with trainer ranks only
    rounding = PINNED_ROUNDING if kind == "gpu" else 1.0
    update_roles = [replace(role, memory=role.memory.model_copy(update={"offload": "none"})) for role in job.roles]
    updates = [schedule for schedule in job.schedules if schedule.is_update]
    activations = max(worst_memory(replace(job, roles=tuple(update_roles)), schedule).host for schedule in updates)
    # fp32 weights and moments of the parameters that one rank saves (`megatron/checkpoint.py`, `_states_of_owned`).
    saved = max(3 * 4 * optimizer_share(role, stage) for role in job.roles for stage in range(role.layout.pipeline))
    devices = weight_sync = routing = 0
    if kind == "cpu":
        worst = {schedule.phase: worst_memory(job, schedule) for schedule in job.schedules}
        trainer = max(memory.total for memory in on_devices(replace(job, engines=None), worst).values())
        devices = ranks * trainer + (0 if job.engines is None else workers * job.engines.memory.total)
        devices += sum(teacher.workers * teacher.memory.total for teacher in teachers)
    if job.engines is not None and recipe.weight_sync.wire == "delta":  # both ends keep the weights that were sent last
        actor = job.roles[0]
        sent = max(stage_weights(actor, stage) + adapter_weights(actor, stage) for stage in range(actor.layout.pipeline))
        weight_sync = sent * actor.bytes_per_weight * ranks + job.engines.memory.weights * workers
    if ranks and recipe.actor.router_replay and (experts := job.roles[0].shape.experts) is not None:
        # The experts' choice of a whole batch, which the first node gets.
        shape = job.roles[0].shape
        choices = sum(map(shape.has_experts, range(shape.num_layers))) * experts.per_token
        routing = recipe.num_sequences * recipe.max_sequence_tokens * choices * (1 if experts.count <= 256 else 2)
    return {
        "devices": devices,
        "offloaded": int(rounding * moved_away(job.roles)) * ranks,
        "activations": int(rounding * activations) * ranks,
        "checkpoint": saved * ranks,
        "weight_sync": weight_sync,
        "routing": routing,
        "teacher_rows": _teacher_row_bytes(recipe, job) * ranks,
        "ray": OBJECT_STORE_BYTES,
        # Each engine has a process besides its workers.
        "processes": PROCESS_BYTES[kind] * (ranks + workers + engines + sum(teacher.workers + 1 for teacher in teachers)),
    }


def _teacher_row_bytes(recipe: Recipe, job: Job) -> int:
    """Bytes of a rank for the rows that teachers give and that the actor's update reads: of the tokens that it judges, and
    of those that it trains on."""
    actor, tokens, rows = job.roles[0], recipe.num_sequences * recipe.max_own_tokens, 0
    for teacher in job.roles[1:]:
        if (section := teacher.distillation) is not None:
            width = 8 * section.top_k if section.top_k else teacher.shape.hidden * teacher.bytes_per_weight
            rows = max(rows, (tokens // teacher.layout.data + tokens // actor.layout.data) * width)
    return rows
