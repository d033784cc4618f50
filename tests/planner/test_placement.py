"""Engines get nodes and devices of their own by the recipe, and what does not fit is refused with the numbers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.planner.placement import (
    Cluster,
    EnginePlace,
    PlacementError,
    nodes_needed,
    place_engines,
    place_teachers,
    visible_devices,
)
from megarl.recipe import Recipe
from tests.rollout_cases import recipe


def of(ranks: int, placement: str = "colocated", **rollout: Any) -> Recipe:
    """A recipe with so many trainer ranks."""
    one = recipe(Path("model"), placement=placement, **rollout)
    return one.model_copy(update={"trainer": one.trainer.model_copy(update={"ranks": ranks})})


def places(*found: tuple[int, Sequence[int]]) -> tuple[EnginePlace, ...]:
    return tuple(EnginePlace(node, tuple(devices)) for node, devices in found)


PLACED: dict[str, tuple[Recipe, Cluster, tuple[EnginePlace, ...]]] = {
    "one engine over the trainer's devices": (of(4, tensor=4), Cluster(1, 4, 4), places((0, range(4)))),
    "two engines side by side": (of(4, engines=2, tensor=2), Cluster(1, 4, 4), places((0, range(2)), (0, range(2, 4)))),
    "an engine on each node": (of(4, engines=2), Cluster(2, 2, 2), places((0, range(1)), (1, range(1)))),
    "three engines over two nodes": (of(16, engines=3, tensor=2, pipeline=2), Cluster(2, 8, 8),
                                     places((0, range(4)), (1, range(4)), (0, range(4, 8)))),
    "not on a node without trainer ranks": (of(4, engines=2), Cluster(3, 4, 4), places((0, range(1)), (0, range(1, 2)))),
    "on nodes without trainer ranks": (of(8, "separate", engines=3, tensor=2), Cluster(4, 4, 4),
                                       places((2, range(2)), (3, range(2)), (2, range(2, 4)))),
    "behind the trainer's on the only node": (of(4, "separate", engines=2, tensor=2), Cluster(1, 8, 4),
                                              places((0, range(4, 6)), (0, range(6, 8)))),
    "cores are shared": (of(2, engines=3, tensor=2), Cluster(1, 2, 2, shared=True), places(*[(0, range(2))] * 3)),
    "separate on the only node of a CPU": (of(2, "separate"), Cluster(1, 2, 2, shared=True), places((0, range(1)))),
    "separate on a node of its own of a CPU": (of(2, "separate"), Cluster(2, 2, 2, shared=True), places((1, range(1)))),
    "no engines": (of(2, replay="rollouts"), Cluster(1, 2, 2), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACED)
def test_engines_are_placed(name: str) -> None:
    wanted, cluster, expected = PLACED[name]
    assert place_engines(wanted, cluster) == expected


def with_teachers(wanted: Recipe, *sizes: int) -> Recipe:
    """A recipe with a teacher of so many workers each."""
    values = wanted.model_dump()
    values["teachers"] = {f"t{number}": {"path": "model", "engine": {"tensor": size}} for number, size in enumerate(sizes)}
    return wanted.model_validate(values)


@pytest.mark.parametrize("placement", ["colocated", "separate"])
@pytest.mark.parametrize(("ranks", "sizes"), [(4, (2,)), (8, (4, 2, 4)), (8, (8, 1)), (6, (1, 1, 8))])
def test_engines_of_teachers_have_devices_that_nobody_else_has(placement: str, ranks: int, sizes: tuple[int, ...]) -> None:
    wanted = with_teachers(of(ranks, placement, engines=2, tensor=2), *sizes)
    needed = nodes_needed(wanted, 8)
    cluster = needed.cluster(8)
    engines = place_engines(wanted, cluster)
    teachers = place_teachers(wanted, cluster, engines)
    assert [len(place.devices) for place in teachers] == list(sizes)
    taken = [(place.node, device) for place in teachers for device in place.devices]
    others = {(node, device) for node in range(needed.trainer_nodes) for device in range(needed.ranks_per_node)}
    others |= {(place.node, device) for place in engines for device in place.devices}
    assert len(set(taken)) == len(taken) and not others & set(taken)
    assert all(node < needed.num_nodes and device < 8 for node, device in taken)
    if needed.rollout_nodes:
        fewer = Cluster(needed.num_nodes - 1, 8, needed.ranks_per_node)
        with pytest.raises(PlacementError):
            place_teachers(wanted, fewer, place_engines(wanted, fewer))


def test_engines_of_teachers_share_the_cores_of_a_cpu() -> None:
    cluster = Cluster(1, 2, 2, shared=True)
    assert place_teachers(with_teachers(of(2), 1, 4), cluster, ()) == places((0, range(1)), (0, [0, 1, 0, 1]))


def test_a_teacher_without_room_is_named() -> None:
    with pytest.raises(
        PlacementError, match=r"teachers.t1.engine needs 3 devices of one node .* as many left .1 node of 8 devices"
    ):
        place_teachers(with_teachers(of(4), 2, 3), Cluster(1, 8, 4), ())


REFUSED: dict[str, tuple[Recipe, Cluster, str]] = {
    "an engine larger than a node": (of(16, tensor=8, pipeline=2), Cluster(2, 8, 8),
        "rollout.tensor x pipeline x data = 8 x 2 x 1 = 16 workers do not fit a node of 8 devices"),
    "two engines on a device": (of(2, engines=3), Cluster(1, 2, 2), "engines = 3 of 1 worker.* 1 node .* room for 2"),
    "room for an engine, in two parts": (of(6, engines=3, tensor=2), Cluster(2, 3, 3), "2 nodes .* room for 2"),
    "no devices behind the trainer's": (of(4, "separate", tensor=2), Cluster(1, 5, 4), "1 free device .* room for 0"),
    "more ranks than devices": (of(4), Cluster(1, 2, 4),
        "4 trainer ranks a node need 4 devices, and a node has 2: .* 2 nodes"),
    "fewer nodes than ranks need": (of(8), Cluster(1, 4, 4), "need 2 nodes, and there are 1: start 2 nodes"),
    "ranks that do not divide": (of(6), Cluster(2, 4, 4), "trainer.ranks = 6 cannot be spread over nodes with 4 ranks each"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_the_numbers(name: str) -> None:
    wanted, cluster, said = REFUSED[name]
    with pytest.raises(PlacementError, match=said):
        place_engines(wanted, cluster)


def test_an_engine_sees_its_own_of_the_devices_that_its_node_lists() -> None:
    assert visible_devices(None, (2, 3)) == "2,3"
    assert visible_devices("4, 5,GPU-a,7", (2, 3)) == "GPU-a,7"
    with pytest.raises(PlacementError, match="device 3 of a node, from 0, is not among the 2 that it lists: 4,5"):
        visible_devices("4,5", (2, 3))


def test_what_is_needed_is_enough_and_nobody_shares_a_device() -> None:
    sizes = itertools.product((1, 2, 4, 6, 8, 16), ("colocated", "separate"), (1, 2, 3, 5), (1, 2, 3, 8), (2, 4, 8))
    placed = 0
    for ranks, placement, engines, tensor, devices in sizes:
        wanted = of(ranks, placement, engines=engines, tensor=tensor)
        try:
            needed = nodes_needed(wanted, devices)
        except PlacementError as error:
            assert re.search("do not fit a node|room for", str(error))
            continue
        cluster = Cluster(needed.trainer_nodes + needed.rollout_nodes, devices, needed.ranks_per_node)
        found = place_engines(wanted, cluster)
        used = [(place.node, device) for place in found for device in place.devices]
        assert len(used) == len(set(used)) == engines * tensor and max(device for _, device in used) < devices
        trainers = {divmod(rank, needed.ranks_per_node) for rank in range(ranks)}
        assert placement == "colocated" or not trainers & set(used)
        assert placement == "separate" or {place.node for place in found} <= {node for node, _ in trainers}
        counts = [sum(place.node == node for place in found) for node in {place.node for place in found}]
        assert max(counts) - min(counts) <= 1
        placed += 1
    assert placed > 300
