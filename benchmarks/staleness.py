"""Does a policy learn from stale samples, and how many more does it need? `learning.py` with a `max_staleness` of 0 and 2.

    python benchmarks/staleness.py [--algorithms GRPO,PPO] [--seeds 1,2,3] [--staleness 2] [--json PATH] [--check]

Each algorithm trains under each seed with samples of the newest weights, and with samples that are up to `--staleness`
versions old (kept over weight syncs, importance weights truncated at 2). `goal at` is the first step whose mean reward is
0.9; `samples` the ratio of the mean of these steps, all seeds, stale over new.

Targets (with --check, exit 1 when missed): each run ends at 0.9 or more; `samples` is at most 1.3.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' recipes

from benchmarks.learning import commit_here, run  # noqa: E402
from tests.learning_cases import GOAL, LAST  # noqa: E402

ALGORITHMS = ("GRPO", "DAPO", "GSPO", "CISPO", "PPO")
MOST_SAMPLES = 1.3


def row(name: str, runs: list[dict[str, Any]]) -> tuple[str, bool]:
    """The line of one algorithm, and whether it reaches the targets."""
    new, stale = ([result for result in runs if bool(result["max_staleness"]) == is_stale] for is_stale in (False, True))
    goals = [", ".join(str(result["goal_at"] or "-") for result in part) for part in (new, stale)]
    learned = [", ".join(f"{result['learned']:.2f}" for result in part) for part in (new, stale)]
    ratio = float("inf")
    if all(result["goal_at"] for result in runs):
        ratio = fmean(result["goal_at"] for result in stale) / fmean(result["goal_at"] for result in new)
    holds = ratio <= MOST_SAMPLES and all(result["learned"] >= GOAL for result in runs)
    return f"| {name} | {goals[0]} | {goals[1]} | {ratio:.2f} | {learned[0]} | {learned[1]} |", holds


def table(runs: list[dict[str, Any]]) -> tuple[list[str], int]:
    """A table in Markdown, and how many algorithms reach the targets."""
    names = list(dict.fromkeys(result["algorithm"] for result in runs))
    rows = [row(name, [result for result in runs if result["algorithm"] == name]) for name in names]
    versions = max(result["max_staleness"] for result in runs)
    head = ["algorithm", "goal at, new", f"goal at, {versions} versions", "samples", "learned, new", "learned, stale"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *(line for line, _ in rows)]
    return lines, sum(holds for _, holds in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    names, seeds = arguments.algorithms.split(","), [int(seed) for seed in arguments.seeds.split(",")]
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for seed in seeds:
                for staleness in (0, arguments.staleness):
                    runs.append({"max_staleness": staleness} | run(Path(folder), name, seed, staleness))
                    result = runs[-1]
                    print(
                        f"{name}, seed {seed}, staleness {staleness}: {result['learned']:.2f}, goal at {result['goal_at']}",
                        flush=True,
                    )
    lines, reached = table(runs)
    print("\n".join(lines))
    if arguments.json is not None:
        device = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        config = {"recipes": "recipes/cpu", "goal": GOAL, "last_steps": LAST, "staleness": arguments.staleness}
        arguments.json.write_text(
            json.dumps({"commit": commit_here(), "device": device, "config": config, "runs": runs}, indent=2) + "\n"
        )
    print(f"staleness: {reached} of {len(names)} algorithms end at {GOAL} with at most {MOST_SAMPLES} times the samples")
    return 1 if arguments.check and reached < len(names) else 0


if __name__ == "__main__":
    sys.exit(main())
