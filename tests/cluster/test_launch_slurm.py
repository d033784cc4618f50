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
        return self.cluster.wait(self.number, JOB_S, said=self.output)


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_slurm_accepts_the_file(cluster: SlurmCluster, file: Path) -> None:
    done = cluster.run(
        "sbatch", "--test-only", str(file), "recipes/ppo-tiny.yaml", environment={"SBATCH_GPUS_PER_NODE": "0"}
    )
    assert "to start at" in done.stderr


@pytest.mark.parametrize(("status", "state"), [("0", "COMPLETED"), ("2", "FAILED")])
def test_a_job_ends_with_the_status_of_its_nodes(cluster: SlurmCluster, tmp_path: Path, status: str, state: str) -> None:
    job = Job(cluster, tmp_path, MULTI_NODE, status, "run.steps=3", RANKS_PER_NODE="2", MASTER_ADDRESS="10.0.0.7")
    ended = job.ended()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == (state, f"{status}:0", "0")
    for number in (0, 1):
        expected = f"node {number} of 2, 2 ranks on the first 2, master 10.0.0.7: {status} run.steps=3\n"
        assert job.node(number) == expected


def test_a_nodes_request_for_a_start_does_not_hide_another_nodes_failure(cluster: SlurmCluster, tmp_path: Path) -> None:
    """srun returns the highest status, and 75 is higher than 1."""
    ended = Job(cluster, tmp_path, MULTI_NODE, "says", "75", "1").ended()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "0")


def test_rollout_nodes_and_the_first_host(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "launch/slurm/separate.sbatch", "0")
    assert job.ended()["JobState"] == "COMPLETED"
    assert job.node(1) == "node 1 of 2, 8 ranks on the first 1, master node0: 0\n"


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


def test_apptainer_runs_each_node(cluster: SlurmCluster, tmp_path: Path) -> None:
    """A stand-in for apptainer prints its arguments."""
    stand_in = tmp_path / "bin" / "apptainer"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/bash\necho "$*"\nwhile [ "$1" != bash ]; do shift; done\nexec "$@"\n')
    stand_in.chmod(0o755)
    environment = {"CONTAINER": "apptainer:/images/megarl.sif", "CONTAINER_MOUNTS": "/models", "MASTER_ADDRESS": "a"}
    path = f"{stand_in.parent}:{os.environ['PATH']}"
    job = Job(cluster, tmp_path, MULTI_NODE, "0", PATH=path, **environment)
    assert job.ended()["JobState"] == "COMPLETED"
    request, *_, last_line = job.node(1).splitlines()
    assert request.startswith(f"exec --nv --pwd {tmp_path} --bind {tmp_path},{job.logs},/models /images/megarl.sif bash -c")
    assert last_line.startswith("node 1 of 2")


def run_alone(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the sbatch file as a plain script, with stand-ins for Slurm's commands; `srun` prints its arguments."""
    for name, text in {"srun": 'printf "%s\\n" "$@"', "scontrol": "echo node0"}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[0-1]",
             "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "4",
             "SLURM_JOB_NAME": "megarl", "LOG_ROOT": str(folder)}  # fmt: skip
    environment = {**os.environ, **slurm, "PATH": f"{folder}:{os.environ['PATH']}", **environment}
    command = ["bash", MULTI_NODE, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("more", ["", "/models:/models"])
def test_pyxis_gets_the_container(tmp_path: Path, more: str) -> None:
    done = run_alone(tmp_path, "x.yaml", CONTAINER="pyxis:/images/megarl.sqsh", CONTAINER_MOUNTS=more)
    assert done.returncode == 0
    mounts = f"--container-mounts={ROOT}:{ROOT},{tmp_path}/7:{tmp_path}/7" + (f",{more}" if more else "")
    assert {"--container-image=/images/megarl.sqsh", f"--container-workdir={ROOT}", mounts} <= set(done.stdout.splitlines())


@pytest.mark.parametrize(("arguments", "environment", "said"),
                         [([], {}, "no recipe"), (["x.yaml"], {"CONTAINER": "docker:x"}, "CONTAINER = docker:x: must be"),
                          (["x.yaml"], {"MODULES": "cuda"}, "module")])  # fmt: skip
def test_bad_settings_end_the_job_before_it_starts(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], said: str
) -> None:
    done = run_alone(tmp_path, *arguments, **environment)
    assert done.returncode == 2 and said in done.stderr and "--ntasks-per-node" not in done.stdout
