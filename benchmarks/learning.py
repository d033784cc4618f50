"""Does each algorithm learn? A tiny policy from chance on, three seeds each, and what that took.

    python benchmarks/learning.py [--algorithms GRPO,PPO] [--seeds 1,2,3] [--json PATH] [--picture PNG] [--check]
    python benchmarks/learning.py --of PATH [PATH ...] [--json PATH] [--picture PNG] [--check]

The runs are the recipes in recipes/cpu (`make setup` writes their model): a random model of two layers (fp32, one rank, one
vLLM engine), 128 completions of 8 tokens a step in two updates. `--of` takes runs that were measured before. The reward is
the share of digits that are odd where the answer to the question is odd, and even where it is even: one in twenty by chance.
`learned` is the mean reward of the last five steps, `goal at` the first step whose reward is 0.9.

Targets (with --check, exit 1 when missed): each run ends at 0.9 or more, from below 0.15, within five minutes.
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
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' recipes

from tests.learning_cases import ALGORITHMS, CHANCE, GOAL, LAST, learning_recipe, rewards_of  # noqa: E402
from tests.runs import train_on_ranks  # noqa: E402

MOST_S = 300.0
HEADER = "| algorithm | first step | learned, by seed | goal at step, by seed | seconds a run |"


def run(folder: Path, algorithm: str, seed: int, max_staleness: int = 0) -> dict[str, Any]:
    """One run, from the start of its engine to its end."""
    name, recipe = learning_recipe(folder, algorithm, seed, max_staleness)
    begun = time.perf_counter()
    train_on_ranks(recipe)
    seconds = time.perf_counter() - begun
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    rewards = rewards_of(lines)
    goal = next((step for step, reward in enumerate(rewards, 1) if reward >= GOAL), None)
    return {"algorithm": algorithm, "seed": seed, "rewards": rewards, "learned": fmean(rewards[-LAST:]), "goal_at": goal,
            "seconds": seconds}  # fmt: skip


def holds(result: dict[str, Any]) -> bool:
    """Whether a run reaches the targets."""
    return result["rewards"][0] < CHANCE and result["learned"] >= GOAL and result["seconds"] < MOST_S


def table(runs: list[dict[str, Any]]) -> list[str]:
    """A row for each algorithm."""
    rows = [HEADER, "| --- | --- | --- | --- | --- |"]
    for algorithm in dict.fromkeys(result["algorithm"] for result in runs):
        results = [result for result in runs if result["algorithm"] == algorithm]
        first = fmean(result["rewards"][0] for result in results)
        learned, goals = (", ".join(f"{result[key]:{form}}" if result[key] else "-" for result in results)
                          for key, form in (("learned", ".2f"), ("goal_at", "d")))  # fmt: skip
        rows.append(
            f"| {algorithm} | {first:.2f} | {learned} | {goals} | {fmean(result['seconds'] for result in results):.0f} |"
        )
    return rows


def draw(runs: list[dict[str, Any]], picture: Path) -> None:
    """The curves, a small plot for each algorithm and a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(result["algorithm"] for result in runs))
    rows = -(-len(names) // 4)
    figure, axes = pyplot.subplots(rows, 4, figsize=(11, 2.4 * rows), sharex=True, sharey=True, squeeze=False)
    for place, plot in enumerate(axes.flat):
        if place >= len(names):
            plot.axis("off")
            continue
        for result in runs:
            if result["algorithm"] == names[place]:
                plot.plot(
                    range(1, len(result["rewards"]) + 1), result["rewards"], linewidth=1.2, label=f"seed {result['seed']}"
                )
        plot.axhline(GOAL, color="grey", linewidth=0.6, linestyle=":")
        plot.set_title(names[place], fontsize=9)
        plot.tick_params(labelsize=7)
    axes[0][0].legend(fontsize=7)
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("mean reward", fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def commit_here() -> str:
    """The commit that is checked out."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="draw the curves there")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--of", nargs="+", type=Path, default=[], help="JSON files of earlier calls, in place of new runs")
    arguments = parser.parse_args()
    names = arguments.algorithms.split(",")
    if unknown := [name for name in names if name not in ALGORITHMS]:
        parser.error(f"--algorithms: {unknown[0]!r} is none of {', '.join(ALGORITHMS)}")
    before = [json.loads(path.read_text()) for path in arguments.of]
    runs = [result for content in before for result in content["runs"]]
    with tempfile.TemporaryDirectory() as folder:
        for name in () if before else names:
            for seed in map(int, arguments.seeds.split(",")):
                runs.append(run(Path(folder), name, seed))
                result = runs[-1]
                print(
                    f"{name}, seed {seed}: {result['rewards'][0]:.2f} to {result['learned']:.2f} "
                    f"in {result['seconds']:.0f} s",
                    flush=True,
                )
    runs.sort(key=lambda result: (list(ALGORITHMS).index(result["algorithm"]), result["seed"]))
    print("\n".join(table(runs)))
    if arguments.json is not None:
        commits = {content["commit"] for content in before} or {commit_here()}
        here = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        device = "; ".join(sorted({content["device"] for content in before} or {here}))
        config = {"recipes": "recipes/cpu", "goal": GOAL, "last_steps": LAST}
        content = {"commit": ", ".join(sorted(commits)), "device": device, "config": config, "runs": runs}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    if arguments.picture is not None:
        draw(runs, arguments.picture)
    reached, seeds = sum(map(holds, runs)), [int(seed) for seed in arguments.seeds.split(",")]
    missing = {(name, seed) for name in names for seed in seeds} - {(result["algorithm"], result["seed"]) for result in runs}
    if missing:
        print(f"not measured: {', '.join(f'{name}, seed {seed}' for name, seed in sorted(missing))}")
    print(f"learning: {reached} of {len(runs)} runs end at {GOAL} or more from below {CHANCE}, within {MOST_S:.0f} s")
    return 1 if arguments.check and (missing or reached < len(runs)) else 0


if __name__ == "__main__":
    sys.exit(main())
