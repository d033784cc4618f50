"""What a static padded schedule costs on long-tail lengths, against a token budget: useful tokens an hour, and idle time.

    python benchmarks/idle_schedules.py [--steps 3] [--hidden 256] [--sequences 128] [--json PATH] [--check]

Two data-parallel ranks (fp32, one thread each, a random model) train twice on the same replayed rollouts, whose completions
have log-normal lengths: most are short, a few take all that is allowed. `static`: 8 sequences a micro-batch, each padded to
the longest of them. `budget`: a `max_tokens` rule. Figures are those of metrics.jsonl, medians over the steps behind the
first, which warms up: useful tokens are those of prompts and completions; `idle` is `idle/share`.

megarl itself never pads to the longest, so the static schedule is imitated: its plan counts the padding as slots, and the
model runs a dummy sequence of that length behind each short one. That is less attention than rows of full length would need.

Targets (with --check, exit 1 when missed): `budget` trains on at least 2.33 times the useful tokens an hour, with an idle
share under 0.10.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' recipes

TARGET_RATIO, TARGET_IDLE = 2.33, 0.10
RANKS, PER_MICRO_BATCH, GROUP_SIZE = 2, 8, 4
LONGEST, MEDIAN, DEVIATION = 760, 40.0, 1.2  # completion tokens; deviation of their logarithm
CAP_TOKENS = 1024
COLUMNS = {"useful_share": ".2f", "imbalance": ".2f", "step_seconds": ".1f", "tokens_per_hour": ",.0f", "idle": ".3f"}


def draw(generator: Any) -> int:
    """A completion's length."""
    return int(min(LONGEST, max(1, generator.lognormal(mean=0.0, sigma=DEVIATION) * MEDIAN)))


def write_inputs(folder: Path, steps: int, hidden: int, sequences: int) -> None:
    """A random model, prompts, and the rollouts that both runs replay."""
    from tests.memory_cases import write_model
    from tests.runs import fake_rollouts, tiny_run
    from tests.tiny_models import save_tiny_tokenizer

    tiny_run(folder)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "vocab_size": 131, "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64, "head_dim": 64, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048, "rope_theta": 10000.0, "eos_token_id": 1, "hidden_act": "silu",
    }  # fmt: skip
    for file in (folder / "model").iterdir():
        file.unlink()
    write_model(config, folder / "model")
    save_tiny_tokenizer(folder / "model")
    fake_rollouts(folder, steps, sequences // GROUP_SIZE, GROUP_SIZE, draw=draw)


def train(folder: Path, schedule: str, steps: int, sequences: int) -> list[dict[str, Any]]:
    """The metrics of one run."""
    from megarl.cluster.cores import thread_environment
    from tests.runs import tiny_recipe

    cut = {"sequences": PER_MICRO_BATCH} if schedule == "static" else {"max_tokens": CAP_TOKENS}
    changes = {
        "rollout__replay": str(folder / "rollouts"),
        "rollout__max_new_tokens": LONGEST,
        "phases__rollout": {"prompts": sequences // GROUP_SIZE},
        "phases__actor_logprob": {"micro_batch": cut},
        "phases__actor_update": {"mini_batch": sequences // 2, "micro_batch": cut},
    }
    recipe = tiny_recipe(folder, schedule, False, RANKS, 1, 1, steps, **changes)
    command = [sys.executable, "-m", "megarl.cluster.node_agent", "--standalone", "--nproc-per-node", str(RANKS), __file__]
    environment = {**os.environ, **thread_environment(os.environ, 1), "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, f"--as-rank={schedule}", str(recipe)], cwd=ROOT, env=environment, check=True)
    return [json.loads(line) for line in (folder / "runs" / schedule / "metrics.jsonl").read_text().splitlines()]


def figures_of(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the steps behind the first."""

    def median(value: Any) -> float:
        return statistics.median(value(line) for line in lines[1:])

    at = "schedule/actor_update/"
    return {
        "useful_share": median(lambda line: line[f"{at}useful_share"]),
        "imbalance": median(lambda line: line[f"{at}imbalance"]),
        "step_seconds": median(lambda line: line["time/step"]),
        "tokens_per_hour": median(
            lambda line: 3600 * (line["tokens/prompt"] + line["tokens/completion"]) / line["time/step"]
        ),
        "idle": median(lambda line: line["idle/share"]),
    }


def compare(steps: int, hidden: int, sequences: int) -> dict[str, dict[str, float]]:
    """The figures of both schedules on the same work."""
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), steps, hidden, sequences)
        return {schedule: figures_of(train(Path(folder), schedule, steps, sequences)) for schedule in ("static", "budget")}


def pad_to_the_longest() -> None:
    """From here on this rank plans micro-batches whose sequences are all as long as the longest, and runs the padding."""
    import torch

    from megarl.megatron import role as engine
    from megarl.megatron.batch import PackedMicroBatch, parts_of
    from megarl.schedule import phase_plan as plan

    class Padded(PackedMicroBatch):
        @property
        def num_sequences(self) -> int:
            return len(self.samples)

    def static(whole: Any, samples: Any, lengths: Any, slots: Any, multiple: int) -> Any:
        return replace(
            whole(samples, lengths, slots, multiple), slots=len(samples) * max(lengths[sample] for sample in samples)
        )

    def pack(whole: Any, batch: Any, micro: Any, *rest: Any, **options: Any) -> Any:
        packed = whole(batch, micro, *rest, **options)
        longest = max(int(batch.lengths[sample]) for sample in micro.samples)
        dummies = [longest - int(batch.lengths[sample]) for sample in micro.samples if batch.lengths[sample] < longest]
        lengths = [*(int(batch.lengths[sample]) for sample in micro.samples), *dummies]
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
        values = vars(packed) | {"bounds": bounds, "position_ids": positions, "longest": longest}
        values["parts"] = parts_of(bounds.tolist())
        return Padded(**values)

    plan._micro_batch = partial(static, plan._micro_batch)
    engine.pack = partial(pack, engine.pack)  # type: ignore[assignment]


def run_rank(schedule: str, recipe: str) -> int:
    """One trainer rank, as `megarl/__main__.py` is one."""
    from megarl.cluster.preemption import ASKED

    ASKED.watch()
    from megarl.build import main as train_rank

    if schedule == "static":
        pad_to_the_longest()
    return train_rank([recipe])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="of each run; the first is left out")
    parser.add_argument("--hidden", type=int, default=256, help="of the model, a multiple of 64")
    parser.add_argument("--sequences", type=int, default=128, help="a step, a multiple of 32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    parser.add_argument("recipe", nargs="?", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank is not None:
        return run_rank(arguments.as_rank, arguments.recipe)
    if arguments.steps < 2 or arguments.hidden % 64 or arguments.sequences % 32:
        parser.error("--steps of 2 or more, --hidden a multiple of 64, --sequences a multiple of 32")
    from rich.console import Console
    from rich.table import Table

    rows = compare(arguments.steps, arguments.hidden, arguments.sequences)
    table = Table(title=f"{arguments.sequences} sequences a step, {RANKS} ranks, the same rollouts")
    for column in ("schedule", *COLUMNS):
        table.add_column(column.replace("_", " "), justify="right")
    for schedule, row in rows.items():
        table.add_row(schedule, *(format(row[column], form) for column, form in COLUMNS.items()))
    Console(width=120).print(table)
    ratio, idle = rows["budget"]["tokens_per_hour"] / rows["static"]["tokens_per_hour"], rows["budget"]["idle"]
    if arguments.json is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        device = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        config = {key: getattr(arguments, key) for key in ("steps", "hidden", "sequences")}
        content = {"commit": commit, "device": device, "config": config, "schedules": rows, "ratio": ratio}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    print(
        f"idle_schedules: budget has {ratio:.2f} x the useful tokens an hour (target {TARGET_RATIO}) with an idle share of "
        f"{idle:.3f} (target under {TARGET_IDLE}); static idles {rows['static']['idle']:.3f}"
    )
    return 1 if arguments.check and (ratio < TARGET_RATIO or idle >= TARGET_IDLE) else 0


if __name__ == "__main__":
    sys.exit(main())
