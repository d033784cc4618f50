"""On which nodes and devices a recipe's trainer ranks and engines lie, for nodes of one size: what `megarl check` prints."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from megarl.planner.advice import gib
from megarl.planner.forecast import Job, job_of, on_devices, worst_memory
from megarl.planner.memory import moved_away, optimizer_share
from megarl.planner.placement import EnginePlace, NodesNeeded, PlacementError, count, nodes_needed, nodes_with, place_engines
from megarl.planner.roles import adapter_weights, stage_weights
from megarl.recipe import Recipe
from megarl.recipe.weight_sync_section import BUCKET_BYTES

# GPUs of a node where nobody says: those that `megarl launch` takes.
USUAL_DEVICES = 8
_GPU = re.compile(r"nvidia\d+")


@dataclass(frozen=True)
class NodeSize:
    """Nodes of `devices` GPUs each, or of CPUs where that is 0; `ranks` trainer ranks on each of the trainer's, or as many
    as fit. `origin` says who said so."""

    devices: int
    ranks: int | None
    origin: str


@dataclass(frozen=True)
class Placed:
    """A recipe on the fewest nodes that hold it, where each engine lies, by its number, and the host memory of the fullest
    node; None without a device."""

    size: NodeSize
    needed: NodesNeeded
    engines: tuple[EnginePlace, ...]
    host: HostMemory | None = None


def node_size(recipe: Recipe, devices: int | None, ranks: int | None, own_devices: int) -> NodeSize:
    """The nodes that were asked about; without `devices` those that the recipe's device or this machine, which has
    `own_devices` GPUs, makes likely."""
    if devices is not None:
        return NodeSize(devices, ranks, f"--devices-per-node = {devices}")
    if recipe.device is not None and recipe.device.kind == "cpu":
        return NodeSize(0, ranks, "device.kind = cpu")
    if recipe.device is not None:  # the cluster's, not that of whoever checks the recipe
        return NodeSize(USUAL_DEVICES, ranks, "others with --devices-per-node")
    if own_devices:
        return NodeSize(own_devices, ranks, "as this machine")
    return NodeSize(0, ranks, "as this machine; GPUs with --devices-per-node")


def own_devices(directory: Path = Path("/dev")) -> int:
    """GPUs of this machine, by their device files: asking torch would take seconds."""
    return sum(_GPU.fullmatch(file.name) is not None for file in directory.iterdir())


def find_placement(recipe: Recipe, devices: int | None, ranks: int | None) -> Placed:
    """The placement on the nodes that were asked about, or that are likely. Raises PlacementError, also where a node's host
    has too little memory (`device.host_memory_gib`)."""
    placed = place(recipe, node_size(recipe, devices, ranks, own_devices()))
    return replace(placed, host=host_memory(recipe, placed.needed, placed.engines))


def place(recipe: Recipe, size: NodeSize) -> Placed:
    """Raises PlacementError, with the arithmetic, where no number of such nodes would do. On CPUs, where nothing says how
    many ranks a node takes, all are on one, as `megarl train` starts them."""
    try:
        if size.ranks is None and size.devices:
            needed = nodes_needed(recipe, size.devices)
        else:
            needed = nodes_with(recipe, size.devices, size.ranks or recipe.trainer.ranks)
        return Placed(size, needed, place_engines(recipe, needed.cluster(size.devices)))
    except PlacementError as error:
        raise PlacementError(f"on nodes {_of(size)} ({size.origin}): {error}") from error


def placement_lines(recipe: Recipe, placed: Placed) -> list[str]:
    """The placement in words: how many nodes, and a line for nodes in a row that are alike."""
    needed, rollout = placed.needed, recipe.rollout
    head = f"placement: {count(needed.num_nodes, 'node')} {_of(placed.size)} ({placed.size.origin})"
    if rollout.replay is None:
        head += f", rollout.placement = {rollout.placement}"
    alike = groupby(range(needed.num_nodes), lambda node: (node < needed.trainer_nodes, _slots(placed, [node])[0]))
    lines = [head, *(_line(placed, list(nodes)) for _, nodes in alike)]
    if placed.host is not None and recipe.device is not None:
        room = recipe.device.host_memory_gib
        verdict = "device.host_memory_gib is not stated" if room is None else f"of {room:g} GiB: fits"
        lines.append(f"host memory of a node: up to {placed.host.text}; {verdict}")
    return lines


def document(placed: Placed) -> dict[str, Any]:
    """The placement for a program."""
    return {
        "devices_per_node": placed.size.devices,
        "ranks_per_node": placed.needed.ranks_per_node,
        "trainer_nodes": placed.needed.trainer_nodes,
        "rollout_nodes": placed.needed.rollout_nodes,
        "host_memory": None if placed.host is None else asdict(placed.host) | {"total": placed.host.total},
        "engines": [{"node": one.node, "devices": list(one.devices)} for one in placed.engines],
    }


def _line(placed: Placed, nodes: Sequence[int]) -> str:
    """Nodes that are alike: their ranks, and their engines by the devices that these have on each."""
    parts, each = [], " each" if len(nodes) > 1 else ""
    if nodes[0] < placed.needed.trainer_nodes:
        ranks = placed.needed.ranks_per_node
        parts.append(
            f"{count(ranks, 'trainer rank')}{each}" + (f", devices {_row(range(ranks))}" if placed.size.devices else "")
        )
    shown = []
    for devices, engines in zip(*_slots(placed, nodes), strict=True):
        where = f" on {'device' if len(devices) == 1 else 'devices'} {_row(devices)}" if placed.size.devices else ""
        shown.append(f"{'engine' if len(engines) == 1 else 'engines'} {_row(engines)}{where}")
    parts += [", ".join(shown)] if shown else []
    number = "node" if len(nodes) == 1 else "nodes"
    return f"  {number} {_row(nodes)}: {'; '.join(parts) or 'nothing'}"


def _slots(placed: Placed, nodes: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Devices of each engine of a node, alike on all `nodes`, and the engines that have these, in the order of the nodes."""
    found = [[number for number, one in enumerate(placed.engines) if one.node == node] for node in nodes]
    devices = tuple(placed.engines[number].devices for number in found[0])
    return devices, tuple(zip(*found, strict=True))


def _row(numbers: Sequence[int]) -> str:
    """As "0-3" where they follow each other."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def _of(size: NodeSize) -> str:
    return f"of {count(size.devices, 'GPU')}" if size.devices else "of CPUs"


# torch's pinned allocator rounds each allocation up to a power of two (ATen/core/CachingHostAllocator.h). Sizes that are as
# likely in each octave grow by 1 / ln 2 on average.
PINNED_ROUNDING = 1 / math.log(2)
# `OBJECT_STORE_BYTES` of `cluster/ray_cluster.py` and `NUM_BUCKETS` of `weight_sync/transport.py`, which are on a higher
# floor; a test keeps them equal.
OBJECT_STORE_BYTES, NUM_BUCKETS = 256 << 20, 2
# Resident memory of one process: Python, torch and its libraries, on a GPU those of CUDA too. Not measured on a GPU yet.
PROCESS_BYTES = {"gpu": 4 << 30, "cpu": 1 << 30}


@dataclass(frozen=True)
class HostMemory:
    """Bytes of one node's host by what holds them.

    `devices` are the trainer ranks' and engines' own, where their device is a CPU; `offloaded` what roles keep there between
    their phases, and `activations` what an update does, pinned copies as large as torch makes them; `checkpoint` the
    optimizer states that each rank gathers to save them; `processes` what each process takes before it holds anything.
    """

    devices: int
    offloaded: int
    activations: int
    checkpoint: int
    weight_sync: int
    routing: int
    ray: int
    processes: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def text(self) -> str:
        """The total and its parts in words."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        named = ", ".join(f"{name.replace('_', ' ')} {gib(size)}" for name, size in parts.items() if size)
        return f"{gib(self.total)} ({named})"


def host_memory(recipe: Recipe, needed: NodesNeeded, engines: tuple[EnginePlace, ...]) -> HostMemory | None:
    """Host memory of the fullest node; None without a device, whose kind says what lies there.

    Raises PlacementError where it is more than `device.host_memory_gib`.
    """
    if recipe.device is None:
        return None
    job, ranks = job_of(recipe), needed.ranks_per_node
    on_node = Counter(place.node for place in engines)
    trainer = max((count for node, count in on_node.items() if node < needed.trainer_nodes), default=0)
    first = _of_node(recipe, job, ranks, trainer)
    others = [_of_node(recipe, job, 0, count) for node, count in on_node.items() if node >= needed.trainer_nodes]
    fullest = max([first, *others], key=lambda node: node.total)
    room = recipe.device.host_memory_gib
    if room is not None and fullest.total > room * 2**30:
        raise PlacementError(
            f"device.host_memory_gib = {room:g}: a node takes up to {fullest.text}; {_way_out(recipe, fullest, ranks)}"
        )
    return fullest


def _of_node(recipe: Recipe, job: Job, ranks: int, engines: int) -> HostMemory:
    """A node with so many trainer ranks and engines."""
    assert recipe.device is not None, "host memory is that of a device"
    kind, workers = recipe.device.kind, engines * recipe.rollout.layout.workers
    rounding = PINNED_ROUNDING if kind == "gpu" else 1.0
    sync = recipe.weight_sync
    update_roles = [replace(role, savings=replace(role.savings, offload="none")) for role in job.roles]
    updates = [schedule for schedule in job.schedules if schedule.is_update]
    activations = max(worst_memory(replace(job, roles=tuple(update_roles)), schedule).host for schedule in updates)
    # fp32 weights and moments of the parameters that one rank saves (`megatron/checkpoint.py`, `_states_of_owned`).
    saved = max(3 * 4 * optimizer_share(role, stage) for role in job.roles for stage in range(role.layout.pipeline))
    weight_sync = 0
    if job.engines is not None:
        weight_sync = NUM_BUCKETS * (sync.bucket_bytes or BUCKET_BYTES["cpu"]) * (ranks + workers)
        if sync.wire == "delta":  # both ends keep a copy of the weights that were sent last
            actor = job.roles[0]
            sent = max(stage_weights(actor, stage) + adapter_weights(actor, stage) for stage in range(actor.layout.pipeline))
            weight_sync += sent * actor.bytes_per_weight * ranks + job.engines.memory.weights * workers
    return HostMemory(
        devices=_on_cpus(job, ranks, workers) if kind == "cpu" else 0,
        offloaded=int(rounding * moved_away(job.roles)) * ranks,
        activations=int(rounding * activations) * ranks,
        checkpoint=saved * ranks,
        weight_sync=weight_sync,
        routing=_routing_bytes(recipe, job) if ranks else 0,
        ray=OBJECT_STORE_BYTES,
        # Each engine has a process of its own beside its workers.
        processes=PROCESS_BYTES[kind] * (ranks + workers + engines),
    )


def _on_cpus(job: Job, ranks: int, workers: int) -> int:
    """Memory of the ranks' and workers' own on a CPU."""
    worst = {schedule.phase: worst_memory(job, schedule) for schedule in job.schedules}
    alone = max(memory.total for memory in on_devices(replace(job, engines=None), worst).values())
    return ranks * alone + (0 if job.engines is None else workers * job.engines.memory.total)


def _routing_bytes(recipe: Recipe, job: Job) -> int:
    """The experts' choice of a whole batch, where the first node gets it for `actor.router_replay`."""
    shape = job.roles[0].shape
    if not recipe.actor.router_replay or shape.experts is None:
        return 0
    layers = sum(shape.has_experts(layer) for layer in range(shape.num_layers))
    width = 1 if shape.experts.count <= 256 else 2
    return recipe.num_sequences * recipe.max_sequence_tokens * layers * shape.experts.per_token * width


def _way_out(recipe: Recipe, node: HostMemory, ranks: int) -> str:
    """What makes the largest part smaller."""
    ways = {
        "offloaded": "memory.offload: none for a role",
        "activations": "memory.offload_activations: false, or recompute",
        "checkpoint": "more trainer ranks, which save less each",
    }
    largest = max(fields(node), key=lambda field: getattr(node, field.name)).name
    fewer = f", fewer than {ranks} trainer ranks a node (--ranks-per-node)" if ranks > 1 else ""
    return f"{ways.get(largest, 'smaller engines or roles')}{fewer}, or a larger host"
