"""A run directory that is full, torn, or wanted by two runs loses as little as possible; no disk, pipe, terminal or locale
behind standard output ends a run, and no text file depends on the locale."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from megarl.build import _disk_full
from megarl.megatron import checkpoint
from megarl.models.layout import Layout
from megarl.telemetry import exit_status, run_directory
from megarl.telemetry.disk import DiskFull, LineFile, describe_full, is_full, read_lines, write_whole
from megarl.telemetry.exit_status import BAD_INPUT
from megarl.telemetry.run_directory import RunDirectory, RunDirectoryError
from megarl.telemetry.sinks import Memory
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

FULL = "/dev/full"  # a stand-in for a file on a full disk, which opens and takes no byte


def test_a_torn_line_is_skipped_and_ended(tmp_path: Path) -> None:
    exit_status.record_start(tmp_path, ["a"], 0)
    for torn in ('{"time": "2026', '{"time"', "\0\0\0"):
        with (tmp_path / "starts.jsonl").open("a") as file:
            file.write(torn)
        exit_status.starts_summary(tmp_path)  # skips the torn line
        exit_status.record_end(tmp_path, exit_status.REQUEUE, "SIGTERM after step 3")
        exit_status.record_start(tmp_path, ["b"], 3)
    assert exit_status.starts_summary(tmp_path) == [
        "started 4 times; the starts before the last ended so:",
        "  3 x requeued: SIGTERM after step 3",
    ]


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"how": "failed"}', "\0" * 40])
def test_a_torn_record_of_the_end_counts_as_missing(tmp_path: Path, torn: str) -> None:
    exit_status.record_start(tmp_path, ["a"], 0)
    (tmp_path / "ended.json").write_text(torn)
    assert exit_status.hang_reason(tmp_path) is None
    exit_status.record_start(tmp_path, ["a"], 0)
    assert "1 x unknown" in exit_status.starts_summary(tmp_path)[1]


def test_a_torn_memory_of_a_sink_starts_another_run_at_the_sink(tmp_path: Path) -> None:
    (tmp_path / "wandb.json").write_text('{"id": "a')
    memory = Memory(tmp_path / "wandb.json", new=False)
    assert (memory.id, memory.step) == (None, 0)


def test_a_line_that_does_not_fit_is_the_only_lost_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.symlink_to(FULL)
    lines = LineFile(path)
    with pytest.raises(OSError) as caught:
        lines.append('{"a": 2}')
    assert is_full(caught.value) and caught.value.filename == str(path)
    lines.close()  # no buffered text fails again


def test_a_file_that_does_not_fit_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("before")
    (tmp_path / f".recipe.yaml.{os.getpid()}").symlink_to(FULL)
    with pytest.raises(OSError, match="recipe.yaml") as caught:
        write_whole(path, "after")
    assert is_full(caught.value) and path.read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.yaml"]
    write_whole(path, "é")
    assert path.read_bytes() == "é".encode()


def test_a_full_disk_ends_a_run_with_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exit_status.record_start(tmp_path, ["a"], 0)
    error = DiskFull(28, "no room for a checkpoint", str(tmp_path))
    assert _disk_full(RunDirectory(tmp_path), 0, error) == 1
    message = f"{tmp_path}: no room for a checkpoint; make room: no checkpoint was written so far"
    assert message in capsys.readouterr().err
    # The agent knows less about the reason.
    exit_status.record_end(tmp_path, exit_status.FAILED, "rank 0 ended with exit status 1")
    exit_status.record_start(tmp_path, ["a"], 0)
    assert exit_status.starts_summary(tmp_path)[1] == f"  1 x failed: {message}"
    (tmp_path / f".ended.json.{os.getpid()}").symlink_to(FULL)
    assert _disk_full(RunDirectory(tmp_path), 0, error) == 1
    assert "ended.json cannot be written" in capsys.readouterr().err


def test_a_full_disk_is_recognised_from_the_errors_of_all_libraries(tmp_path: Path) -> None:
    for error in (OSError(28, "x"), OSError(122, "x"), RuntimeError("basic_ios::clear: iostream error"),
                  RuntimeError("Worker failure: [Errno 28] No space left on device")):  # fmt: skip
        assert is_full(error)
        outer = ValueError("a checkpoint")
        outer.__cause__ = error
        assert is_full(outer) and str(tmp_path) in describe_full(error, tmp_path)
    assert not is_full(OSError(13, "x")) and not is_full(ValueError("x"))
    assert "a quota is used up" in describe_full(OSError(122, "x"), tmp_path)


def save_on_a_full_disk(directory: str, folder: str) -> tuple[str | None, list[str], int, int]:
    """Save without room and with room; return the error, the files left, the counted bytes and the written bytes."""
    from tests.engine_cases import engine, start_places

    places = start_places([Layout(data=2)])
    roles = {"actor": engine(directory, places[Layout(data=2)], "actor")}
    counted: list[int] = []

    def no_room(place: Path, what: str, num_bytes: int) -> DiskFull:
        counted.append(num_bytes)
        return DiskFull(28, f"no room for {what}", str(place))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "no_room", no_room)
        patch.setattr(checkpoint, "free_bytes", lambda path: 0 if checkpoint.dist.get_rank() else 1 << 40)
        with pytest.raises(DiskFull) as caught:
            checkpoint.save_checkpoint(folder, 7, roles, {})
    checkpoint.dist.barrier()
    left = sorted(str(path) for path in Path(folder).rglob("*"))
    checkpoint.dist.barrier()
    saved = checkpoint.save_checkpoint(folder, 7, roles, {})
    written = sum(file.stat().st_size for file in saved.rglob("*.distcp"))
    return caught.value.strerror, left, counted[0], written


def test_a_checkpoint_without_room_is_refused_on_every_rank_before_it_is_written(tmp_path: Path) -> None:
    model = str(save_tiny_model(tmp_path / "model"))
    for error, left, counted, written in run_ranks(save_on_a_full_disk, 2, model, str(tmp_path / "checkpoints")):
        assert error == "no room for checkpoint of step 7: the actor" and left == []
        assert 0.6 < counted / written <= 1.0


HOLD = """
import os, socket, sys
from pathlib import Path
from megarl.telemetry import run_directory
path, lease_s, host = sys.argv[1:]
if host:
    socket.gethostname = lambda: host
run_directory.LEASE_S = float(lease_s)
run = run_directory.RunDirectory(Path(path))
run.lock()
if os.fork() == 0:
    os.setsid()
os.write(1, f"{os.getpid()}\\n".encode())  # in one write: two processes share the pipe
sys.stdin.read()
"""


@contextmanager
def holder(path: Path, host: str = "") -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the lock of a run, and whose child outlives it."""
    command = [sys.executable, "-c", HOLD, str(path), str(run_directory.LEASE_S), host]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    try:
        yield process
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_second_run_is_refused_only_while_the_first_run_lives(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with holder(tmp_path) as process:
        for take in (run.lock, run.refuse_running):
            with pytest.raises(RunDirectoryError, match=f"process {process.pid} on {os.uname().nodename}"):
                take()
        process.kill()
        process.wait()
        run.refuse_running()
        run.lock()  # the surviving child does not hold the lock
    again = RunDirectory(tmp_path)
    again.lock()  # a failed run of this process does not block the next run
    again.unlock()
    assert not (tmp_path / "run.lock").exists()


def test_the_lock_of_another_host_is_taken_over_after_its_last_touch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "LEASE_S", 1.0)
    run = RunDirectory(tmp_path)
    with holder(tmp_path, "elsewhere") as process:
        run.refuse_running()  # no process of this host writes there
        with pytest.raises(RunDirectoryError, match=f"process {process.pid} on elsewhere"):
            run.lock()
        process.kill()
        process.wait()
        run.lock()
    run.unlock()


def test_a_torn_lock_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text('{"host')
    run = RunDirectory(tmp_path)
    run.lock()
    run.unlock()


def test_a_recipe_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for content in (b"", b"run: {name: \xe9}", b"run: ["):
        run.recipe.write_bytes(content)
        with pytest.raises(RunDirectoryError, match="recipe.yaml"):
            run.read_recipe()


def test_only_objects_count_as_lines(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b'{"a": 1}\n3\n\n"b"\n{"c": "\xe2\x80\n{"d": "\xe2\x80\xa8"}')
    assert read_lines(tmp_path / "x") == [{"a": 1}, {"d": "\u2028"}]


ROOT = Path(__file__).resolve().parents[2]
# Write as a rank, an agent and their libraries do: prints, a line of rich, warnings and logging.
WRITE = """
import logging, sys, warnings
from megarl.telemetry.disk import endure_output
endure_output()
from megarl.telemetry.progress import ProgressLine
with ProgressLine(2) as progress:
    for step in (1, 2):
        progress.step(step, {"reward/mean": 0.5})
        progress.note("±0.1 → é")
        print("step", step, flush=True)
        print("error", file=sys.stderr, flush=True)
        warnings.warn(f"warning {step}")
        logging.warning("warning")
open(sys.argv[1], "w").write("went on")
"""


def write(tmp_path: Path, stdout: int, stderr: int, **environment: str) -> int:
    """Run a program that writes to the descriptors, and return its exit status."""
    command = [sys.executable, "-c", WRITE, str(tmp_path / "end")]
    done = subprocess.run(command, stdout=stdout, stderr=stderr, env={**os.environ, "PYTHONPATH": str(ROOT), **environment})
    assert (tmp_path / "end").read_text() == "went on"
    return done.returncode


def closed_pipe() -> int:
    """Return the write end of a pipe without a reader."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def closed_terminal() -> int:
    """Return a terminal whose window is closed."""
    window, terminal = pty.openpty()
    os.close(window)
    return terminal


@pytest.mark.parametrize("make", [closed_pipe, closed_terminal, lambda: os.open("/dev/full", os.O_WRONLY)],
                         ids=["pipe", "terminal", "disk"])  # fmt: skip
def test_refused_output_does_not_end_a_program(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    descriptor = make()
    errors = tmp_path / "errors"
    with errors.open("wb") as file:
        assert write(tmp_path, descriptor, file.fileno()) == 0
    assert errors.read_text().count("standard output cannot be written") == 1
    assert write(tmp_path, descriptor, descriptor) == 0
    os.close(descriptor)


def test_a_locale_that_lacks_a_character_drops_no_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("wb") as file:
        assert write(tmp_path, file.fileno(), file.fileno(), PYTHONIOENCODING="latin-1") == 0
    assert "±0.1 \\u2192 é".encode("latin-1") in out.read_bytes()


def test_a_command_ends_silently_at_a_closed_pipe() -> None:
    command = [sys.executable, "-m", "megarl.cli", "check", "--help"]
    descriptor = closed_pipe()
    done = subprocess.run(command, stdout=descriptor, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
    os.close(descriptor)
    assert done.stderr == b""


@pytest.mark.parametrize("module", ["megarl.cluster.node", "megarl.cluster.node_agent"])
def test_every_process_of_a_run_endures_a_full_disk_behind_standard_error(module: str) -> None:
    wrong = {"megarl.cluster.node_agent": ["--rdzv-backend", "c10d", "--nnodes", "2", "x.py"]}
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-W", "ignore", "-m", module, *wrong.get(module, [])]
        done = subprocess.run(command, stdout=full, stderr=full, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == BAD_INPUT


def test_no_text_file_of_megarl_has_the_encoding_of_the_locale() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--preview", "--select", "PLW1514", "megarl"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout
    files = sorted((ROOT / "megarl").rglob("*.py"))
    assert not [file for file in files if "text=True" in file.read_text("utf-8")], 'say encoding="utf-8"'
