"""Does the quickstart learn? Trains `recipes/quickstart.yaml` for several seeds and compares its first and last steps.

    python benchmarks/quickstart.py [--seeds 1 2 3] [--json PATH] [--check]

Target (with --check, exit 1 when missed): for every seed, the mean reward of the last three steps is at least 0.15 above
that of the first three. Needs `make setup` and the model that `make quickstart` prepares; about 7 minutes a seed on two
cores. Runs are left in runs/quickstart-seed<N>-<time>.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "quickstart.yaml"
TARGET = 0.15
ENDS = 3


def run_seed(seed: int) -> dict[str, Any]:
    """Train one seed; its figures."""
    name = f"quickstart-seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    began = time.monotonic()
    command = [sys.executable, "-m", "megarl.cli", "train", str(RECIPE), f"run.name={name}", f"run.seed={seed}"]
    subprocess.run(command, cwd=ROOT, check=True)
    lines = [json.loads(line) for line in (ROOT / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines]
    return {
        "seed": seed,
        "first": statistics.mean(rewards[:ENDS]),
        "last": statistics.mean(rewards[-ENDS:]),
        "minutes": (time.monotonic() - began) / 60,
        "step_seconds": statistics.median(line["time/step"] for line in lines),
        "rollout_seconds": statistics.median(line["time/rollout"] for line in lines),
        "update_seconds": statistics.median(line["time/actor_update"] for line in lines),
        "sync_seconds": statistics.median(line["time/weight_sync"] for line in lines),
        "mismatch_mean": max(line["mismatch/logprob_mean"] for line in lines),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    rows = [run_seed(seed) for seed in arguments.seeds]
    table = Table(title=f"{RECIPE.name}: reward and median seconds of a step")
    columns = {"seed": "", "first": ".3f", "last": ".3f", "minutes": ".1f", "step_seconds": ".1f", "rollout_seconds": ".1f",
               "update_seconds": ".1f", "sync_seconds": ".2f", "mismatch_mean": ".4f"}  # fmt: skip
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(format(row[column], form) for column, form in columns.items()))
    Console(width=120).print(table)
    worst = min(row["last"] - row["first"] for row in rows)
    if arguments.json is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        device = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        content = {"commit": commit, "device": device, "config": yaml.safe_load(RECIPE.read_text()), "runs": rows}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    print(f"quickstart: smallest rise over {len(rows)} seeds {worst:+.3f} (target {TARGET:+.2f})")
    return 1 if arguments.check and worst < TARGET else 0


if __name__ == "__main__":
    sys.exit(main())
