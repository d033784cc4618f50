"""One node of a job: the meaning of its settings, and the end of everything that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megarl.cluster.node import main
from megarl.cluster.node_settings import address_towards, network_environment, read_node_settings
from megarl.telemetry.exit_status import BAD_INPUT
from tests.ports import unused_port
from tests.sink_cases import wait_for

DEADLINE_S = 600
ROOT = Path(__file__).parents[2]
SETTINGS = {"NUM_NODES": "2", "NODE_RANK": "1", "RANKS_PER_NODE": "4", "MASTER_ADDRESS": "127.0.0.1"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"NUM_NODES": ""}, "NUM_NODES = nothing: Field required"),
        ({"RANKS_PER_NODE": "many"}, "RANKS_PER_NODE = many: Input should be a valid integer"),
        ({"NODE_RANK": "2"}, "NODE_RANK = 2: must be below NUM_NODES = 2"),
        ({"TRAINER_NODES": "3"}, "TRAINER_NODES = 3: must not be above NUM_NODES = 2"),
        ({"MASTER_ADDRESS": ""}, "MASTER_ADDRESS = nothing: Field required"),
        ({"MASTER_ADDRESS": "localhost"}, "MASTER_ADDRESS = localhost: is 127.0.0.1 on this machine, which other nodes"),
        ({"MASTER_ADDRESS": "no.such.host.invalid"}, "MASTER_ADDRESS = no.such.host.invalid: no way there"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_node_settings({**SETTINGS, **changes})


def test_another_number_of_ranks_than_the_recipes_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    assert main([str(ROOT / "recipes/ppo-tiny.yaml")]) == BAD_INPUT
    assert "TRAINER_NODES * RANKS_PER_NODE = 2 * 4 = 8: must be trainer.ranks = 4" in capsys.readouterr().err


def test_messages_take_the_interface_to_the_first_node_unless_the_site_says_otherwise() -> None:
    address = address_towards("127.0.0.1")
    assert network_environment("192.0.2.1", {}) == {"VLLM_HOST_IP": "192.0.2.1"}, "no interface has this address"
    chosen = network_environment(address, {"NCCL_SOCKET_IFNAME": "ib0"})
    assert chosen == {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


# A process without a parent that ignores SIGTERM and holds a file and a semaphore in /dev/shm.
STUBBORN = """
import _multiprocessing, mmap, os, signal, sys, time
if os.fork():
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
os.truncate(file, 4096)
memory = mmap.mmap(file, 4096)
semaphore = _multiprocessing.SemLock(1, 1, 1, "/" + os.path.basename(sys.argv[1]), False)
with open(sys.argv[2] + ".part", "w") as mark:
    mark.write(str(os.getpid()))
os.rename(mark.name, sys.argv[2])
time.sleep(600)
"""
NODE = """
import os, signal, sys, time
from pathlib import Path
import psutil
from megarl.cluster import processes
descendants = processes.Descendants()
processes.start_tied([sys.executable, "-c", *sys.argv[1:4]], os.environ, signal.SIGKILL).wait()
while not Path(sys.argv[3]).exists():
    time.sleep(0.01)
if sys.argv[4] == "killed":
    descendants.tend((int(Path(sys.argv[3]).read_text()),))
    os.kill(int(Path(sys.argv[3]).read_text()), signal.SIGKILL)
    os.waitpid(-1, 0)
while sys.argv[4] == "tended" and psutil.pid_exists(int(Path(sys.argv[3]).read_text())):
    descendants.tend(())
    time.sleep(0.05)
descendants.end()
"""


@pytest.mark.parametrize("before", ["alive", "killed", "tended"])
def test_a_node_ends_its_processes_by_force_and_removes_their_shared_memory(tmp_path: Path, before: str) -> None:
    """At its end, or as soon as it has tended a process without a parent for a second."""
    # Without megarl's prefix, because a trainer of another test removes unlocked files with this prefix.
    shared, mark = Path(f"/dev/shm/test-node-{os.getpid()}"), tmp_path / "pid"
    semaphore = shared.with_name(f"sem.{shared.name}")
    try:
        done = subprocess.run(
            [sys.executable, "-c", NODE, STUBBORN, shared, mark, before], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert not psutil.pid_exists(int(mark.read_text()))
        assert not shared.exists() and not semaphore.exists()
    finally:
        shared.unlink(missing_ok=True)
        semaphore.unlink(missing_ok=True)


TIED = """
import os, signal, sys, time
from megarl.cluster.processes import start_tied
child = start_tied(["sleep", "600"], os.environ, signal.SIGKILL)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_the_processes_of_a_killed_node_end() -> None:
    node = subprocess.Popen([sys.executable, "-c", TIED], stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    child = int(node.stdout.readline())
    node.kill()
    node.communicate()

    def running() -> list[int]:
        processes = psutil.process_iter(["status"])
        return [process.pid for process in processes if process.info["status"] != psutil.STATUS_ZOMBIE]

    wait_for(lambda: child not in running())


def test_engines_get_no_signal_of_a_preemption_and_leave_nothing_when_they_are_killed() -> None:
    """Slurm sends a signal to all processes of a step; the engines must live on for the ranks that save."""
    command = [sys.executable, "-m", "tests.ray_of_a_node", str(unused_port())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
