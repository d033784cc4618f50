"""Does a real model get better at questions it has not trained on? SmolLM2-135M-Instruct on sums, before and after.

    python benchmarks/held_out.py [--algorithms GRPO,PPO] [--seeds 1] [--steps 24] [--json PATH] [--picture PNG] [--check]
    python benchmarks/held_out.py --of PATH [PATH ...] [--json PATH] [--picture PNG] [--check]

The recipe is recipes/quickstart.yaml on one rank, prompts shared by their groups, with another task: of the 400 sums of two
numbers below 20, drawn once and the same for all runs, 300 are trained on, 64 completions a step, and 100 are asked before
the first step, every ten steps and after the last, four times each at the temperature of the training. PPO has a critic that
starts from the same model in the place of the group's advantage. `--of` takes runs that were measured before. Needs the
model that `make setup` prepares; some fifteen minutes a run on two cores.

Target (with --check, exit 1 when missed): accuracy on the held-out sums rises by 20 points in each run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "quickstart.yaml"
TARGET = 0.20
BELOW, HELD_OUT = 20, 100
FIELDS = "prompt_field: question, answer_field: answer"
ALGORITHMS: dict[str, list[str]] = {
    "GRPO": [],
    # Mean and deviation of the batch in the place of the group's; the critic learns faster than the policy moves.
    "PPO": [
        "algorithm.advantage=gae", "algorithm.gae={discount: 1.0, smoothing: 0.95, whiten: true}",
        "critic={optimizer: {kind: adam, lr: 1.0e-4, grad_clip: 1.0}, warmup_steps: 2}",
        "algorithm.value_loss={clip: 0.2}", "phases.critic_value={micro_batch: {max_tokens: 1024}, share_prompts: true}",
        "phases.critic_update={mini_batch: 64, micro_batch: {max_tokens: 1024}, share_prompts: true}",
    ],
}  # fmt: skip


def write_sums(folder: Path) -> tuple[Path, Path]:
    """All sums of two numbers in one order for all runs: what is trained on, and what is held out."""
    sums = [(a, b) for a in range(BELOW) for b in range(BELOW)]
    random.Random(0).shuffle(sums)
    files = folder / "train.jsonl", folder / "held_out.jsonl"
    for file, part in zip(files, (sums[HELD_OUT:], sums[:HELD_OUT]), strict=True):
        rows = ({"question": f"Calculate {a} + {b}.", "answer": str(a + b)} for a, b in part)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def run(folder: Path, algorithm: str, seed: int, steps: int, precision: str) -> dict[str, Any]:
    """One run: accuracy at each evaluation and reward of each step."""
    train, held_out = write_sums(folder)
    name = f"{algorithm.lower()}-{seed}"
    overrides = [
        f"run.name={name}", f"run.dir={folder}", f"run.seed={seed}", f"run.steps={steps}",
        f"trainer={{ranks: 1, threads: {os.cpu_count()}, precision: {precision}}}", "actor.layout={tensor: 1, pipeline: 1}",
        f"data.prompts={{kind: jsonl, path: {train}, {FIELDS}}}",
        f"evaluation={{prompts: {{kind: jsonl, path: {held_out}, {FIELDS}}}, every: 10, completions: 4}}",
        "phases.actor_update={mini_batch: 64, micro_batch: {max_tokens: 1024}, share_prompts: true}", *ALGORITHMS[algorithm],
    ]  # fmt: skip
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "megarl.cli", "train", str(RECIPE), *overrides], cwd=ROOT, check=True)
    lines, evaluations = (
        [json.loads(line) for line in (folder / name / f"{kind}.jsonl").read_text().splitlines()]
        for kind in ("metrics", "evaluations")
    )
    return {
        "algorithm": algorithm, "seed": seed, "rewards": [line["reward/mean"] for line in lines],
        "steps": [evaluation["step"] for evaluation in evaluations],
        "accuracy": [evaluation["evaluation/mean"] for evaluation in evaluations],
        "error": [evaluation["evaluation/mean_error"] for evaluation in evaluations], "seconds": time.perf_counter() - begun,
    }  # fmt: skip


def table(runs: list[dict[str, Any]]) -> list[str]:
    """A row for each run."""
    rows = [
        "| algorithm | seed | steps | held-out accuracy, before | after | change |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for result in runs:
        before, after = (f"{result['accuracy'][end]:.3f} ± {result['error'][end]:.3f}" for end in (0, -1))
        rows.append(
            f"| {result['algorithm']} | {result['seed']} | {result['steps'][-1]} | {before} | {after} "
            f"| {rise(result):+.3f} |"
        )
    return rows


def rise(result: dict[str, Any]) -> float:
    """How much accuracy a run has added."""
    return float(result["accuracy"][-1] - result["accuracy"][0])


def draw(runs: list[dict[str, Any]], picture: Path) -> None:
    """Accuracy with its 95 % interval, and the reward of the training steps behind it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, plot = pyplot.subplots(figsize=(6, 3))
    for number, result in enumerate(runs):
        label = f"{result['algorithm']}, seed {result['seed']}"
        plot.plot(range(1, len(result["rewards"]) + 1), result["rewards"], color=f"C{number}", linewidth=0.6, alpha=0.5)
        plot.errorbar(
            result["steps"], result["accuracy"], result["error"], color=f"C{number}", marker="o", capsize=3, label=label
        )
    plot.set_xlabel("step (thin: reward of the training prompts)", fontsize=8)
    plot.set_ylabel("held-out accuracy", fontsize=8)
    plot.tick_params(labelsize=7)
    plot.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="fp32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="draw the curves there")
    parser.add_argument("--of", nargs="+", type=Path, default=[], help="JSON files of earlier calls, in place of new runs")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    names = arguments.algorithms.split(",")
    if unknown := [name for name in names if name not in ALGORITHMS]:
        parser.error(f"--algorithms: {unknown[0]!r} is none of {', '.join(ALGORITHMS)}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    device = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    config = {"recipe": "recipes/quickstart.yaml", "steps": arguments.steps, "precision": arguments.precision}
    contents = [json.loads(path.read_text()) for path in arguments.of]
    if not contents:
        contents = [{"commit": commit, "device": device, "config": config, "runs": []}]
        for name in names:
            for seed in map(int, arguments.seeds.split(",")):
                with tempfile.TemporaryDirectory() as folder:
                    contents[0]["runs"].append(run(Path(folder), name, seed, arguments.steps, arguments.precision))
    runs = [result for content in contents for result in content["runs"]]
    runs.sort(key=lambda result: (list(ALGORITHMS).index(result["algorithm"]), result["seed"]))
    print("\n".join(table(runs)))
    if arguments.json is not None:
        together = {key: ", ".join(sorted({content[key] for content in contents})) for key in ("commit", "device")}
        content = together | {"config": contents[0]["config"], "runs": runs}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    if arguments.picture is not None:
        draw(runs, arguments.picture)
    absent = set(names) - {result["algorithm"] for result in runs}
    worst = min(map(rise, runs))
    missed = "" if worst >= TARGET else ", MISSED"
    print(
        f"held out: smallest rise {worst:+.3f} (target {TARGET:+.2f}{missed})"
        + "".join(f"; no run of {name}" for name in absent)
    )
    return int(arguments.check and bool(absent or worst < TARGET))


if __name__ == "__main__":
    sys.exit(main())
