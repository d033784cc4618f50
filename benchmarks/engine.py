"""How fast is the engine on a CPU, against Hugging Face's own model? (`gpu.py` measures it on a GPU.)

    python benchmarks/engine.py [--model models/SmolLM2-135M-Instruct] [--rounds 5] [--json PATH] [--check]

One process, two threads, 2,048 packed tokens (8 sequences of 256, all but the first token of each predicted). `update`
is forward and backward without the optimizer's step, gradients in the buffers that a step reads; `logprob` is the forward
phase. Hugging Face runs the same tokens packed into one row (position_ids restart at each sequence, scaled-dot-product
attention), materialises its logits and takes their log-softmax at the targets. That both give the same log-probabilities,
and so that Hugging Face's attention keeps the sequences apart, is checked first. The engine's update computes the entropy as
well. Rounds alternate between the two, so that both see the same machine; a ratio is that of the medians.

Targets (with --check, exit 1 when missed): update at least 1.0 times Hugging Face's tokens a second, logprob at least
1.5 times; in fp32, and in bf16 where the processor multiplies it (elsewhere torch emulates it many times slower, and
it is left out).
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' batches

from megarl.cluster.doctor import multiplies_bf16  # noqa: E402
from megarl.models.layout import Layout  # noqa: E402
from megarl.recipe.role_sections import MemorySection  # noqa: E402
from megarl.schedule import Schedule, plan_phase  # noqa: E402
from tests.engine_cases import engine, random_batch, start  # noqa: E402

Runs = dict[str, Callable[[], Any]]
SEQUENCES, LENGTH = 8, 256
TARGETS = {"update": 1.0, "logprob": 1.5}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SAME = {"fp32": 1e-3, "bf16": 0.2}  # log-probabilities of two implementations


def engine_runs(
    directory: str,
    place: Any,
    precision: str,
    lengths: list[tuple[int, int]],
    per: int,
    step: bool,
    recompute: str = "none",
    compile: bool = False,
) -> Runs:
    """An update and a forward phase over `lengths` (prompt, completion), `per` sequences a micro-batch."""
    memory = MemorySection.model_validate({"recompute": recompute})
    trained = engine(directory, place, lr=1e-6, precision=precision, memory=memory, compile=compile)
    batch = random_batch(trained.shape.vocab, lengths)
    schedule = Schedule("actor_update", sequences=per, mini_batch=len(lengths))
    (mini_batch,) = plan_phase(schedule, batch.lengths.tolist(), place.layout, 0).mini_batches
    if not step:
        trained.optimizer.step = lambda: (True, 0.0, None)

    def objective(micro: Any, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -outputs["logprobs"].mean(), {"entropy": outputs["entropy"].detach().sum()}

    def logprob() -> torch.Tensor:
        logprobs = trained.forward(batch, mini_batch)[0]["logprobs"]
        return torch.cat([logprobs[sample] for sample in range(len(lengths))])

    return {"update": lambda: trained.update(batch, mini_batch, objective), "logprob": logprob}


def reference_runs(directory: str, precision: str, lengths: list[tuple[int, int]]) -> Runs:
    """The same with Hugging Face's model, logits materialised."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[precision], attn_implementation="sdpa")
    batch = random_batch(model.config.vocab_size, lengths)
    rows = [(*sample.prompt_ids, *sample.completion.token_ids) for sample in batch.samples.values()]
    tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int64).unsqueeze(0)
    positions = torch.cat([torch.arange(len(row)) for row in rows]).unsqueeze(0)
    predicting = (positions[0, 1:] != 0).nonzero().flatten()

    def logprobs() -> torch.Tensor:
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0, predicting].float()
        return logits.log_softmax(-1).gather(-1, tokens[0, predicting + 1].unsqueeze(-1)).squeeze(-1)

    def update() -> None:
        model.zero_grad()
        (-logprobs().mean()).backward()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return logprobs()

    return {"update": update, "logprob": forward}


def alternate(runs: Mapping[str, Runs], kind: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round of one kind of run, by who ran it; the first round warms up and is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run[kind]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def against_hugging_face(directory: str, place: Any, precision: str, rounds: int) -> list[dict[str, Any]]:
    """Tokens a second of both, a row for each kind of run. Raises RuntimeError where their log-probabilities differ."""
    lengths = [(1, LENGTH - 1)] * SEQUENCES
    runs = {
        "engine": engine_runs(directory, place, precision, lengths, SEQUENCES, step=False),
        "Hugging Face": reference_runs(directory, precision, lengths),
    }
    logprobs = [run["logprob"]() for run in runs.values()]
    difference = float((logprobs[0] - logprobs[1]).abs().max())
    if difference > SAME[precision]:
        raise RuntimeError(f"{precision}: log-probabilities differ by {difference:.2g}: the two do not run the same model")
    rows = []
    for kind, target in TARGETS.items():
        seconds = alternate(runs, kind, rounds)
        speed = {name: sum(map(sum, lengths)) / statistics.median(taken) for name, taken in seconds.items()}
        value = speed["engine"] / speed["Hugging Face"]
        rows.append({"run": kind, "precision": precision, "tokens_per_second": speed, "seconds": seconds, "value": value,
                     "target": target, "logprob_difference": difference})  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    names = list(rows[0]["tokens_per_second"])
    table = Table(title="tokens a second")
    for column in ("precision", "run", *names, "ratio", "target"):
        table.add_column(column, justify="right")
    for row in rows:
        speeds = (f"{row['tokens_per_second'][name]:.0f}" for name in names)
        table.add_row(row["precision"], row["run"], *speeds, f"{row['value']:.2f}", f"{row['target']:.2f}")
    Console(width=100).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29433"}
    place = start(Layout())
    torch.set_num_threads(2)
    device = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, 2 threads"
    precisions = ["fp32", "bf16"] if multiplies_bf16() else ["fp32"]
    rows = [
        row for precision in precisions for row in against_hugging_face(arguments.model, place, precision, arguments.rounds)
    ]
    show(rows)
    if arguments.json is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        config = {"model": arguments.model, "rounds": arguments.rounds}
        arguments.json.write_text(json.dumps({"commit": commit, "device": device, "config": config, "rows": rows}, indent=2))
    results = ", ".join(f"{row['precision']} {row['run']} {row['value']:.2f} (target {row['target']})" for row in rows)
    print(f"engine, ratio: {results}")
    return 1 if arguments.check and any(row["value"] < row["target"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
