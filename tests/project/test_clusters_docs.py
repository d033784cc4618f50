"""docs/clusters.md says what the code does: its commands run, its tables are those of the files."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.recipe import load_recipe
from megarl.telemetry import exit_status

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)
FILES = sorted((ROOT / "launch" / "slurm").glob("*.sbatch"))


def rows(title: str) -> dict[str, str]:
    """The first two columns of the table whose first column has this title."""
    (table,) = re.findall(rf"^\| {title} \|.*\n\| ---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    cells = [[cell.strip().strip("`") for cell in line.strip("| \n").split(" | ")] for line in table.splitlines()]
    return {row[0]: row[1] for row in cells}


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("megarl launch")])
def test_what_the_page_launches_is_printed(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)[1:]
    # The model of the quickstart is large to make; that of the tests has as many heads as the recipe cuts.
    words.insert(2, f"model.path={ROOT / 'models' / 'tiny-qwen3'}")
    done = subprocess.run(
        [sys.executable, "-m", "megarl.cli", *words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=2\n" in done.stdout, "the page says two nodes"


def launches() -> list[tuple[dict[str, str], Path, str, list[str]]]:
    """Of each command that starts a script with a recipe: its environment, the script, the recipe and the overrides."""
    found = []
    for command in COMMANDS:
        words = shlex.split(command.replace("$PWD", str(ROOT)))
        environment = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        scripts = [index for index, word in enumerate(words) if word.startswith("launch/") and "RECIPE" not in words]
        found += [(environment, ROOT / words[index], words[index + 1], words[index + 2 :]) for index in scripts]
    return found


def test_scripts_are_there_and_take_the_recipe_and_the_variables() -> None:
    explained = (ROOT / "launch" / "node.sh").read_text() + (ROOT / "launch" / "slurm" / "colocated.sbatch").read_text()
    assert len(launches()) >= 6
    for environment, script, recipe, overrides in launches():
        assert script.is_file() and all(name in explained for name in environment)
        load_recipe(ROOT / recipe, [*overrides, f"model.path={ROOT / 'models' / 'tiny-qwen3'}"])


def test_the_table_of_settings_is_that_of_the_files() -> None:
    table = rows("setting")
    for file in FILES:
        assert set(re.findall(r'^: "\$\{(\w+):=', file.read_text(), re.MULTILINE)) == set(table)
        for name in ("RANKS_PER_NODE", "LOG_ROOT"):
            assert f"{{{name}:={table[name]}}}" in file.read_text()
    assert set(rows("file")) == {file.name for file in FILES}


def test_the_table_of_exit_statuses_is_that_of_the_code() -> None:
    assert {int(code) for code in rows("exit status")} == {*exit_status.NAMES, exit_status.BAD_INPUT}
    assert f"\nREQUEUE={exit_status.REQUEUE}\n" in (ROOT / "launch" / "slurm" / "job.sh").read_text()


def test_the_warning_comes_as_early_as_the_page_says() -> None:
    (option,) = set(re.findall(r"`(--signal=\S+)`", PAGE))
    assert all(f"#SBATCH {option}\n" in file.read_text() for file in FILES)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str) -> None:
    plain = re.sub(r"\[key=value \.\.\.\]", "run.steps=3", command)
    subprocess.run(["bash", "-n", "-c", plain], check=True, timeout=300, env=dict(os.environ))
    for option in re.findall(r" (--[\w-]+)", plain) if plain.startswith("megarl") else []:
        helped = subprocess.run([sys.executable, "-m", "megarl.cli", plain.split()[1], "--help"], capture_output=True,
                                text=True, timeout=300, check=True, env={**os.environ, "COLUMNS": "200"})  # fmt: skip
        assert option in helped.stdout
