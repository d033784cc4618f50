"""No disk, pipe, terminal or locale behind standard output ends a run, and no text file depends on the locale."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.telemetry.exit_status import BAD_INPUT

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
