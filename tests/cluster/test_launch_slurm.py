"""The shipped sbatch files on a real Slurm of two nodes, unchanged except for settings in the environment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm_cluster import SlurmCluster, slurm_cluster

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "launch" / "slurm").glob("*.sbatch"))
MULTI_NODE = "launch/slurm/colocated.sbatch"
JOB_S = 240.0
pytestmark = pytest.mark.slurm

# A stand-in for launch/node.sh. `says` gets the status of each node. `hold` waits for a signal on its first start, with a
# child that a signal would kill.
NODE = """#!/usr/bin/env bash
echo "node $NODE_RANK of $NUM_NODES, $RANKS_PER_NODE ranks on the first $TRAINER_NODES, master $MASTER_ADDRESS: $*"
if [ "$1" = says ]; then
    shift
    status=${@:NODE_RANK+1:1}
    echo "$status" >"$LOG_DIR/node-$NODE_RANK.status"
    exit "$status"
fi
[ "$1" = hold ] || exit "$1"
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 0
stop() { echo "$1 with the child $(kill -0 $child 2>/dev/null && echo alive || echo dead)"; kill $child; exit 75; }
trap 'stop USR1' USR1
trap 'sleep 1; stop TERM' TERM
sleep 600 &
child=$!
echo $$ >"$LOG_DIR/node-$NODE_RANK.pid"
echo holding
while :; do wait; done
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as cluster:
        yield cluster


class Job:
    """A submitted file whose nodes run NODE, and the job's output."""

    def __init__(self, cluster: SlurmCluster, folder: Path, *arguments: str, **environment: str) -> None:
        (folder / "launch").mkdir(parents=True)
        (folder / "launch" / "slurm").symlink_to(ROOT / "launch" / "slurm")
        (folder / "launch" / "node.sh").write_text(NODE)
        self.output, self.cluster = folder / "job.out", cluster
        settings = {"SBATCH_GPUS_PER_NODE": "0", "SBATCH_OUTPUT": str(self.output), "MEGARL_DIR": str(folder), **environment}
        self.number = cluster.submit(*arguments, environment=settings)
        self.logs = folder / "logs" / self.number

    def node(self, number: int) -> str:
        log = self.logs / f"node-{number}.log"
        return log.read_text() if log.is_file() else ""

    def hold(self) -> None:
        """Wait until both nodes can take a signal."""
        self.cluster.until(lambda: all("holding" in self.node(number) for number in (0, 1)), JOB_S, self.output)

    def ended(self) -> dict[str, str]:
        return self.cluster.wait(self.number, JOB_S, self.output)


# A shipped file, its variables, the status of its nodes, and what each node prints.
JOBS: dict[str, tuple[dict[str, str], str, list[str]]] = {
    "one_node": ({"MASTER_ADDRESS": "10.0.0.7"}, "0", ["node 0 of 1, 8 ranks on the first 1, master 10.0.0.7"]),
    "colocated": (
        {"RANKS_PER_NODE": "2", "MASTER_ADDRESS": "10.0.0.7"},
        "2",
        [f"node {number} of 2, 2 ranks on the first 2, master 10.0.0.7" for number in (0, 1)],
    ),
    "separate": ({}, "0", [f"node {number} of 2, 8 ranks on the first 1, master node0" for number in (0, 1)]),
}


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_shipped_file_runs_its_nodes_and_ends_with_their_status(cluster: SlurmCluster, tmp_path: Path, file: Path) -> None:
    variables, status, nodes = JOBS[file.stem]
    job = Job(cluster, tmp_path, str(file), status, "run.steps=3", **variables)
    ended = job.ended()
    state = "FAILED" if int(status) else "COMPLETED"
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == (state, f"{status}:0", "0")
    assert [job.node(number) for number in range(len(nodes))] == [f"{node}: {status} run.steps=3\n" for node in nodes]


def test_a_nodes_request_for_a_start_does_not_hide_another_nodes_failure(cluster: SlurmCluster, tmp_path: Path) -> None:
    """srun returns the highest status, and 75 is higher than 1."""
    ended = Job(cluster, tmp_path, MULTI_NODE, "says", "75", "1").ended()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "0")


def test_jobs_that_have_to_leave_are_queued_again_until_starts_save_nothing(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Slurm waits for seconds before it starts a job again: meanwhile the next job runs."""
    jobs = {"stalled": Job(cluster, tmp_path / "stalled", MULTI_NODE, "says", "75", "75")}
    for name in ("warned", "preempted", "without a node"):
        job = jobs[name] = Job(cluster, tmp_path / name, MULTI_NODE, "hold")
        job.hold()
        if name == "warned":  # as with `--signal=B:USR1@600`: only node.sh gets the signal, and no other process of the step
            cluster.run("scancel", "--signal=USR1", "--batch", job.number)
        elif name == "preempted":  # Slurm sends SIGTERM to every process of the step
            cluster.run("scancel", "--signal=TERM", job.number)
        else:
            cluster.run("scontrol", "update", "NodeName=node1", "State=DOWN", "Reason=test")
            try:
                cluster.until(lambda: cluster.job(job.number)["Restarts"] == "1", JOB_S, job.output)  # noqa: B023
            finally:
                # Slurm may have resumed the node already, because its daemon still answers.
                cluster.run("scontrol", "update", "NodeName=node1", "State=RESUME", check=False)
    ends = {name: job.ended() for name, job in jobs.items()}
    states = {name: (end["JobState"], end["ExitCode"], end["Restarts"]) for name, end in ends.items()}
    assert states == {"stalled": ("FAILED", "1:0", "2")} | dict.fromkeys([*jobs][1:], ("COMPLETED", "0:0", "1"))
    assert "3 starts in a row have saved nothing beyond" in jobs["stalled"].output.read_text()
    for number in (0, 1):
        # The log has two starts, because the second start appends to it.
        assert jobs["warned"].node(number).splitlines()[1:3] == ["holding", "USR1 with the child alive"]
        assert jobs["warned"].node(number).count(f"node {number} of 2") == 2
    assert "TERM with the child dead" in jobs["preempted"].node(0)
    assert jobs["without a node"].node(1).count("node 1 of 2") == 2


def test_a_cancelled_job_has_time_to_save_and_stays_cancelled(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, MULTI_NODE, "hold")
    job.hold()
    cluster.run("scancel", job.number)
    cluster.until(lambda: "ended with status 75" in job.output.read_text(), JOB_S, job.output)
    ended = job.ended()
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    assert all("TERM with the child" in job.node(number) for number in (0, 1))


def run_alone(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the sbatch file as a plain script, with stand-ins for Slurm's commands; `srun` prints its arguments."""
    for name, text in {"srun": 'echo "$*"', "scontrol": "echo node0"}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[0-1]",
             "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "4",
             "SLURM_JOB_NAME": "megarl", "LOG_ROOT": str(folder)}  # fmt: skip
    environment = {**os.environ, **slurm, "PATH": f"{folder}:{os.environ['PATH']}", **environment}
    command = ["bash", MULTI_NODE, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("container", "more", "words"),
    [
        ("pyxis:/image", "", "--container-image=/image --container-workdir={0} --container-mounts={0}:{0},{1}:{1} bash -c"),
        ("pyxis:/image", "/models:/models", "--container-mounts={0}:{0},{1}:{1},/models:/models bash -c"),
        ("apptainer:/image", "/models", "apptainer exec --nv --pwd {0} --bind {0},{1},/models /image bash -c"),
    ],
)
def test_each_node_runs_in_the_container(tmp_path: Path, container: str, more: str, words: str) -> None:
    done = run_alone(tmp_path, "x.yaml", CONTAINER=container, CONTAINER_MOUNTS=more)
    assert done.returncode == 0 and words.format(ROOT, tmp_path / "7") in done.stdout


@pytest.mark.parametrize(("arguments", "environment", "words"),
                         [([], {}, "no recipe"), (["x.yaml"], {"CONTAINER": "docker:x"}, "CONTAINER = docker:x: must be"),
                          (["x.yaml"], {"MODULES": "cuda"}, "module")])  # fmt: skip
def test_bad_settings_end_the_job_before_it_starts(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], words: str
) -> None:
    done = run_alone(tmp_path, *arguments, **environment)
    assert done.returncode == 2 and words in done.stderr and "--ntasks-per-node" not in done.stdout
