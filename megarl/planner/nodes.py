"""On which nodes and devices a recipe's trainer ranks and engines lie, for nodes of one size: what `megarl check` prints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from megarl.planner.host import HostMemory, host_memory
from megarl.planner.placement import EnginePlace, NodesNeeded, PlacementError, count, nodes_needed, nodes_with, place_engines
from megarl.recipe import Recipe

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
    return [head, *(_line(placed, list(nodes)) for _, nodes in alike), *_host_lines(recipe, placed)]


def _host_lines(recipe: Recipe, placed: Placed) -> list[str]:
    if placed.host is None or recipe.device is None:
        return []
    room = recipe.device.host_memory_gib
    verdict = "device.host_memory_gib is not stated" if room is None else f"of {room:g} GiB: fits"
    return [f"host memory of a node: up to {placed.host.text}; {verdict}"]


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
