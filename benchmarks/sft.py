"""How fast does supervised fine-tuning run, and does it learn the same, beside TRL's SFTTrainer on the same rows?

    python benchmarks/sft.py [--seeds 3] [--steps 24] [--micro-batch 8] [--threads N] [--json PATH] [--check]

A random Qwen3 of four layers learns to write digits as words: 32 questions and answers a step, whose lengths differ as
those of chats do (log-normal, cut at 240 tokens). Both sides start from the same weights and read the same rows in the same
order; loss on the answers, AdamW, clipping, fp32 and threads (by default one for each core) are the same. megarl packs a
step by `max_tokens`; TRL pads micro-batches of `--micro-batch` rows, since its packing without FlashAttention lets rows
attend to each other. The sides alternate, seed by seed; a seed draws weights and rows.

Tokens a second are those of prompts and answers without padding, of the median step after the first, which warms up;
evaluations do not count. Each evaluation is the mean loss of all answer tokens of the same 64 held-out rows. Some minutes on
two cores.

Targets (with --check, exit 1 when one is missed): the median over seeds of the ratio of tokens a second is at least 1.5; at
every evaluation the mean over seeds of the held-out loss differs from TRL's by at most the standard error of TRL's mean.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FASTER = 1.5
SIDES = ("megarl", "trl")
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ROWS, HELD_OUT, LONGEST, MAX_TOKENS = 32, 64, 240, 2048
OPTIMIZER = {"lr": 2e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0, "grad_clip": 1.0}
Run = dict[str, Any]  # side, seed, losses by step, tokens of all steps, and tokens a second


def rows_of(seed: int, count: int) -> list[dict[str, str]]:
    """Draw `count` different questions of some digits, with the digits' words for answers; none is longer than LONGEST
    tokens."""
    generator, rows = random.Random(seed), dict[str, str]()
    while len(rows) < count:
        digits = [generator.randrange(10) for _ in range(max(2, round(generator.lognormvariate(2.0, 0.8))))]
        question, answer = "".join(map(str, digits)) + "=", " ".join(WORDS[digit] for digit in digits)
        if len(question + answer) < LONGEST:  # a character is a token, and the end token is one more
            rows[question] = answer
    return [{"question": question, "answer": answer} for question, answer in rows.items()]


def prepare(folder: Path, seed: int, steps: int) -> None:
    """Write the rows of all steps in the order of use, the held-out rows, and a model with its tokenizer."""
    import torch
    import transformers as hf

    from tests.tiny_models import save_tiny_tokenizer

    drawn = rows_of(seed, HELD_OUT + steps * ROWS)
    random.Random(seed).shuffle(drawn)  # short questions repeat, so that the last ones are longer
    for name, rows in (("train", drawn[HELD_OUT:]), ("held_out", drawn[:HELD_OUT])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    torch.manual_seed(seed)
    config = hf.Qwen3Config(
        vocab_size=131, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, head_dim=32,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=1, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    hf.Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    save_tiny_tokenizer(folder / "model")


def train_megarl(folder: Path, seed: int, settings: dict[str, Any]) -> Run:
    """Run `megarl train`."""
    import yaml

    fields = {"kind": "jsonl", "prompt_field": "question", "answer_field": "answer"}
    update = {"mini_batch": ROWS, "micro_batch": {"max_tokens": MAX_TOKENS}}
    recipe = {
        "run": {"name": "run", "kind": "sft", "dir": str(folder), "seed": seed, "steps": settings["steps"]},
        "model": {"path": str(folder / "model")},
        "data": {"prompts": fields | {"path": str(folder / "train.jsonl")}, "chat_template": False, "shuffle": False,
                 "max_tokens": LONGEST},
        "trainer": {"ranks": 1, "precision": "fp32", "threads": settings["threads"]},
        "actor": {"optimizer": {"kind": "adam", **OPTIMIZER}},
        "phases": {"actor_update": update},
        "evaluation": {"prompts": fields | {"path": str(folder / "held_out.jsonl")}, "every": settings["every"]},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    execute(["-m", "megarl.cli", "train", str(folder / "recipe.yaml")], settings["threads"])
    steps = read_lines(folder / "run" / "metrics.jsonl")
    losses = {line["step"]: line["evaluation/loss"] for line in read_lines(folder / "run" / "evaluations.jsonl")}
    tokens = [line["tokens/prompt"] + line["tokens/completion"] for line in steps]
    return measured("megarl", seed, losses, tokens, [line["time/step"] for line in steps])


def train_trl(folder: Path, seed: int, settings: dict[str, Any]) -> Run:
    """Run `train_with_trl` in a process of its own, as megarl's ranks are."""
    (folder / "settings.json").write_text(json.dumps(settings))
    execute([__file__, "--trl", str(folder)], settings["threads"])
    result = json.loads((folder / "trl.json").read_text())
    losses = {int(step): loss for step, loss in result["losses"].items()}
    return measured("trl", seed, losses, result["tokens"], result["seconds"])


def train_with_trl(folder: Path) -> None:
    """Fine-tune with TRL and write losses by step, and the tokens and seconds of each step, to `trl.json`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    settings = json.loads((folder / "settings.json").read_text())
    torch.set_num_threads(settings["threads"])
    result: dict[str, Any] = {"losses": {}, "seconds": []}

    class Clock(TrainerCallback):
        """From the end of a step or of an evaluation to the end of the next step, as megarl's `time/step`."""

        since = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.since = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            result["seconds"].append(time.perf_counter() - self.since)
            self.since = time.perf_counter()

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
            result["losses"][state.global_step] = metrics["eval_loss"]
            self.since = time.perf_counter()

    def data(name: str) -> Any:
        rows = read_lines(folder / f"{name}.jsonl")
        return Dataset.from_list([{"prompt": row["question"], "completion": row["answer"]} for row in rows])

    config = SFTConfig(
        output_dir=str(folder / "out"), use_cpu=True, bf16=False, max_steps=settings["steps"], seed=1, report_to="none",
        per_device_train_batch_size=settings["micro_batch"], train_sampling_strategy="sequential",
        gradient_accumulation_steps=ROWS // settings["micro_batch"], gradient_checkpointing=False, max_length=LONGEST,
        completion_only_loss=True, learning_rate=OPTIMIZER["lr"], lr_scheduler_type="constant", warmup_steps=0,
        weight_decay=OPTIMIZER["weight_decay"], adam_beta1=OPTIMIZER["beta1"], adam_beta2=OPTIMIZER["beta2"],
        adam_epsilon=OPTIMIZER["epsilon"], max_grad_norm=OPTIMIZER["grad_clip"], save_strategy="no", disable_tqdm=True,
        logging_strategy="no", eval_strategy="steps", eval_steps=settings["every"], eval_on_start=True,
        per_device_eval_batch_size=HELD_OUT,  # one batch: its loss is the mean over all tokens
    )  # fmt: skip
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32), args=config,
        train_dataset=data("train"), eval_dataset=data("held_out"), callbacks=[Clock()],
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )  # fmt: skip
    trainer.train()
    lengths = [len(ids) for ids in trainer.train_dataset["input_ids"]]
    result["tokens"] = [sum(lengths[start : start + ROWS]) for start in range(0, len(lengths), ROWS)]
    (folder / "trl.json").write_text(json.dumps(result))


def measured(side: str, seed: int, losses: dict[int, float], tokens: list[int], seconds: list[float]) -> Run:
    rates = [count / spent for count, spent in zip(tokens[1:], seconds[1:], strict=True)]
    return {"side": side, "seed": seed, "losses": losses, "tokens": sum(tokens), "tokens_per_s": median(rates)}


def execute(arguments: list[str], threads: int) -> None:
    """Run Python with a number of threads; raises SystemExit with the end of what it wrote."""
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{arguments[0]} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def compare(runs: list[Run]) -> dict[str, Any]:
    """Return both sides' tokens a second, the ratio of each seed, and of each evaluation the means and TRL's error."""
    megarl, trl = ([run for run in runs if run["side"] == side] for side in SIDES)
    if [run["tokens"] for run in megarl] != [run["tokens"] for run in trl]:
        raise SystemExit("the two sides trained on different tokens")
    rates = [[run["tokens_per_s"] for run in side] for side in (megarl, trl)]
    curve = []
    for step in megarl[0]["losses"]:
        ours, theirs = ([run["losses"][step] for run in side] for side in (megarl, trl))
        error = stdev(theirs) / math.sqrt(len(theirs))
        curve.append({"step": step, "megarl": fmean(ours), "trl": fmean(theirs), "error": error,
                      "furthest": max(abs(a - b) for a, b in zip(ours, theirs, strict=True))})  # fmt: skip
    return {"tokens_per_s": dict(zip(SIDES, map(median, rates), strict=True)),
            "ratios": [ours / theirs for ours, theirs in zip(*rates, strict=True)], "curve": curve}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many; at least two")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--micro-batch", type=int, default=8, help="rows of TRL's micro-batches; divides 32")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each side")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)  # TRL's side of one seed, in this folder
    arguments = parser.parse_args()
    if arguments.trl:
        train_with_trl(arguments.trl)
        return 0
    settings = {"steps": arguments.steps, "every": max(1, arguments.steps // 4), "micro_batch": arguments.micro_batch,
                "threads": arguments.threads}  # fmt: skip
    runs = []
    for seed in range(1, arguments.seeds + 1):
        with tempfile.TemporaryDirectory() as name:
            prepare(Path(name), seed, arguments.steps)
            runs += [train(Path(name), seed, settings) for train in (train_megarl, train_trl)]
        rates = [run["tokens_per_s"] for run in runs[-2:]]
        print(f"seed {seed}: megarl {rates[0]:.0f} tokens/s, TRL {rates[1]:.0f}", flush=True)
    figures = compare(runs)
    print("  step   megarl      TRL  error of the mean  furthest seed")
    for point in figures["curve"]:
        print(
            f"{point['step']:6} {point['megarl']:8.4f} {point['trl']:8.4f} {point['error']:18.4f} {point['furthest']:14.5f}"
        )
    ratio = median(figures["ratios"])
    apart = max(abs(point["megarl"] - point["trl"]) / point["error"] for point in figures["curve"])
    if arguments.json is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        device = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        content = {"commit": commit, "device": device, "config": settings, "targets": [FASTER, 1.0], "runs": runs, **figures}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    print(
        f"sft: {ratio:.2f} times TRL's tokens a second (target {FASTER}); held-out losses at most {apart:.3f} standard "
        "errors apart (target 1)"
    )
    is_reached = ratio >= FASTER and apart <= 1  # not if a loss is NaN
    return int(arguments.check and not is_reached)


if __name__ == "__main__":
    sys.exit(main())
