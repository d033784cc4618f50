"""Runs through Slurm, with the shipped files for several nodes. A run with trainer ranks on two nodes that is preempted and
queued again ends like an uninterrupted run on this machine. So does a run with all ranks on one node and the engines on
another."""

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
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(3 * JOB_S)]


def write_recipe(folder: Path, name: str, ranks: int, **changes: Any) -> Path:
    """Write a recipe with `ranks` trainer ranks and half as many engines. Weights travel in messages, as between nodes."""
    changes |= {"rollout__engines": ranks // 2, "weight_sync": {"transport": "group"}}
    changes |= {"reward": [{"kind": "function", "target": "tests.gated_reward:digits_behind_a_gate"}]}
    changes |= {"phases__reward": {"timeout_s": 2 * OPENS_S}}  # a gate masks nothing
    if (folder / "rollouts").exists():
        changes |= {"rollout__replay": str(folder / "rollouts")}
    return tiny_recipe(folder, name, False, ranks, 1, 2, STEPS, **changes)


def run_through(folder: Path, ranks: int, replays: bool = False) -> list[dict[str, Any]]:
    """Return the metrics of a run without Slurm."""
    tiny_run(folder)
    if replays:
        fake_rollouts(folder, STEPS)
    train_on_ranks(write_recipe(folder, "whole", ranks))
    whole = metrics_of(folder, "whole")
    assert len(whole) == STEPS and len({line["actor/loss"] for line in whole}) == STEPS
    return whole


def without_sync(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all metrics except those of the weight sync, which differs between nodes."""
    return [{key: value for key, value in line.items() if not key.startswith("sync/")} for line in lines]


def submit(cluster: SlurmCluster, folder: Path, name: str, file: str, ranks: int, ranks_per_node: int) -> str:
    """Submit an unchanged file, with the settings of these nodes in the environment; return the job's number."""
    placement = "separate" if file == SEPARATE else "colocated"
    recipe = write_recipe(folder, name, ranks, rollout__placement=placement)
    ports = [unused_port() for _ in range(2)]
    settings = {"SBATCH_GPUS_PER_NODE": "0", "SBATCH_OUTPUT": str(folder / f"{name}.out"), "MEGARL_DIR": str(ROOT),
                "LOG_ROOT": str(folder / "logs"), "RANKS_PER_NODE": str(ranks_per_node),
                "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                # Both nodes are this machine, which may run other tests at the same time.
                "MASTER_ADDRESS": own_address(), "MASTER_PORT": str(ports[0]), "RAY_PORT": str(ports[1]),
                GATE: str(folder / f"{name}.gate")}  # fmt: skip
    return cluster.submit(file, str(recipe), environment=settings)


def own_address() -> str:
    """Return this machine's address, for both nodes. A run refuses a loopback address, which other nodes do not reach."""
    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == socket.AF_INET]
    return next(entry.address for entry in entries if not entry.address.startswith("127."))


def message(folder: Path, name: str, job: str) -> str:
    """Return the last output of a job and its nodes, for a failure."""
    files = [folder / f"{name}.out", *sorted((folder / "logs" / job).glob("node-*.log"))]
    return "\n".join(f"--- {file.name}\n{file.read_text()[-6000:]}" for file in files if file.is_file())


# In CI, test_launch_slurm.py queues jobs again, test_preemption.py preempts a run without Slurm, and test_run.py resumes a
# run with an engine.
@pytest.mark.parametrize(
    ("ranks", "replays"), [(2, True), (2, False), (4, False)], ids=["replay", "one engine", "two engines"]
)
def test_a_preempted_run_is_queued_again_and_ends_like_an_uninterrupted_run(
    tmp_path: Path, ranks: int, replays: bool
) -> None:
    """Half of the ranks run on each node; each node has an engine, or only the first node."""
    whole = run_through(tmp_path, ranks, replays)
    gate, output = tmp_path / "preempted.gate", tmp_path / "preempted.out"
    gate.touch()
    with slurm_cluster() as cluster:
        job = submit(cluster, tmp_path, "preempted", MULTI_NODE, ranks, ranks // 2)
        cluster.until(lambda: gate.with_suffix(".reached").exists() or output_ended(output), JOB_S, output)
        assert gate.exists() and not output_ended(output), message(tmp_path, "preempted", job)
        # Slurm does the same with `--signal=B:USR1@600`, 600 s before the time limit.
        cluster.run("scancel", "--signal=USR1", "--batch", job)
        cluster.until(lambda: "every node has been warned" in output.read_text(), JOB_S, output)
        gate.unlink()
        ended = cluster.wait(job, JOB_S, output)
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), message(tmp_path, "preempted", job)
        assert ranks_of_nodes(tmp_path, job) == {"node0": ranks // 2, "node1": ranks // 2}
    assert without_sync(metrics_of(tmp_path, "preempted")) == without_sync(whole)
    starts = [json.loads(line) for line in (tmp_path / "runs" / "preempted" / "starts.jsonl").read_text().splitlines()]
    assert [(start["from_step"], start["slurm_restart"]) for start in starts] == [(0, None), (1, 1)]
    assert starts[1]["before"]["how"] == "requeued"


# In CI, test_launch_slurm.py runs up to the nodes, and test_nodes.py has a Ray of two nodes with an engine on each.
def test_a_run_with_engines_on_a_separate_node_ends_like_a_run_on_one_node(tmp_path: Path) -> None:
    whole = run_through(tmp_path, 4)
    with slurm_cluster() as cluster:
        job = submit(cluster, tmp_path, "separate", SEPARATE, 4, 4)
        ended = cluster.wait(job, JOB_S, tmp_path / "separate.out")
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), message(tmp_path, "separate", job)
        assert ranks_of_nodes(tmp_path, job) == {"node0": 4}
    assert without_sync(metrics_of(tmp_path, "separate")) == without_sync(whole)


def ranks_of_nodes(folder: Path, job: str) -> dict[str, int]:
    """Return the number of ranks on each node with ranks."""
    logs = (folder / "logs" / job).glob("node?/*/attempt_0/?")
    return dict(Counter(node for node, _ in {(log.parents[2].name, log.name) for log in logs}))


def output_ended(output: Path) -> bool:
    return output.is_file() and "ended with status" in output.read_text()
