"""Does a synchronous run give what another commit gives, bit for bit? Trains shipped recipes in both trees and compares.

    python benchmarks/same_as.py --against COMMIT [--steps 3] [--only WORD ...] [--json PATH] [--check]

For changes of the rollout's path: `same_numbers.py` replays rollouts, and here vLLM engines sample them. Each single-turn
recipe of `recipes/` that runs on CPUs, and that the commit has too, trains in fp32 with one engine and without staleness, in
this working tree and in a fresh checkout of the commit, one after the other; the models of `make setup` have to be there.
Each tree runs its own copy of the recipe, with settings that both know; both take the commit's learning rates, as two
recipes have got lower ones since. Compared are the metrics of each step, without those of time, memory, throughput and
machine (`same_numbers.is_compared`), and without `sync/sent_bytes`, which depends on how a sync packs weights into its
buckets; the sampled tokens with their log-probabilities, unless dynamic sampling keeps a recipe from dumping them; and the
weights and moments of the last checkpoint. What both trees have must have the same bits. What one tree alone has is counted.

The commit before the stream of rollouts is 1e5eecd. A tiny recipe takes one to two minutes in each tree on two cores.

Target (with --check, exit 1 when it is missed): no run fails, and no value differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.same_numbers import is_compared  # noqa: E402

RUN_LIMIT_S = 900.0
PACKING = "sync/sent_bytes"
Values = dict[str, str]


def shipped(only: Sequence[str]) -> list[str]:
    """Return the single-turn recipes for CPUs that sample and whose models are here, by their path."""
    names = []
    for file in [*sorted((ROOT / "recipes").glob("*.yaml")), *sorted((ROOT / "recipes" / "cpu").glob("*.yaml"))]:
        recipe, name = yaml.safe_load(file.read_text()), str(file.relative_to(ROOT))
        is_chosen = not only or any(word in name for word in only)
        samples = recipe["run"].get("kind", "rl") == "rl" and "environment" not in recipe
        if is_chosen and samples and (ROOT / recipe["model"]["path"]).is_dir():
            names.append(name)
    return names


def learning_rates(tree: Path, name: str) -> dict[str, float]:
    """Return the learning rates of a recipe of a tree, as overrides."""
    recipe = yaml.safe_load((tree / name).read_text())
    return {f"{role}.optimizer.lr": recipe[role]["optimizer"]["lr"] for role in ("actor", "critic") if role in recipe}


def train(tree: Path, name: str, folder: Path, steps: int, rates: dict[str, float]) -> Values:
    """Run a recipe of a tree with learning `rates`; return its values by name. Raises RuntimeError with the output's end."""
    dumps = "dynamic_sampling" not in yaml.safe_load((tree / name).read_text())["algorithm"]
    changes = {"run.dir": folder, "run.name": "run", "run.steps": steps, "rollout.engines": 1, "trainer.precision": "fp32"}
    changes |= rates | ({"run.dump_rollouts": "true"} if dumps else {})
    command = [sys.executable, "-m", "megarl.cli", "train", name, *(f"{key}={value}" for key, value in changes.items())]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{name} in {tree} ended with status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    values = values_of(folder / "run")
    wanted = {"metrics", "weights", "rollouts"} if dumps else {"metrics", "weights"}
    if missing := wanted - {key.partition(" ")[0] for key in values}:
        raise RuntimeError(f"{name} in {tree} wrote no {' and no '.join(sorted(missing))} in {folder / 'run'}")
    return values


def values_of(run: Path) -> Values:
    """Return metrics of each step, and digests of the sampled tokens and of the last checkpoint's tensors, by their name."""
    values: Values = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        compared = {key: value for key, value in line.items() if is_compared(key) and key != PACKING}
        values |= {f"metrics step {line['step']}, {key}": repr(value) for key, value in compared.items()}
    for file in sorted((run / "rollouts").rglob("step-*.npz")):
        with np.load(file) as columns:
            place = file.relative_to(run / "rollouts").with_suffix("")
            values |= {f"rollouts {place}, {column}": digest(columns[column]) for column in columns.files}
    checkpoints = sorted((run / "checkpoints").glob("step-??????"))
    for role in sorted(file.parent for file in checkpoints[-1].glob("*/*.distcp")) if checkpoints else ():
        values |= {f"weights of the {role.name}, {key}": digest(tensor.numpy()) for key, tensor in tensors_of(role)}
    return values


def tensors_of(role: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a role's directory in a checkpoint, by their keys."""
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(role, Path(folder) / "role.pt")
        stored = torch.load(Path(folder) / "role.pt", weights_only=False)
    for key, value in stored.items():
        if isinstance(value, torch.Tensor):
            yield key, value


def digest(array: np.ndarray) -> str:
    """Return type, shape and hash of an array: the same for the same bits."""
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def differences(here: Values, there: Values) -> dict[str, Any]:
    """Return the figures of a recipe: how many values were compared, those that differ, and names of one side alone."""
    common = [name for name in here if name in there]
    if missing := {key.partition(" ")[0] for key in here} - {key.partition(" ")[0] for key in common}:
        raise RuntimeError(f"no names of {' and of '.join(sorted(missing))} are the same in both trees")
    differing = [f"{name}: {there[name]} -> {here[name]}" for name in common if here[name] != there[name]]
    return {"compared": len(common), "differing": differing, "only_one": len(here.keys() ^ there.keys())}


def check_out(commit: str, tree: Path) -> None:
    """Write the files of a commit into a new folder, with the models of this tree."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE)
    if archive.returncode:
        raise SystemExit(f"--against {commit}: git has no such commit here")
    tree.mkdir()
    subprocess.run(["tar", "-x"], cwd=tree, input=archive.stdout, check=True)
    (tree / "models").symlink_to((ROOT / "models").resolve())
    command = [sys.executable, "-c", "import megarl; print(megarl.__file__)"]
    done = subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, text=True)
    assert done.stdout.startswith(str(tree)), f"the runs of {commit} would import {done.stdout}"


def compare(tree: Path, names: Sequence[str], steps: int, folder: Path) -> list[dict[str, Any]]:
    """Return the row of each recipe, here and in another tree."""
    rows = []
    for number, name in enumerate(names):
        begun = time.monotonic()
        row: dict[str, Any] = {"recipe": name, "compared": 0, "differing": [], "only_one": 0}
        try:
            rates = learning_rates(tree, name)
            here, there = (
                train(ROOT, name, folder / f"{number}-here", steps, rates),
                train(tree, name, folder / f"{number}-there", steps, rates),
            )
            row |= differences(here, there)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            row["error"] = str(error)
        rows.append(row | {"seconds": time.monotonic() - begun})
        print(
            f"{name}: {'failed' if 'error' in row else len(row['differing'])} after {rows[-1]['seconds']:.0f} s", flush=True
        )
    return rows


def print_table(rows: Sequence[dict[str, Any]], commit: str, steps: int) -> None:
    table = Table(title=f"{steps} steps against {commit}", title_justify="left")
    table.add_column("recipe")
    for column in ("values compared", "differ", "of one side", "seconds"):
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
        tree = Path(folder).resolve() / "tree"
        check_out(arguments.against, tree)
        for name in [name for name in names if not (tree / name).is_file()]:
            print(f"{name}: left out, {arguments.against} has no such recipe")
            names.remove(name)
        rows = compare(tree, names, arguments.steps, Path(folder))
    print_table(rows, arguments.against, arguments.steps)
    failed, differing = sum("error" in row for row in rows), sum(len(row["differing"]) for row in rows)
    if arguments.json is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        device = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        content = {"commit": commit, "device": device, "config": {"against": arguments.against, "steps": arguments.steps}}
        arguments.json.write_text(json.dumps(content | {"recipes": rows}, indent=1) + "\n")
    compared = sum(row["compared"] for row in rows)
    print(
        f"same as {arguments.against}: {len(rows)} recipes, {failed} failed; {compared} values compared, {differing} differ"
    )
    return 1 if arguments.check and (failed or differing or not rows) else 0


if __name__ == "__main__":
    sys.exit(main())
