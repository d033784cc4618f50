"""Write docs/results.md and its pictures from what the benchmarks have measured.

    python benchmarks/results.py [--check]

Each part of docs/results.md comes from a file in benchmarks/measured, which the benchmark of its name writes with `--json`;
a part whose file is not there yet is left out. Its last part comes from that of `gpu.py`, and says so where there is none.
With --check nothing is written; the exit status is 1 where the page differs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import held_out, learning, staleness, stream  # noqa: E402
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
END_TO_END = """## End to end, compared with TRL

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
packing. `whole / (transfer + repack)` may be at most its target, each other ratio has to reach it."""
STREAM = """## A stream of rollouts instead of a batch after another

The trainer of a run, and {engines} engines that answer by the clock, with {slots} slots each; a step takes {groups} groups
of {members}. `/ bound` is the step over the longer one of generation and training; `loop` is the processor time of rank 0's
loop for 512 completions, as a share of a second."""
GATEWAY = """## The endpoint of agents under load

{talking} conversations at a time send {rate:.0f} requests a second to engines that answer by the clock, on the cores of one
machine. Targets: 25 ms added by the endpoint at the 99th percentile, each answer its session's, memory flat within 2 %."""
STALENESS = """## Learning from stale samples

The recipes of `recipes/cpu/` with new samples, and with samples of `rollout.max_staleness` versions before. *goal at* is the
first step with a mean reward of {goal}, of each seed; *samples* the ratio of their means (target 1.3); *learned* the mean
reward of the last {last} steps (target {goal}). Some runs with new samples are not those of the first
table: they were made at other commits or on other processors."""
SFT = """## Fine-tuning, compared with TRL's SFTTrainer

A random model of four layers, the same rows and optimizer on both sides; megarl packs, TRL pads. The loss of held-out rows
is the mean of {seeds} seeds; targets: 1.5 times TRL's tokens a second, curves within a standard error."""
DISTILLATION = """## A teacher's divergence over a whole vocabulary

Forward and backward on one rank, vocabulary {vocab}. `of the phase` is the time over that of the log-probabilities of the
same tokens with Qwen3-1.7B (target 1.5); `extra` is what 8,192 tokens add to the peak of the gradients, as a share of both
sides' logits (target 1 %)."""
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
    origin = f"On {result['device']}, at {result['commit'][:10]}. What no part below lists has not run on a GPU."
    rows = ["| part | status | seconds | targets |", "| --- | --- | --- | --- |"]
    values = []
    for name, part in result["parts"].items():
        reached = "; ".join(
            f"{target['name']} {target['value']:.3g} (target {target['limit']:g}{'' if target['reached'] else ', missed'})"
            for target in part.get("targets", [])
        )
        rows.append(f"| {name} | {part['status']} | {part['seconds']:.0f} | {reached or part.get('why', '')} |")
        values += [f"| {name} | {key} | {value} |" for key, value in _flat(part.get("values", {}))]
    table = ["| part | value | measured |", "| --- | --- | --- |", *values]
    return "\n\n".join([GPU, origin, "\n".join(rows), "\n".join(table)])


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
    command = " ".join(["python", f"benchmarks/{name}.py", *options.split(), "--check"])
    return f"Measured by `{command}` on {result['device']}, at {commits}."


def of_learning(result: Results) -> list[str]:
    return [LEARNING, "\n".join(learning.table(result["runs"])), made_by("learning", result, f"--seeds {seeds_of(result)}")]


def of_staleness(result: Results) -> list[str]:
    config, runs = result["config"], result["runs"]
    algorithms = ",".join(dict.fromkeys(run["algorithm"] for run in runs))
    options = f"--algorithms {algorithms} --seeds {seeds_of(result)}"
    text = STALENESS.format(last=config["last_steps"], goal=config["goal"])
    return [text, "\n".join(staleness.table(runs)[0]), made_by("staleness", result, options)]


def of_held_out(result: Results) -> list[str]:
    options = f"--steps {result['config']['steps']} --seeds {seeds_of(result)}"
    return [HELD_OUT, "\n".join(held_out.table(result["runs"])), made_by("held_out", result, options)]


def seeds_of(result: Results) -> str:
    """As `learning.py` and `held_out.py` are told them."""
    return ",".join(map(str, sorted({run["seed"] for run in result["runs"]})))


def of_end_to_end(result: Results) -> list[str]:
    rows = [f"| side | seeds | step | {' | '.join(PARTS)} | tokens/s | peak GB |", "|" + " --- |" * (len(PARTS) + 5)]
    for side in (MEGARL, *PEERS):
        if (means := summary(result["runs"], side)) is not None:
            seconds = " | ".join(f"{means[part]:.1f}" for part in ("seconds", *PARTS))
            seeds, peak = ", ".join(map(str, means["seeds"])), means["peak_bytes"] / 1e9
            rows.append(f"| {side} | {seeds} | {seconds} | {means['tokens_per_s']:.0f} | {peak:.1f} |")
    rewards = ["| reward by step |  |", "| --- | --- |"]
    for run in result["runs"]:
        curve = " ".join(f"{step['reward']:.2f}" for step in run["steps"])
        rewards.append(f"| {run['side']}, seed {run['seed']} | {curve} |")
    lines = [
        f"- {name}: {value:.3g} (target {limit}{'' if reached else ', missed'})"
        for name, (value, limit, reached) in targets(result["runs"]).items()
    ]
    config = result["config"]
    text = END_TO_END.format(precision=config["precision"], steps=config["steps"])
    parts = [text, "\n".join(rows), "\n".join(lines), rewards_are(result), "\n".join(rewards)]
    drawn = {run["seed"] for run in result["runs"]}
    options = f"--steps {config['steps']} --first-seed {min(drawn)} --seeds {len(drawn)}"  # there a number of them
    return [*parts, made_by("end_to_end", result, options)]


def of_weight_sync(result: Results) -> list[str]:
    columns = ("model", "ranks to workers", "memcpy", *SYNC_COLUMNS)
    rows = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    lines = []
    for row in result["rows"]:
        medians = row["medians"]
        memcpy_s = medians["megarl"]["received_bytes"] / medians["memcpy"]["bytes_per_s"]
        seconds = [memcpy_s, *(medians[way][key] for way, key in SYNC_COLUMNS.values())]
        rows.append(f"| {row['model']} | {row['case']} | {' | '.join(f'{1e3 * duration:.0f}' for duration in seconds)} |")
        for name, (value, limit, reached) in row["targets"].items():
            missed = "" if reached else ", missed"
            lines.append(f"- {row['model']}, {row['case']}: {name} {value:.3g} (target {limit}{missed})")
    rounds = result["config"]["rounds"]
    parts = [WEIGHT_SYNC.format(rounds=rounds), "\n".join(rows), "\n".join(lines)]
    return [*parts, made_by("weight_sync", result, f"--rounds {rounds}")]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def of_stream(result: Results) -> list[str]:
    config = result["config"]
    rows = [
        (cell["name"], *(f"{cell[key]:.2f}" for key in ("step_s", "generation_s", "training_s", "of_bound")),
         f"{cell['loop_share']:.1%}") for cell in result["cells"]
    ]  # fmt: skip
    columns = ("cell", "step (s)", "generation (s)", "training (s)", "/ bound", "loop")
    options = f"--steps {config['steps']} --slots {config['slots']} --step-seconds {config['step_s']:g}"
    cells = {cell["name"]: cell for cell in result["cells"]}
    worst = max(cell["of_bound"] for cell in result["cells"] if stream.is_judged(cell))
    loop, gain = cells[stream.FASTEST]["loop_share"], stream.ratio(cells, "1:1 S=0", "1:1 S=2") or 0.0
    early = stream.ratio(cells, stream.BARRIER, stream.STREAMED) or 0.0
    goals = [
        ("a step over its bound, with S = 2", worst, stream.MOST_OF_BOUND, worst <= stream.MOST_OF_BOUND),
        ("the loop's share of a core at 512 completions a second", loop, stream.MOST_OF_CORE, loop < stream.MOST_OF_CORE),
        ("S = 2 over S = 0, training as long as generation", gain, stream.LEAST_GAIN, gain >= stream.LEAST_GAIN),
        (
            "early rewards and an early phase over a barrier",
            early,
            stream.LEAST_EARLY_GAIN,
            early >= stream.LEAST_EARLY_GAIN,
        ),
    ]
    lines = [
        f"- {name}: {value:.3f} (target {limit}{'' if reached else ', missed'})" for name, value, limit, reached in goals
    ]
    return [STREAM.format(**config), table(columns, rows), "\n".join(lines), made_by("stream", result, options)]


def of_gateway(result: Results) -> list[str]:
    config, load, memory = result["config"], result["load"], result["memory"]
    added = (f"{1e3 * load[f'added_p{q}_s']:.1f} ms" for q in (50, 90, 99))
    row = (str(load["requests"]), *added, str(load["wrong"]), f"{load['busy_share']:.0%}", f"{memory['growth']:+.2%}")
    columns = ("requests", "added p50", "p90", "p99", "wrong", "a core", f"memory after {memory['sessions']} sessions")
    options = " ".join(f"--{name} {value:g}" for name, value in config.items())
    return [GATEWAY.format(**config), table(columns, [row]), made_by("gateway", result, options)]


def of_sft(result: Results) -> list[str]:
    config, rates = result["config"], result["tokens_per_s"]
    rows = [
        (str(point["step"]), f"{point['megarl']:.4f}", f"{point['trl']:.4f}", f"{point['error']:.4f}")
        for point in result["curve"]
    ]
    speed = f"Tokens a second: megarl {rates['megarl']:.0f}, TRL {rates['trl']:.0f}; by seed " + ", ".join(
        f"{ratio:.2f} times" for ratio in result["ratios"]
    )
    seeds = len({run["seed"] for run in result["runs"]})
    options = (
        f"--seeds {seeds} --steps {config['steps']} --micro-batch {config['micro_batch']} --threads {config['threads']}"
    )
    return [
        SFT.format(seeds=seeds),
        table(("step", "megarl", "TRL", "standard error"), rows),
        f"{speed}.",
        made_by("sft", result, options),
    ]


def of_distillation(result: Results) -> list[str]:
    kinds = {kind: row for kind, row in result.items() if isinstance(row, dict) and "of_phase" in row}
    rows = [
        (kind, f"{row['seconds']:.1f}", f"{row['of_phase']:.2f}", f"{row['extra_bytes'] / result['logits_bytes']:.2%}")
        for kind, row in kinds.items()
    ]
    text = DISTILLATION.format(vocab=result["config"]["vocab"])
    return [text, table(("divergence", "seconds", "of the phase", "extra"), rows), made_by("distillation", result, "")]


def rewards_are(result: Results) -> str:
    """Say which rewards are compared, and by how much chance alone separates two sides."""
    config, steps_by_run = result["config"], [run["steps"] for run in result["runs"] if run["side"] == MEGARL]
    steps = last_steps(min(map(len, steps_by_run)))
    rewards = [step["reward"] for run in steps_by_run for step in run[-steps:]]
    mean, completions = sum(rewards) / len(rewards), len(rewards) * config["prompts"] * config["group_size"]
    error = math.sqrt(2 * mean * (1 - mean) / completions)
    return (
        f"Rewards are compared over the last {'step' if steps == 1 else f'{steps} steps'} of {config['steps']}, "
        f"{completions} completions a side: the standard error of a difference is about {error:.2f}, even if the "
        "completions of a prompt were independent."
    )


# By the name of the file that a part comes from, in the order of the page.
MAKERS = {
    "learning": of_learning, "held_out": of_held_out, "end_to_end": of_end_to_end, "stream": of_stream,
    "staleness": of_staleness, "gateway": of_gateway, "sft": of_sft, "distillation": of_distillation,
    "weight_sync": of_weight_sync,
}  # fmt: skip


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
