"""A real Slurm of this test's own: munged, slurmctld and two slurmd, which are two nodes of this one machine.

Debian's slurm-wlm and munge, without their services: every daemon runs in the foreground, with its files in one folder, and
ends with the test.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from megarl.cluster.processes import start_tied
from tests.ports import unused_port

DEADLINE_S = 240.0
NODES = ("node0", "node1")
CPUS = 4  # on each node, whatever this machine has
# The tests may themselves run in a job of some other Slurm.
FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "MUNGE_")


class SlurmCluster:
    """Its commands, and how a job of it stands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        self.environment = {**inherited, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(
        self, *command: str, check: bool = True, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        settings = {**self.environment, **(environment or {})}
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=settings, check=False)
        assert not check or done.returncode == 0, f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def submit(self, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
        """The number of a job that `sbatch` took."""
        return self.run("sbatch", "--parsable", *arguments, environment=environment).stdout.strip().split(";")[0]

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol` says of a job, as JobState, ExitCode, Restarts."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, timeout_s: float, output: Path) -> dict[str, str]:
        """Wait for the end of a job and return how it stands. Raises AssertionError with its output if that takes long."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        self.until(lambda: self.job(number)["JobState"] in ends, timeout_s, output)
        return self.job(number)

    def until(self, condition: Callable[[], bool], timeout_s: float, *files: Path) -> None:
        """Wait for a condition. Raises AssertionError with the ends of `files` if that takes long."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= deadline:
                texts = [f"{file.name}: {file.read_text()[-4000:]}" for file in files if file.is_file()]
                queue = self.run("squeue", check=False).stdout
                raise AssertionError("\n".join([f"not after {timeout_s:g} s", queue, *texts]))
            time.sleep(0.2)


@contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Two nodes that take jobs; when it ends, no daemon and no job of it is left."""
    absent = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name, path=_path()) is None]
    if absent:
        pytest.skip(f"no {', '.join(absent)}: Debian packages slurm-wlm and munge, which `make setup` installs as root")
    if os.geteuid() != 0:
        pytest.skip("slurmd starts jobs as other users, which only root may")
    # Not the test's own folder: a UNIX socket's path may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="megarl-slurm-"))
    cluster = SlurmCluster(folder)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        logs = [folder / f"{name}.out" for name in ("munged", "slurmctld", *NODES)]
        _start_munge(folder, stack)
        cluster.until((folder / "munge.socket").exists, DEADLINE_S, *logs)
        _write_configuration(folder)
        _spawn(folder, stack, cluster.environment, "slurmctld", "slurmctld", "-D")
        cluster.until(lambda: cluster.run("scontrol", "ping", check=False).returncode == 0, DEADLINE_S, *logs)
        for node in NODES:
            _spawn(folder, stack, cluster.environment, node, "slurmd", "-D", "-N", node)
        stack.callback(_cancel_all, cluster)
        states = ("sinfo", "--noheader", "--Node", "--format=%T")
        cluster.until(lambda: cluster.run(*states).stdout.split() == ["idle"] * len(NODES), DEADLINE_S, *logs)
        yield cluster


def _path() -> str:
    # Debian puts the daemons where an ordinary user's PATH does not look.
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _start_munge(folder: Path, stack: ExitStack) -> None:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munged.pid",
             "seed-file": folder / "munged.seed", "log-file": folder / "munged.log"}  # fmt: skip
    # --force: a folder that others cannot enter is an error of munged otherwise; nobody else has to reach this one.
    options = [f"--{name}={path}" for name, path in files.items()]
    _spawn(folder, stack, dict(os.environ), "munged", "munged", "--foreground", "--force", *options)


def _write_configuration(folder: Path) -> None:
    ports = [unused_port() for _ in range(1 + len(NODES))]
    nodes = [
        f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory=1000"
        for name, port in zip(NODES, ports[1:], strict=True)
    ]
    lines = [
        "ClusterName=megarl",
        f"SlurmctldHost={socket.gethostname()}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        "SlurmUser=root",
        "SlurmdUser=root",
        # A requeued job may start when its old credential has expired, by default 2 minutes later.
        f"AuthInfo=socket={folder}/munge.socket,cred_expire=5",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        # More CPUs than the machine has, and no cgroups: those of a container are often read-only.
        "SlurmdParameters=config_overrides",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1",
        "ReturnToService=2",
        "JobRequeue=1",
        f"MailProg={shutil.which('true')}",
        "KillWait=30",
        "MpiDefault=none",
        *nodes,
        f"PartitionName=tests Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP",
    ]
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    (folder / "state").mkdir()


def _spawn(folder: Path, stack: ExitStack, environment: dict[str, str], name: str, program: str, *options: str) -> None:
    path = shutil.which(program, path=_path())
    assert path is not None
    with open(folder / f"{name}.out", "wb") as log:
        process = start_tied([path, *options], {**environment, "PATH": _path()}, signal.SIGTERM, log)
    stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _cancel_all(cluster: SlurmCluster) -> None:
    """While the daemons still run, so that they end what the jobs started."""
    numbers = cluster.run("squeue", "--noheader", "--format=%A").stdout.split()
    if numbers:
        cluster.run("scancel", *numbers)
    cluster.until(lambda: not cluster.run("squeue", "--noheader").stdout.strip(), DEADLINE_S)
