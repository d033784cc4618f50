"""A job on two machines: launch/torchrun.sh in two network namespaces with an address each, Ray and engines in both. The job
trains to the end, and it ends on both sides in any phase when the cable between them is cut."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megarl.telemetry.exit_status import HUNG
from tests.networks import Network, two_networks
from tests.runs import metrics_of, tiny_recipe
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

ROOT = Path(__file__).parents[2]
START_S, END_S, LEFT_S = 420.0, 420.0, 10.0
pytestmark = [pytest.mark.hang, pytest.mark.nightly, pytest.mark.timeout(START_S + END_S + 60)]

# Half of this time is the limit for a silent machine. Rank 1 waits so long for rank 0, which first asks Ray about both
# machines.
COLLECTIVE_S = 48
# A sync sends 4 MB in each direction over the cable; before the sync, each side sends at most this.
VOCAB, BEFORE_SYNC_BYTES = 32768, 3 << 19
SLOW_BYTES_PER_S = 1 << 20
# The update has 400 passes over a batch, and each pass sends half a megabyte. Everything before it sends less than a
# megabyte.
UPDATE_BYTES = 8 << 20
# A part of the processor time that an engine needs for a rollout of 200 tokens. The rest of a step needs almost none.
ROLLOUT_S = 0.5
# A machine with its own name, processes and shared memory. It lists the files that are left in its shared memory.
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
        """The shared memory that the job has not removed."""
        return (self.folder / f"left-{self.name}").read_text()

    def engine_seconds(self) -> float:
        """Return the processor seconds that the engine has used so far."""
        seconds = 0.0
        for process in map(psutil.Process, self.network.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                seconds += sum(process.cpu_times()[:2]) if "EngineCore" in process.name() else 0.0
        return seconds


@contextmanager
def job(folder: Path, recipe: Path, **settings: str) -> Iterator[list[Side]]:
    """Start a job and yield its two sides; end all their processes."""
    with two_networks() as networks:
        hosts = "".join(f"{network.address} node{number}\n" for number, network in enumerate(networks))
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
        sides = []
        root = Path(tempfile.mkdtemp(prefix="n", dir="/tmp"))  # short, because Ray's sockets are below it
        try:
            for number, network in enumerate(networks):
                name, temporary = f"node{number}", root / str(number)
                temporary.mkdir()
                # A user's environment, without this test's own setting of threads.
                environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
                environment |= {"NUM_NODES": "2", "NODE_RANK": str(number), "RANKS_PER_NODE": "1", "MASTER_ADDRESS": "node0"}
                environment |= {"TREE": str(ROOT), "FOLDER": str(folder), "HOSTS": str(folder / "hosts")}
                environment |= {"TMPDIR": str(temporary)} | settings
                command = ["nsenter", "-t", str(network.holder), "-n", "unshare", "--mount", "--uts"]
                command += ["--pid", "--fork", "--kill-child", "--mount-proc"]
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


def wait_until(sides: list[Side], event: Callable[[], bool]) -> None:
    end = time.monotonic() + START_S
    while not event():
        shown = "\n".join(f"{side.name}: {side.output[-6000:]}" for side in sides)
        assert time.monotonic() < end, f"not within {START_S:g} s\n{shown}"
        assert all(side.process.poll() is None for side in sides), f"ended too early\n{shown}"
        time.sleep(0.01)


def assert_ended(sides: list[Side], *statuses: int) -> None:
    """Check that both sides end and leave nothing."""
    end = time.monotonic() + END_S
    while any(side.process.poll() is None for side in sides) and time.monotonic() < end:
        time.sleep(0.05)
    shown = "\n".join(f"{side.name} {side.process.poll()}: {side.output[-6000:]}" for side in sides)
    assert [side.process.poll() for side in sides] == list(statuses), shown
    for side in sides:
        assert side.left == "", f"{side.name} has left {side.left}"
        assert side.network.emptied(LEFT_S), f"{side.name} has left processes"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    save_tiny_tokenizer(save_tiny_model(folder / "model", "qwen3", vocab=VOCAB, layers=2, head_dim=32))
    rows = "".join(f'{{"question": "{number}+{number}", "answer": "{2 * number}"}}\n' for number in range(8))
    (folder / "prompts.jsonl").write_text(rows)
    return folder


def write_recipe(folder: Path, name: str, **changes: object) -> Path:
    """Write a recipe with a tensor-parallel rank and an engine on each machine."""
    changes = {"trainer__collective_timeout_s": COLLECTIVE_S} | changes
    changes |= {"rollout__engines": 2,
                "reward": [{"kind": "function", "target": "tests.rewards:digits"}],
                "data__prompts__path": str(folder / "prompts.jsonl")}  # fmt: skip
    return tiny_recipe(folder, name, False, 2, 2, 1, 3, **changes)


def test_two_machines_train_to_the_end_and_leave_nothing(folder: Path) -> None:
    with job(folder, write_recipe(folder, "whole", trainer__collective_timeout_s=240)) as sides:
        assert_ended(sides, 0, 0)
    assert [line["step"] for line in metrics_of(folder, "whole")] == [1, 2, 3]


def until_rollout(folder: Path, sides: list[Side], name: str = "rollout") -> None:
    """Wait until the middle of the second rollout of a run."""
    metrics = folder / "runs" / name / "metrics.jsonl"
    wait_until(sides, lambda: metrics.exists() and metrics.read_text().endswith("\n"))
    before = sides[1].engine_seconds()
    wait_until(sides, lambda: sides[1].engine_seconds() > before + ROLLOUT_S)


def until_update(folder: Path, sides: list[Side]) -> None:
    """Wait until some passes of the first update are done."""
    rollouts = folder / "runs" / "actor_update" / "rollouts"
    wait_until(sides, lambda: rollouts.exists() and any(rollouts.iterdir()))
    before = sides[0].network.sent_bytes()
    wait_until(sides, lambda: sides[0].network.sent_bytes() > before + UPDATE_BYTES)


def until_sync(folder: Path, sides: list[Side]) -> None:
    """Wait for the first sync, before the first step; the slow cable needs 4 s for its 4 MB."""
    for side in sides:
        side.network.slow(SLOW_BYTES_PER_S)
    wait_until(sides, lambda: all(side.network.sent_bytes() > BEFORE_SYNC_BYTES for side in sides))


CUTS: dict[str, tuple[Callable[[Path, list[Side]], None], dict[str, object]]] = {
    "rollout": (until_rollout, {"rollout__max_new_tokens": 200, "phases__actor_update__micro_batch": {"max_tokens": 256}}),
    "actor_update": (
        until_update,
        {
            "run__dump_rollouts": True,
            "phases__actor_logprob": {"micro_batch": {"max_tokens": 64}},
            "phases__actor_update__epochs": 400,
        },
    ),
    "weight_sync": (until_sync, {}),
}


@pytest.mark.parametrize("phase", CUTS)
def test_a_cut_cable_ends_both_sides_and_each_names_phase_and_peer(folder: Path, phase: str) -> None:
    until, changes = CUTS[phase]
    with job(folder, write_recipe(folder, phase, **changes)) as sides:
        until(folder, sides)
        sides[1].network.switch("down")
        assert_ended(sides, 1, 1)
        for rank, side in enumerate(sides):
            peer = 1 - rank
            named = rf"on rank {rank}, in phase {phase}: .* machine of rank {peer} at {sides[peer].network.address} "
            assert re.search(named, side.output), side.output


def test_a_stopped_engine_on_a_machine_without_ranks_is_named(folder: Path) -> None:
    recipe = tiny_recipe(
        folder, "beside", False, 1, 1, 1, 3, rollout__placement="separate", rollout__max_new_tokens=200, rollout__tensor=2,
        rollout__timeout_s=150, data__prompts__path=str(folder / "prompts.jsonl"), trainer__collective_timeout_s=120,
        phases__actor_update__micro_batch={"max_tokens": 256},
    )  # fmt: skip
    with job(folder, recipe, TRAINER_NODES="1") as sides:
        until_rollout(folder, sides, "beside")
        (core,) = [item for item in map(psutil.Process, sides[1].network.processes()) if "EngineCore" in item.name()]
        core.suspend()
        assert_ended(sides, HUNG, 0)
    assert re.search(r"engine-0 EngineCore \(process \d+\) is stopped \(SIGSTOP\)", sides[0].output), sides[0].output
    (written,) = (folder / "runs" / "beside").glob("hang-2-rollout")
    names = sorted(file.name for file in written.glob("*.txt"))
    assert "rank-00000.txt" in names and any(name.startswith("engine-0-EngineCore-") for name in names), names
    assert any(name.startswith("engine-0-actor-") and "most recent call" in (written / name).read_text() for name in names)
