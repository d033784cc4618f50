"""Engines get nodes and devices by the recipe, `megarl check` says which, and what does not fit is refused with numbers."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megarl.cli import app
from megarl.planner import forecast
from megarl.planner import placement as planned
from megarl.planner.forecast import job_of, worst_memory
from megarl.planner.placement import (
    Cluster,
    EnginePlace,
    NodeSize,
    PlacementError,
    find_placement,
    node_size,
    nodes_needed,
    place,
    place_engines,
    place_teachers,
    placement_lines,
    visible_devices,
)
from megarl.recipe import Recipe, load_recipe
from tests.planner_cases import write_qwen
from tests.rollout_cases import recipe


def of(ranks: int, placement: str = "colocated", *edits: tuple[str, Any], **rollout: Any) -> Recipe:
    """A recipe with so many trainer ranks."""
    return recipe(Path("model"), ("trainer.ranks", ranks), *edits, placement=placement, **rollout)


def places(*engines: tuple[int, Sequence[int]]) -> tuple[EnginePlace, ...]:
    return tuple(EnginePlace(node, tuple(devices)) for node, devices in engines)


PLACED: dict[str, tuple[Recipe, Cluster, tuple[EnginePlace, ...]]] = {
    "two engines side by side": (of(4, engines=2, tensor=2), Cluster(1, 4, 4), places((0, range(2)), (0, range(2, 4)))),
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
    teachers = {f"t{number}": {"path": "model", "engine": {"tensor": size}} for number, size in enumerate(sizes)}
    return wanted.model_validate(wanted.model_dump() | {"teachers": teachers})


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
    wanted, cluster, message = REFUSED[name]
    with pytest.raises(PlacementError, match=message):
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
        engine_places = place_engines(wanted, cluster)
        used = [(place.node, device) for place in engine_places for device in place.devices]
        assert len(used) == len(set(used)) == engines * tensor and max(device for _, device in used) < devices
        trainers = {divmod(rank, needed.ranks_per_node) for rank in range(ranks)}
        assert placement == "colocated" or not trainers & set(used)
        assert placement == "separate" or {place.node for place in engine_places} <= {node for node, _ in trainers}
        counts = [sum(place.node == node for place in engine_places) for node in {place.node for place in engine_places}]
        assert max(counts) - min(counts) <= 1
        placed += 1
    assert placed > 300


SEPARATE = "rollout.placement=separate"
# Recipe: 8 trainer ranks, 2 engines of 4 workers. GPUs of a node and ranks on it, and what is printed.
IN_WORDS: dict[str, tuple[list[str], int, int | None, list[str]]] = {
    "nodes of their own": ([SEPARATE, "rollout.engines=3"], 8, None, ["3 nodes of 8 GPUs", "8 trainer ranks: node 0",
                           "engine 0: node 1, devices 0, 1, 2, 3", "engine 1: node 2, devices 0, 1, 2, 3",
                           "engine 2: node 1, devices 4, 5, 6, 7"]),
    "cores of two nodes": ([], 0, 4, ["2 nodes of CPUs", "8 trainer ranks: nodes 0-1, 4 on each", "engine 0: node 0",
                                      "engine 1: node 1"]),
    "replay": (["rollout.replay=."], 8, None, ["1 node of 8 GPUs", "8 trainer ranks: node 0"]),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_WORDS)
def test_the_placement_in_words(name: str, tmp_path: Path) -> None:
    overrides, devices, ranks, lines = IN_WORDS[name]
    recipe = load_recipe(write_qwen(tmp_path), overrides)
    first, *rest = placement_lines(recipe, place(recipe, NodeSize(devices, ranks, "asked")))
    assert first.startswith(f"placement: {lines[0]} (asked)") and [line.strip() for line in rest] == lines[1:]
    assert ("rollout.placement = " in first) == (name != "replay")


def test_the_size_of_a_node_where_nobody_says_it(tmp_path: Path) -> None:
    file = write_qwen(tmp_path)
    on_gpus, on_cpus, unstated = (load_recipe(file, overrides) for overrides in ([], ["device.kind=cpu"], ["device=null"]))
    sizes = [node_size(recipe, None, None, gpus).devices for recipe in (on_gpus, on_cpus, unstated) for gpus in (0, 4)]
    assert sizes == [8, 8, 0, 0, 0, 4]
    assert node_size(on_cpus, 2, None, 4).devices == 2


def test_the_command_prints_the_placement_or_refuses(tmp_path: Path) -> None:
    file = str(write_qwen(tmp_path))

    def check(*arguments: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, ["check", file, *arguments])
        return done.exit_code, " ".join(done.stdout.split()), " ".join(done.stderr.split())

    for options in ([], ["--plan", "--lengths", "uniform"]):
        status, output, _ = check(*options, "--devices-per-node", "4")
        assert status == 0 and "placement: 2 nodes of 4 GPUs (--devices-per-node = 4)" in output
        status, _, refusal = check(*options, "--devices-per-node", "2")
        assert status == 2 and "on nodes of 2 GPUs (--devices-per-node = 2): " in refusal
        assert "4 workers do not fit a node of 2 devices" in refusal
    status, output, _ = check("--json", "--devices-per-node", "4")
    (entry,) = json.loads(output)["recipes"]
    assert status == 0 and entry["placement"].pop("host_memory")["total"] > 0
    assert entry["placement"] == {
        "devices_per_node": 4, "ranks_per_node": 4, "trainer_nodes": 2, "rollout_nodes": 0,
        "engines": [{"node": 0, "devices": [0, 1, 2, 3]}, {"node": 1, "devices": [0, 1, 2, 3]}], "teachers": [],
    }  # fmt: skip
    assert check("--json", "--devices-per-node", "2")[0] == 2


@pytest.mark.parametrize(
    ("overrides", "devices", "fits"),
    [([], 8, True), ([], 4, False), ([SEPARATE], 16, True), ([SEPARATE], 8, False), ([SEPARATE], 0, True)],
)
def test_mapped_weights_need_one_host(overrides: list[str], devices: int, fits: bool, tmp_path: Path) -> None:
    """As a run says when it starts; with `auto` the same nodes are enough."""
    file = write_qwen(tmp_path, **({"device": None} if devices == 0 else {}))
    find_placement(load_recipe(file, overrides), devices, None)
    mapped = load_recipe(file, [*overrides, "weight_sync.transport=mapped"])
    if fits:
        assert find_placement(mapped, devices, None).needed.num_nodes == 1
    else:
        with pytest.raises(PlacementError, match=r"weight_sync.transport = mapped: .* several hosts; use auto"):
            find_placement(mapped, devices, None)


def test_nodes_have_the_devices_of_the_recipe(tmp_path: Path) -> None:
    file = write_qwen(tmp_path)
    on_gpus, on_cpus, unstated = (load_recipe(file, overrides) for overrides in ([], ["device.kind=cpu"], ["device=null"]))
    with pytest.raises(PlacementError, match=r"--devices-per-node = 8 plans GPUs, and device.kind = cpu: use .*node 0, or"):
        find_placement(on_cpus, 8, None)
    with pytest.raises(PlacementError, match=r"--devices-per-node = 0 plans CPUs, and device.kind = gpu: use .*node 8, or"):
        find_placement(on_gpus, 0, None)
    for planned_recipe, devices in ((on_cpus, 0), (on_gpus, 8), (unstated, 0), (unstated, 8)):
        assert find_placement(planned_recipe, devices, None).size.devices == devices


def test_engines_that_sample_while_the_trainer_works_do_not_share_its_gpus(tmp_path: Path) -> None:
    """Without `device` the nodes say that there are GPUs."""
    stale = ["rollout.max_staleness=1", "weight_sync.in_flight=keep", "algorithm.mismatch={correction: truncate}"]
    file, stated = write_qwen(tmp_path), [*stale, "device=null"]
    with pytest.raises(PlacementError, match=r"rollout.placement = 'colocated': .* sleep .*separate, or .*node 0$"):
        find_placement(load_recipe(file, stated), 8, None)
    assert find_placement(load_recipe(file, stated), 0, None).size.devices == 0
    assert find_placement(load_recipe(file, [*stated, SEPARATE]), 8, None).size.devices == 8


def test_constants_of_host_memory_are_those_of_the_code_that_takes_it() -> None:
    from megarl.cluster.ray_cluster import OBJECT_STORE_BYTES
    from megarl.weight_sync.buckets import MOST_WRITTEN, NUM_BUCKETS

    assert planned.OBJECT_STORE_BYTES == OBJECT_STORE_BYTES
    assert (forecast.NUM_BUCKETS, forecast.MOST_WRITTEN) == (NUM_BUCKETS, MOST_WRITTEN)


def test_the_host_holds_what_roles_put_there(tmp_path: Path) -> None:
    """Qwen2.5-7B over four tensor ranks and two data ranks: bf16 weights, 12 bytes of optimizer states a weight of half of
    them, pinned copies 1 / ln 2 as large on average; each rank gathers its share of the states to save them."""
    file = write_qwen(tmp_path)
    weights = 28 * (3584 * (3584 + 1024 + 3584 + 3 * 18944) + 4608 + 2 * 3584) + 3584 * (2 * 152064 + 1)

    def held(*overrides: str) -> dict[str, int]:
        recipe = load_recipe(file, ["reference.memory.offload=none", *overrides])
        host_memory = find_placement(recipe, 8, None).host
        assert host_memory is not None
        return host_memory

    stay, optimizer, away = held(), held("actor.memory.offload=optimizer"), held("actor.memory.offload=all")
    assert stay["offloaded"] == stay["activations"] == 0
    assert stay["checkpoint"] == pytest.approx(12 * weights, rel=0.001)
    assert optimizer["offloaded"] == pytest.approx(12 * weights / math.log(2), rel=0.001)
    assert away["offloaded"] == pytest.approx((12 + 2 * 2) * weights / math.log(2), rel=0.001)
    assert held("actor.memory.offload_activations=true")["activations"] > 0
    assert stay["processes"] == 8 * 4 * 2**30 + (8 + 2) * 4 * 2**30
    assert (
        "host memory of a node: up to" in placement_lines(load_recipe(file), find_placement(load_recipe(file), 8, None))[-1]
    )


def test_on_cpus_the_host_holds_the_ranks_and_the_engines(tmp_path: Path) -> None:
    recipe = load_recipe(write_qwen(tmp_path), ["device.kind=cpu"])
    job = job_of(recipe)
    host_memory = find_placement(recipe, None, None).host
    assert host_memory is not None and job.engines is not None
    trainer = 8 * max(worst_memory(job, schedule).total for schedule in job.schedules)
    assert host_memory["devices"] == trainer + 8 * job.engines.memory.total
    with pytest.raises(PlacementError, match=r"device.host_memory_gib = 64: a node takes up to .*devices"):
        find_placement(load_recipe(write_qwen(tmp_path), ["device.kind=cpu", "device.host_memory_gib=64"]), None, None)
