"""`megarl check` says on which nodes and devices a recipe lies, and refuses where no nodes of that size hold it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megarl.cli import app
from megarl.planner import placement
from megarl.planner.forecast import job_of, worst_memory
from megarl.planner.placement import NodeSize, PlacementError, find_placement, node_size, place, placement_lines
from megarl.recipe import load_recipe
from tests.planner_cases import write_qwen

SEPARATE = "rollout.placement=separate"
# Recipe: 8 trainer ranks, 2 engines of 4 workers. GPUs of a node and ranks on it, and what is printed.
PLACED: dict[str, tuple[list[str], int, int | None, list[str]]] = {
    "one node": ([], 8, None, ["1 node of 8 GPUs", "8 trainer ranks: node 0", "engine 0: node 0, devices 0, 1, 2, 3",
                               "engine 1: node 0, devices 4, 5, 6, 7"]),
    "nodes of their own": ([SEPARATE, "rollout.engines=3"], 8, None, ["3 nodes of 8 GPUs", "8 trainer ranks: node 0",
                           "engine 0: node 1, devices 0, 1, 2, 3", "engine 1: node 2, devices 0, 1, 2, 3",
                           "engine 2: node 1, devices 4, 5, 6, 7"]),
    "cores of two nodes": ([], 0, 4, ["2 nodes of CPUs", "8 trainer ranks: nodes 0-1, 4 on each", "engine 0: node 0",
                                      "engine 1: node 1"]),
    "replay": (["rollout.replay=."], 8, None, ["1 node of 8 GPUs", "8 trainer ranks: node 0"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACED)
def test_the_placement_in_words(name: str, tmp_path: Path) -> None:
    overrides, devices, ranks, lines = PLACED[name]
    recipe = load_recipe(write_qwen(tmp_path), overrides)
    first, *rest = placement_lines(recipe, place(recipe, NodeSize(devices, ranks, "asked")))
    assert first.startswith(f"placement: {lines[0]} (asked)") and [line.strip() for line in rest] == lines[1:]
    assert ("rollout.placement = " in first) == (name != "replay")


def test_the_size_of_a_node_where_nobody_says_it(tmp_path: Path) -> None:
    file = write_qwen(tmp_path)
    on_gpus, on_cpus, unstated = (load_recipe(file, one) for one in ([], ["device.kind=cpu"], ["device=null"]))
    sizes = [node_size(recipe, None, None, gpus).devices for recipe in (on_gpus, on_cpus, unstated) for gpus in (0, 4)]
    assert sizes == [8, 8, 0, 0, 0, 4]
    assert node_size(on_cpus, 2, None, 4).devices == 2


def test_what_no_node_holds_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    recipe = load_recipe(write_qwen(tmp_path))
    with pytest.raises(PlacementError, match=r"on nodes of 2 GPUs \(asked\): .* 4 workers do not fit a node of 2 devices"):
        place(recipe, NodeSize(2, None, "asked"))
    with pytest.raises(PlacementError, match="trainer.ranks = 8 cannot be spread over nodes with 3 ranks each"):
        place(recipe, NodeSize(0, 3, "asked"))


def test_the_command_prints_the_placement_or_refuses(tmp_path: Path) -> None:
    file = str(write_qwen(tmp_path))

    def check(*arguments: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, ["check", file, *arguments])
        return done.exit_code, " ".join(done.stdout.split()), " ".join(done.stderr.split())

    for options in ([], ["--plan", "--lengths", "uniform"]):
        status, said, _ = check(*options, "--devices-per-node", "4")
        assert status == 0 and "placement: 2 nodes of 4 GPUs (--devices-per-node = 4)" in said
        status, _, refusal = check(*options, "--devices-per-node", "2")
        assert status == 2 and "4 workers do not fit a node of 2 devices" in refusal
    status, said, _ = check("--json", "--devices-per-node", "4")
    (entry,) = json.loads(said)["recipes"]
    assert status == 0 and entry["placement"].pop("host_memory")["total"] > 0
    assert entry["placement"] == {
        "devices_per_node": 4,
        "ranks_per_node": 4,
        "trainer_nodes": 2,
        "rollout_nodes": 0,
        "engines": [{"node": 0, "devices": [0, 1, 2, 3]}, {"node": 1, "devices": [0, 1, 2, 3]}],
        "teachers": [],
    }
    assert check("--json", "--devices-per-node", "2")[0] == 2


def test_constants_of_host_memory_are_those_of_the_code_that_takes_it() -> None:
    from megarl.cluster.ray_cluster import OBJECT_STORE_BYTES
    from megarl.planner import forecast
    from megarl.weight_sync.buckets import MOST_WRITTEN, NUM_BUCKETS

    assert placement.OBJECT_STORE_BYTES == OBJECT_STORE_BYTES
    assert (forecast.NUM_BUCKETS, forecast.MOST_WRITTEN) == (NUM_BUCKETS, MOST_WRITTEN)


def test_the_host_holds_what_roles_put_there(tmp_path: Path) -> None:
    """Qwen2.5-7B over four tensor ranks and two data ranks: bf16 weights, 12 bytes of optimizer states a weight of half of
    them, pinned copies 1 / ln 2 as large on average; each rank gathers its share of the states to save them."""
    file = write_qwen(tmp_path)
    weights = 28 * (3584 * (3584 + 1024 + 3584 + 3 * 18944) + 4608 + 2 * 3584) + 3584 * (2 * 152064 + 1)

    def held(*overrides: str) -> dict[str, int]:
        recipe = load_recipe(file, ["reference.memory.offload=none", *overrides])
        found = find_placement(recipe, 8, None).host
        assert found is not None
        return found

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
    found = find_placement(recipe, None, None).host
    assert found is not None and job.engines is not None
    trainer = 8 * max(worst_memory(job, schedule).total for schedule in job.schedules)
    assert found["devices"] == trainer + 8 * job.engines.memory.total
    with pytest.raises(PlacementError, match=r"device.host_memory_gib = 64: a node takes up to .*devices"):
        find_placement(load_recipe(write_qwen(tmp_path), ["device.kind=cpu", "device.host_memory_gib=64"]), None, None)
