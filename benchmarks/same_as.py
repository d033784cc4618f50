"""Does a synchronous run give the metrics of another commit, bit for bit? Trains shipped recipes in both trees and compares.

    python benchmarks/same_as.py --against COMMIT [--steps 3] [--only WORD ...] [--json PATH] [--check]

For changes of the rollout's path: `same_numbers.py` replays rollouts, and here vLLM engines sample them. Each single-turn
recipe of `recipes/` that runs on CPUs trains with one engine and `rollout.max_staleness: 0`, in this working tree and in a
fresh checkout of the commit, one run after the other; the models of `make setup` have to be there. Each tree runs its own
copy of the recipe. A number that both trees write must have the same bits in each step; numbers of time, memory, throughput
and machine are left out (`same_numbers.is_compared`). Keys of one tree alone are counted.

Target (with --check, exit 1 when it is missed): no run fails, and no number differs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.same_numbers import is_compared  # noqa: E402

RUN_LIMIT_S = 900.0


def shipped(only: Sequence[str]) -> list[str]:
    """Return the single-turn recipes for CPUs whose models are here, by their path."""
    names = []
    for file in [*sorted((ROOT / "recipes").glob("*.yaml")), *sorted((ROOT / "recipes" / "cpu").glob("*.yaml"))]:
        recipe, name = yaml.safe_load(file.read_text()), str(file.relative_to(ROOT))
        is_chosen = not only or any(word in name for word in only)
        if is_chosen and "environment" not in recipe and (ROOT / recipe["model"]["path"]).is_dir():
            names.append(name)
    return names


def train(tree: Path, name: str, folder: Path, steps: int) -> list[dict[str, Any]]:
    """Run a recipe of a tree; return the lines of its metrics. Raises RuntimeError with the end of the output."""
    changes = {"run.dir": folder, "run.name": "run", "run.steps": steps, "rollout.engines": 1}
    command = [sys.executable, "-m", "megarl.cli", "train", name, *(f"{key}={value}" for key, value in changes.items())]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{name} in {tree} ended with status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def differences(here: Sequence[dict[str, Any]], there: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a recipe: how many numbers were compared, those that differ, and keys of one side alone."""
    assert len(here) == len(there) > 0, "both runs take the same steps"
    keys, other_keys = ({key for line in lines for key in line if is_compared(key)} for lines in (here, there))
    differing = [
        f"step {number}, {key}: {old.get(key)!r} -> {new.get(key)!r}"
        for number, (new, old) in enumerate(zip(here, there, strict=True), 1)
        for key in sorted(keys & other_keys)
        if repr(new.get(key)) != repr(old.get(key))
    ]
    return {"compared": len(here) * len(keys & other_keys), "differing": differing, "only_one": len(keys ^ other_keys)}


def compare(commit: str, names: Sequence[str], steps: int, folder: Path) -> list[dict[str, Any]]:
    """Return the row of each recipe."""
    other = folder / "tree"
    subprocess.run(["git", "worktree", "add", "--detach", str(other), commit], cwd=ROOT, check=True, capture_output=True)
    try:
        (other / "models").symlink_to((ROOT / "models").resolve())
        rows = []
        for number, name in enumerate(names):
            begun, row = time.monotonic(), {"recipe": name, "compared": 0, "differing": [], "only_one": 0}
            try:
                runs = [train(tree, name, folder / f"{number}-{tree.name}", steps) for tree in (ROOT, other)]
                row |= differences(*runs)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                row["error"] = str(error)
            rows.append(row | {"seconds": time.monotonic() - begun})
        return rows
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=ROOT, check=True, capture_output=True)


def print_table(rows: Sequence[dict[str, Any]], commit: str, steps: int) -> None:
    table = Table(title=f"metrics of {steps} steps against {commit}", title_justify="left")
    table.add_column("recipe")
    for column in ("numbers compared", "differ", "keys of one side", "seconds"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [row["compared"], "failed" if "error" in row else len(row["differing"]), row["only_one"]]
        table.add_row(row["recipe"], *map(str, cells), f"{row['seconds']:.0f}")
    Console(width=110).print(table)
    for row in rows:
        for text in [*([row["error"]] if "error" in row else []), *row["differing"][:10]]:
            print(f"{row['recipe']}: {text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", required=True, metavar="COMMIT")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="recipes with one of these words in their path"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    names = shipped(arguments.only)
    if not names:
        parser.error(
            f"--only {' '.join(arguments.only)}: no such recipe with a model that is here; `make setup` writes them"
        )
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(arguments.against, names, arguments.steps, Path(folder))
    print_table(rows, arguments.against, arguments.steps)
    failed, differing = sum("error" in row for row in rows), sum(len(row["differing"]) for row in rows)
    if arguments.json is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        device = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        content = {"commit": commit, "device": device, "config": {"against": arguments.against, "steps": arguments.steps}}
        arguments.json.write_text(json.dumps(content | {"recipes": rows}, indent=1) + "\n")
    compared = sum(row["compared"] for row in rows)
    print(
        f"same as {arguments.against}: {len(rows)} recipes, {failed} failed; {compared} numbers compared, {differing} differ"
    )
    return 1 if arguments.check and (failed or differing) else 0


if __name__ == "__main__":
    sys.exit(main())
