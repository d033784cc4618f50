"""Runs through Slurm, by the shipped files for many nodes. One with trainer ranks on two nodes, preempted and queued again,
ends like one that ran through on this machine; so does one with all ranks on one node and the engines on the other."""

from __future__ import annotations

import json
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.test_launch_slurm import MULTI_NODE, ROOT
from tests.gated_reward import GATE, OPENS_S
from tests.ports import unused_port
from tests.runs import fake_rollouts, metrics_of, tiny_recipe, tiny_run, train_on_ranks
from tests.slurm_cluster import SlurmCluster, slurm_cluster

JOB_S = 540.0
STEPS = 3
SEPARATE = "launch/slurm/separate.sbatch"
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(3 * JOB_S)]


def write_recipe(folder: Path, name: str, ranks: int, **changes: Any) -> Path:
    """A recipe of so many trainer ranks and half as many engines. Weights travel in messages, as they do between nodes."""
    changes |= {"rollout__engines": ranks // 2, "weight_sync": {"transport": "group"}}
    changes |= {"reward": [{"kind": "function", "target": "tests.gated_reward:digits_behind_a_gate"}]}
    changes |= {"phases__reward": {"timeout_s": 2 * OPENS_S}}  # a gate masks nothing
    if (folder / "rollouts").exists():
        changes |= {"rollout__replay": str(folder / "rollouts")}
    return tiny_recipe(folder, name, False, ranks, 1, 2, STEPS, **changes)


def run_through(folder: Path, ranks: int, replays: bool = False) -> list[dict[str, Any]]:
    """The metrics of a run without Slurm."""
    tiny_run(folder)
    if replays:
        fake_rollouts(folder, STEPS)
    train_on_ranks(write_recipe(folder, "whole", ranks))
    whole = metrics_of(folder, "whole")
    assert len(whole) == STEPS and len({line["actor/loss"] for line in whole}) == STEPS
    return whole


def without_sync(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All metrics but those of how weights travelled, which is another matter between nodes."""
    return [{key: value for key, value in line.items() if not key.startswith("sync/")} for line in lines]


def submit(cluster: SlurmCluster, folder: Path, name: str, file: str, ranks: int, ranks_per_node: int) -> str:
    """A file unchanged, with the settings of these nodes in the environment."""
    placement = "separate" if file == SEPARATE else "colocated"
    recipe = write_recipe(folder, name, ranks, rollout__placement=placement)
    ports = [unused_port() for _ in range(2)]
    settings = {"SBATCH_GPUS_PER_NODE": "0", "SBATCH_OUTPUT": str(folder / f"{name}.out"), "MEGARL_DIR": str(ROOT),
                "LOG_ROOT": str(folder / "logs"), "RANKS_PER_NODE": str(ranks_per_node),
                "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                # Both nodes are this machine, which may have other tests under way.
                "MASTER_ADDRESS": own_address(), "MASTER_PORT": str(ports[0]), "RAY_PORT": str(ports[1]),
                GATE: str(folder / f"{name}.gate")}  # fmt: skip
    return cluster.submit(file, str(recipe), environment=settings)


def own_address() -> str:
    """Of this machine, for both nodes: a loopback address leads nowhere from another node, and a run refuses it."""
    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == socket.AF_INET]
    return next(entry.address for entry in entries if not entry.address.startswith("127."))


def message(folder: Path, name: str, job: str) -> str:
    """The ends of what a job and its nodes wrote, for a failure."""
    files = [folder / f"{name}.out", *sorted((folder / "logs" / job).glob("node-*.log"))]
    return "\n".join(f"--- {file.name}\n{file.read_text()[-6000:]}" for file in files if file.is_file())


# In CI without engines, which take minutes to start twice on both nodes; a run with one is resumed in test_run.py.
@pytest.mark.parametrize(
    ("ranks", "replays"),
    [(2, True), *(pytest.param(ranks, False, marks=pytest.mark.nightly) for ranks in (2, 4))],
    ids=["replay", "one engine", "two engines"],
)
def test_a_preempted_run_is_queued_again_and_ends_like_one_that_ran_through(
    tmp_path: Path, ranks: int, replays: bool
) -> None:
    """Half of the ranks on each node; an engine on each, or on the first one alone."""
    whole = run_through(tmp_path, ranks, replays)
    gate, output = tmp_path / "preempted.gate", tmp_path / "preempted.out"
    gate.touch()
    with slurm_cluster() as cluster:
        job = submit(cluster, tmp_path, "preempted", MULTI_NODE, ranks, ranks // 2)
        cluster.until(lambda: gate.with_suffix(".reached").exists() or output_ended(output), JOB_S, output)
        assert gate.exists() and not output_ended(output), message(tmp_path, "preempted", job)
        # What Slurm does by `--signal=B:USR1@600`, 600 s before the time limit.
        cluster.run("scancel", "--signal=USR1", "--batch", job)
        cluster.until(lambda: "every node has been warned" in output.read_text(), JOB_S, output)
        gate.unlink()
        ended = cluster.wait(job, JOB_S, said=output)
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), message(tmp_path, "preempted", job)
        assert ranks_of_nodes(tmp_path, job) == {"node0": ranks // 2, "node1": ranks // 2}
    assert without_sync(metrics_of(tmp_path, "preempted")) == without_sync(whole)
    starts = [json.loads(line) for line in (tmp_path / "runs" / "preempted" / "starts.jsonl").read_text().splitlines()]
    assert [(start["from_step"], start["slurm_restart"]) for start in starts] == [(0, None), (1, 1)]
    assert starts[1]["before"]["how"] == "requeued"


@pytest.mark.nightly  # in CI: test_launch_slurm.py up to the nodes, and a Ray of two nodes with an engine on each
def test_a_run_with_engines_on_a_node_of_their_own_ends_like_one_on_one_node(tmp_path: Path) -> None:
    whole = run_through(tmp_path, 4)
    with slurm_cluster() as cluster:
        job = submit(cluster, tmp_path, "separate", SEPARATE, 4, 4)
        ended = cluster.wait(job, JOB_S, said=tmp_path / "separate.out")
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), message(tmp_path, "separate", job)
        assert ranks_of_nodes(tmp_path, job) == {"node0": 4}
    assert without_sync(metrics_of(tmp_path, "separate")) == without_sync(whole)


def ranks_of_nodes(folder: Path, job: str) -> dict[str, int]:
    """How many ranks ran on each node that had some."""
    logs = (folder / "logs" / job).glob("node?/*/attempt_0/?")
    return dict(Counter(node for node, _ in {(log.parents[2].name, log.name) for log in logs}))


def output_ended(output: Path) -> bool:
    return output.is_file() and "ended with status" in output.read_text()
