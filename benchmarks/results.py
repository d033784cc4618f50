"""Write docs/results.md and its pictures from what the benchmarks have measured.

    python benchmarks/results.py [--check]

Each part of docs/results.md comes from a file in benchmarks/measured, which `learning.py`, `held_out.py`, `end_to_end.py`
and `weight_sync.py` write with `--json`; a part whose file is not there yet is left out. Its last part comes from that
of `gpu.py`, and says so where there is none. With --check nothing is written; the exit status is 1 where the page differs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import held_out, learning  # noqa: E402
from benchmarks.end_to_end_figures import MEGARL, PARTS, PEERS, last_steps, summary, targets  # noqa: E402
from megarl.recipe.load import NOT_RUN  # noqa: E402

RESULTS, DOCS = ROOT / "benchmarks" / "measured", ROOT / "docs"
PAGE = DOCS / "results.md"
Results = dict[str, Any]

TITLE = """# What was measured, and which command measures it again?

Each part ends with its command. `python benchmarks/results.py` writes this page from the files in `benchmarks/measured/`."""
LEARNING = """## Each algorithm learns

A random model of two layers ([`recipes/cpu/`](../recipes/cpu/)) learns to answer sums with an odd digit if the sum is odd
and with an even digit otherwise; chance is one in twenty. A run passes if it ends at 0.9 or more within five minutes on two
cores.

![reward by step of each algorithm under three seeds](learning.png)"""
HELD_OUT = """## A real model gets better at what it has not seen

SmolLM2-135M-Instruct on the 400 sums of two numbers below 20: the run trains on 300, with 64 completions a step, and answers
the other 100 four times each at temperature 1. Accuracy with half of its 95 % confidence interval over the questions.

![held-out accuracy by step](held_out.png)"""
END_TO_END = """## End to end, beside TRL

GRPO of SmolLM2-135M-Instruct on one-digit sums: 8 prompts x 8 completions of up to 64 tokens, one update a step, KL against
a reference, the same prompts, rewards, optimizer and precision ({precision}) on both sides, {steps} steps, all cores of one
machine. `trl-hf` is TRL's GRPOTrainer with Hugging Face generation, `trl-vllm` with vLLM in its process, whose weight sync
had to be replaced to run on a CPU. Seconds a step, without the first step; tokens are those of prompts and completions,
without padding."""
WEIGHT_SYNC = """## Weights from Megatron ranks into vLLM

Through shared memory on one machine, in milliseconds; medians of {rounds} rounds in which all methods take turns. `memcpy`
copies the same bytes from tensor to tensor; `checkpoint` gathers the model on rank 0 and hands it to vLLM's loader; `disk`
gathers, writes a file and has the engine load it. Each `whole` includes the time in which vLLM packs the weights; `repack`
is megarl's, done by several threads. `checkpoint's transfer` is gathering and loading less that `repack`: it holds some
packing."""
GPU = """## What has run on a GPU

CI has no GPU. It tests the logic of every GPU path on a CPU; only a GPU shows what CUDA, NCCL, Transformer Engine, vLLM on a
GPU and weights mapped by CUDA IPC do. `python benchmarks/gpu.py --json benchmarks/measured/gpu.json --check` runs each part
once on one GPU, and `python benchmarks/results.py` writes the outcome here."""
GPU_NOTHING = f"Nothing is recorded here: CUDA, NCCL, Transformer Engine and vLLM's GPU path are {NOT_RUN}."
# Of a row's medians, by the column of the page.
SYNC_COLUMNS = {
    "transfer": ("megarl", "transfer_s"), "repack": ("megarl", "repack_s"), "pause to resume": ("megarl", "standstill_s"),
    "whole": ("megarl", "total_s"), "checkpoint's transfer": ("checkpoint", "transfer_s"),
    "checkpoint's whole": ("checkpoint", "total_s"), "disk's whole": ("disk", "total_s"),
}  # fmt: skip


def page(results: dict[str, Results], gpu: Results | None = None) -> str:
    """The text of docs/results.md; `gpu` is what `gpu.py` wrote."""
    parts = [part for name, make in MAKERS.items() if name in results for part in make(results[name])]
    return "\n\n".join([TITLE, *parts, gpu_part(gpu)]) + "\n"


def gpu_part(result: Results | None) -> str:
    """The last part of docs/results.md."""
    if result is None:
        return f"{GPU}\n\n{GPU_NOTHING}"
    made = f"On {result['device']}, at {result['commit'][:10]}. What no part below lists has not run on a GPU."
    rows = ["| part | status | seconds | targets |", "| --- | --- | --- | --- |"]
    values = []
    for name, part in result["parts"].items():
        reached = "; ".join(
            f"{one['name']} {one['value']:.3g} (target {one['limit']:g}{'' if one['reached'] else ', missed'})"
            for one in part.get("targets", [])
        )
        rows.append(f"| {name} | {part['status']} | {part['seconds']:.0f} | {reached or part.get('why', '')} |")
        values += [f"| {name} | {key} | {value} |" for key, value in _flat(part.get("values", {}))]
    table = ["| part | value | measured |", "| --- | --- | --- |", *values]
    return "\n\n".join([GPU, made, "\n".join(rows), "\n".join(table)])


def _flat(values: Results, prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as (dotted key, text)."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", f"{value:.4g}" if isinstance(value, float) else str(value)))
    return rows


def made_by(name: str, result: Results, options: str) -> str:
    """How a part can be measured again, with the options that it was measured with."""
    commits = ", ".join(commit[:10] for commit in result["commit"].split(", "))
    return f"Measured by `python benchmarks/{name}.py {options} --check` on {result['device']}, at {commits}."


def of_learning(result: Results) -> list[str]:
    return [LEARNING, "\n".join(learning.table(result["runs"])), made_by("learning", result, f"--seeds {seeds_of(result)}")]


def of_held_out(result: Results) -> list[str]:
    options = f"--steps {result['config']['steps']} --seeds {seeds_of(result)}"
    return [HELD_OUT, "\n".join(held_out.table(result["runs"])), made_by("held_out", result, options)]


def seeds_of(result: Results) -> str:
    """As `learning.py` and `held_out.py` are told them."""
    return ",".join(map(str, sorted({one["seed"] for one in result["runs"]})))


def of_end_to_end(result: Results) -> list[str]:
    rows = [f"| side | seeds | step | {' | '.join(PARTS)} | tokens/s | peak GB |", "|" + " --- |" * (len(PARTS) + 5)]
    for side in (MEGARL, *PEERS):
        if (own := summary(result["runs"], side)) is not None:
            seconds = " | ".join(f"{own[part]:.1f}" for part in ("seconds", *PARTS))
            seeds, peak = ", ".join(map(str, own["seeds"])), own["peak_bytes"] / 1e9
            rows.append(f"| {side} | {seeds} | {seconds} | {own['tokens_per_s']:.0f} | {peak:.1f} |")
    rewards = ["| reward by step |  |", "| --- | --- |"]
    for run in result["runs"]:
        curve = " ".join(f"{one['reward']:.2f}" for one in run["steps"])
        rewards.append(f"| {run['side']}, seed {run['seed']} | {curve} |")
    said = [
        f"- {name}: {value:.3g} (target {limit}{'' if reached else ', missed'})"
        for name, (value, limit, reached) in targets(result["runs"]).items()
    ]
    config = result["config"]
    text = END_TO_END.format(precision=config["precision"], steps=config["steps"])
    parts = [text, "\n".join(rows), "\n".join(said), rewards_are(result), "\n".join(rewards)]
    drawn = {run["seed"] for run in result["runs"]}
    options = f"--steps {config['steps']} --first-seed {min(drawn)} --seeds {len(drawn)}"  # there a number of them
    return [*parts, made_by("end_to_end", result, options)]


def of_weight_sync(result: Results) -> list[str]:
    columns = ("model", "ranks to workers", "memcpy", *SYNC_COLUMNS)
    rows = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    said = []
    for row in result["rows"]:
        found = row["medians"]
        memcpy_s = found["megarl"]["received_bytes"] / found["memcpy"]["bytes_per_s"]
        seconds = [memcpy_s, *(found[way][key] for way, key in SYNC_COLUMNS.values())]
        rows.append(f"| {row['model']} | {row['case']} | {' | '.join(f'{1e3 * one:.0f}' for one in seconds)} |")
        for name, (value, limit, reached) in row["targets"].items():
            missed = "" if reached else ", missed"
            said.append(f"- {row['model']}, {row['case']}: {name} {value:.3g} (target {limit}{missed})")
    rounds = result["config"]["rounds"]
    parts = [WEIGHT_SYNC.format(rounds=rounds), "\n".join(rows), "\n".join(said)]
    return [*parts, made_by("weight_sync", result, f"--rounds {rounds}")]


def rewards_are(result: Results) -> str:
    """Say which rewards are compared, and by how much chance alone separates two sides."""
    config, own = result["config"], [run["steps"] for run in result["runs"] if run["side"] == MEGARL]
    steps = last_steps(min(map(len, own)))
    rewards = [step["reward"] for run in own for step in run[-steps:]]
    mean, completions = sum(rewards) / len(rewards), len(rewards) * config["prompts"] * config["group_size"]
    error = math.sqrt(2 * mean * (1 - mean) / completions)
    return (
        f"Rewards are compared over the last {'step' if steps == 1 else f'{steps} steps'} of {config['steps']}, "
        f"{completions} completions a side: the standard error of a difference is about {error:.2f}, even if the "
        "completions of a prompt were independent."
    )


# By the name of the file that a part comes from, in the order of the page.
MAKERS = {"learning": of_learning, "held_out": of_held_out, "end_to_end": of_end_to_end, "weight_sync": of_weight_sync}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    files = {name: RESULTS / f"{name}.json" for name in MAKERS}
    results = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
    if not results:
        parser.error(f"no results in {RESULTS}: benchmarks/learning.py --json {files['learning']} measures some")
    gpu_file = RESULTS / "gpu.json"
    text = page(results, json.loads(gpu_file.read_text()) if gpu_file.is_file() else None)
    if arguments.check:
        return int(text != PAGE.read_text())
    PAGE.write_text(text)
    for name, draw in (("learning", learning.draw), ("held_out", held_out.draw)):
        if name in results:
            draw(results[name]["runs"], DOCS / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
