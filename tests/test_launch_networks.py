"""A job over two machines: launch/torchrun.sh in two network namespaces with an address each, Ray and engines on both."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.networks import Network, two_networks
from tests.runs import figures, tiny_recipe
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

pytestmark = [pytest.mark.hang, pytest.mark.slow]

ROOT = Path(__file__).parent.parent
END_S, LEFT_S = 420.0, 10.0
# A machine of its own in name and shared memory, of which what is left there is written down.
MACHINE = """
hostname "$0" && mount --bind "$HOSTS" /etc/hosts && mount -t tmpfs tmpfs /dev/shm || exit 99
bash "$TREE/launch/torchrun.sh" "$@"
status=$?
find /dev/shm -mindepth 1 >"$FOLDER/left-$0"
exit "$status"
"""


@dataclass
class Side:
    """One machine of a job."""

    name: str
    network: Network
    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def output(self) -> str:
        return (self.folder / f"output-{self.name}").read_text(errors="replace")

    @property
    def left(self) -> str:
        """Shared memory that the job has left behind."""
        return (self.folder / f"left-{self.name}").read_text()


@contextmanager
def job(folder: Path, recipe: Path) -> Iterator[list[Side]]:
    """The two sides of a job, of which nothing is left at the end."""
    with two_networks() as networks:
        hosts = "".join(f"{network.address} node{number}\n" for number, network in enumerate(networks))
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
        sides = []
        root = Path(tempfile.mkdtemp(prefix="n", dir="/tmp"))  # short: Ray's sockets lie below
        try:
            for number, network in enumerate(networks):
                name, temporary = f"node{number}", root / str(number)
                temporary.mkdir()
                # As the user would set them, and nothing that this test's own process was told of threads.
                environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
                environment |= {"NUM_NODES": "2", "NODE_RANK": str(number), "RANKS_PER_NODE": "1", "MASTER_ADDRESS": "node0"}
                environment |= {"TREE": str(ROOT), "FOLDER": str(folder), "HOSTS": str(folder / "hosts")}
                environment |= {"TMPDIR": str(temporary)}
                command = ["nsenter", "-t", str(network.holder), "-n", "unshare", "--mount", "--uts"]
                with (folder / f"output-{name}").open("wb") as output:
                    process = subprocess.Popen(
                        [*command, "bash", "-c", MACHINE, name, str(recipe)],
                        env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    )  # fmt: skip
                sides.append(Side(name, network, process, folder))
            yield sides
        finally:
            for side in sides:
                side.process.kill()
                side.network.clear()
                side.process.wait()
            shutil.rmtree(root, ignore_errors=True)


def assert_ended(sides: list[Side], status: int) -> None:
    """Both end, and nothing is left of either."""
    end = time.monotonic() + END_S
    while any(side.process.poll() is None for side in sides) and time.monotonic() < end:
        time.sleep(0.05)
    shown = "\n".join(f"{side.name} {side.process.poll()}: {side.output[-6000:]}" for side in sides)
    assert [side.process.poll() for side in sides] == [status, status], shown
    for side in sides:
        assert side.left == "", f"{side.name} has left {side.left}"
        assert side.network.emptied(LEFT_S), f"{side.name} has left processes"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    save_tiny_tokenizer(save_tiny_model(folder / "model", "qwen3", layers=2, head_dim=32))
    rows = "".join(f'{{"question": "{one}+{one}", "answer": "{2 * one}"}}\n' for one in range(8))
    (folder / "prompts.jsonl").write_text(rows)
    return folder


def write_recipe(folder: Path, name: str, **changes: object) -> Path:
    """Two ranks, one on each machine, that cut every matrix; an engine on each."""
    changes |= {"rollout__engines": 2, "reward": [{"kind": "function", "target": "tests.rewards:digits"}],
                "data__prompts__path": str(folder / "prompts.jsonl")}  # fmt: skip
    return tiny_recipe(folder, name, False, 2, 2, 1, 3, **changes)


def test_two_machines_train_to_the_end_and_leave_nothing(folder: Path) -> None:
    with job(folder, write_recipe(folder, "whole")) as sides:
        assert_ended(sides, 0)
    assert [line["step"] for line in figures(folder, "whole")] == [1, 2, 3]
