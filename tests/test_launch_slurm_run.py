"""Runs through Slurm, by the shipped files for many nodes. One on two nodes of two trainer ranks and an engine each, that is
preempted and queued again, ends like one that ran through, with all ranks on one node and the engines on the other."""

from __future__ import annotations

import json
import socket
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.gated_reward import GATE
from tests.ports import unused_port
from tests.runs import figures, tiny_recipe, tiny_run
from tests.slurm_cluster import SlurmCluster, slurm_cluster
from tests.test_launch_slurm import MULTI_NODE, ROOT

JOB_S = 540.0
STEPS = 3
SEPARATE = "launch/slurm/separate.sbatch"
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(3 * JOB_S)]


def submit(cluster: SlurmCluster, folder: Path, name: str, file: str, ranks_per_node: int) -> str:
    """A file unchanged, with the settings of these nodes in the environment."""
    changes = {"rollout__engines": 2, "reward": [{"kind": "function", "target": "tests.gated_reward:digits_behind_a_gate"}]}
    placement = "separate" if file == SEPARATE else "colocated"
    recipe = tiny_recipe(folder, name, False, 4, 1, 2, STEPS, rollout__placement=placement, **changes)
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


def said(folder: Path, name: str, job: str) -> str:
    """The ends of what a job and its nodes wrote, for a failure."""
    files = [folder / f"{name}.out", *sorted((folder / "logs" / job).glob("node-*.log"))]
    return "\n".join(f"--- {file.name}\n{file.read_text()[-6000:]}" for file in files if file.is_file())


def test_a_preempted_run_is_queued_again_and_ends_like_one_that_ran_through(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    with slurm_cluster() as cluster:
        job = submit(cluster, tmp_path, "whole", SEPARATE, 4)
        ended = cluster.wait(job, JOB_S, said=tmp_path / "whole.out")
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), said(tmp_path, "whole", job)
        assert ranks_of_nodes(tmp_path, job) == {"node0": 4}

        gate = tmp_path / "preempted.gate"
        gate.touch()
        job, output = submit(cluster, tmp_path, "preempted", MULTI_NODE, 2), tmp_path / "preempted.out"
        cluster.until(lambda: gate.with_suffix(".reached").exists() or output_ended(output), JOB_S, output)
        assert gate.exists() and not output_ended(output), said(tmp_path, "preempted", job)
        # What Slurm does by `--signal=B:USR1@600`, 600 s before the time limit.
        cluster.run("scancel", "--signal=USR1", "--batch", job)
        cluster.until(lambda: "every node has been told" in output.read_text(), JOB_S, output)
        gate.unlink()
        ended = cluster.wait(job, JOB_S, said=output)
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), said(tmp_path, "preempted", job)
        assert ranks_of_nodes(tmp_path, job) == {"node0": 2, "node1": 2}
    whole = figures(tmp_path, "whole")
    assert len(whole) == STEPS and len({line["actor/loss"] for line in whole}) == STEPS
    assert figures(tmp_path, "preempted") == whole
    starts = [json.loads(line) for line in (tmp_path / "runs" / "preempted" / "starts.jsonl").read_text().splitlines()]
    assert [(start["from_step"], start["slurm_restart"]) for start in starts] == [(0, None), (1, 1)]
    assert starts[1]["before"]["how"] == "requeued"


def ranks_of_nodes(folder: Path, job: str) -> dict[str, int]:
    """How many ranks ran on each node that had some."""
    logs = (folder / "logs" / job).glob("node?/*/attempt_0/?")
    return dict(Counter(node for node, _ in {(log.parents[2].name, log.name) for log in logs}))


def output_ended(output: Path) -> bool:
    return output.is_file() and "ended with status" in output.read_text()
