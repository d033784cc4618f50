"""Every shell script, Dockerfile and Makefile of the tree parses, and its linter has nothing to say.

Files are found, not listed: a new one is checked from its first commit on. Recipes are loaded by tests of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def files_of_the_tree() -> list[Path]:
    """What git has or would take, relative to the root: no build, run, model or environment."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout.split("\0")
    return sorted(Path(name) for name in names if name and (ROOT / name).is_file())


def is_shell_script(file: Path) -> bool:
    """By its name, or for a name without an ending (.ci/run) by its first line."""
    if file.suffix in (".sh", ".sbatch"):
        return True
    with (ROOT / file).open("rb") as opened:
        first = opened.readline()
    return first.startswith(b"#!") and first.rstrip().endswith(b"sh")


FILES = files_of_the_tree()


def named(is_kind: Callable[[Path], bool]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", [pytest.param(file, id=str(file)) for file in FILES if is_kind(file)])


def tool(name: str) -> str:
    """From the environment of the tests, where the lock puts it, or from PATH."""
    executable = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert executable, f"{name} is in the lock and not in this environment: run `make setup`"
    return executable


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def test_files_of_each_kind_are_found() -> None:
    known = {".ci/run", "launch/setup.sh", "launch/torchrun.sh", "Dockerfile", "Dockerfile.cpu"}
    assert known <= {str(file) for file in FILES}
    assert {str(file) for file in FILES if is_shell_script(file)} >= {".ci/run", "launch/setup.sh"}
    assert not any(file.parts[0].startswith((".venv", "runs", "models")) for file in FILES)


@named(is_shell_script)
def test_shell_script_parses_and_shellcheck_is_silent(file: Path) -> None:
    run("bash", "-n", str(file))
    run(tool("shellcheck"), "--external-sources", "--source-path=SCRIPTDIR", str(file))


@named(lambda file: file.name.split(".")[0] == "Dockerfile" or file.suffix == ".dockerfile")
def test_hadolint_is_silent(file: Path) -> None:
    run(tool("hadolint"), "--no-color", "--failure-threshold", "style", str(file))


@pytest.mark.parametrize("target", ["setup", "quickstart", "test", "test-nightly", "test-megatron-0.19", "lint", "format"])
def test_commands_of_the_makefile_parse(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, timeout=300, check=True)
