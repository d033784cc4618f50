"""Does every shipped recipe give the numbers it gave before? Trains reduced copies on replayed rollouts and compares.

    python benchmarks/same_numbers.py --record PATH [--only WORD ...]
    python benchmarks/same_numbers.py [--check [PATH]] [--tolerance 1e-8] [--only WORD ...] [--json PATH]

For a refactoring: record before it, check after each step. Each recipe of `recipes/` trains three steps in fp32 on at most
two CPU ranks, with a tiny random model of the same family. Algorithm, phases, roles, LoRA, recompute, offload, router replay
and environment stay as they are shipped. `reduced` and `CHANGES` say what does not: sizes, layouts, learning rates of large
models, of `cpu/cispo` and of `cpu/ppo`. Rollouts are replayed, so that neither vLLM nor Ray is needed: the script writes
them from a seed, with right and wrong answers, truncated completions, and log-probabilities near those of the model.

The runs start by the command line alone (`TRAIN`), and the script imports nothing of the package, so that modules can move.
It writes the replay files itself (`write_dump`), and knows that an epoch of prompts is
`numpy.random.default_rng([seed, epoch]).permutation(rows)`: a run whose prompts come in another order refuses the files.

Numbers of time, memory, throughput and machine are left out (`EXCLUDED_PREFIXES`, `EXCLUDED_SUFFIXES`). Keys that were
renamed since go into `RENAMED`. Keys that the record does not have are counted, and are no fault. Two runs of the same code
on one machine give the same bits; the record keeps nine digits, hence the tolerance. A change that adds the same terms in
another order, or another processor, needs about `--tolerance 1e-5`. Exit 1 when a number differs, a recipe is missing, or a
run fails. About four minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' models

from tests.tiny_models import save_tiny_model, save_tiny_tokenizer  # noqa: E402

TRAIN = ("megarl.cli", "train")  # python -m <module> <command> RECIPE
RECORD = ROOT / "benchmarks" / "measured" / "before_rebuild.json"

# Keys of metrics.jsonl, old -> new. A name that ends in "/" renames all keys under it.
RENAMED: dict[str, str] = {}
EXCLUDED_PREFIXES = ("time/", "idle/", "offload/", "mfu/", "memory/", "run/", "start_sync/")
EXCLUDED_SUFFIXES = ("_s", "/per_hour", "/num_workers")

STEPS = 3
SEED = 20
RUN_LIMIT_S = 300.0
AT_ONCE = 2  # runs
VOCAB = 97  # tokens that the tiny tokenizer can decode: 0 pads, 1 ends, 2 is ASCII 32
MOE_LAYERS, NUM_EXPERTS, TOP_K = 3, 8, 2  # of the tiny qwen3_moe
LONGEST_PROMPT, LONGEST_COMPLETION = 440, 48  # reduced recipes; the tiny models know 512 positions

# The tiny model that takes the place of `model.path` or `critic.path`: arguments of save_tiny_model.
MODELS: dict[str, dict[str, Any]] = {
    "models/tiny-qwen3": {"family": "qwen3", "layers": 2, "head_dim": 32},
    "models/SmolLM2-135M-Instruct": {"family": "llama", "tied": True},
    "Qwen/Qwen2.5-32B": {"family": "qwen2"},
    "Qwen/Qwen2.5-7B-Instruct": {"family": "qwen2"},
    "Qwen/Qwen3-30B-A3B": {"family": "qwen3_moe"},
    "unsloth/DeepSeek-V3-bf16": {"family": "deepseek_v3"},
    "meta-llama/Llama-2-70b-chat-hf": {"family": "llama"},
    "meta-llama/Llama-2-13b-chat-hf": {"family": "llama", "layers": 2, "seed": 1},
}
# Layouts of two ranks: between them tensor, context, pipeline, expert and data parallelism are each used.
CHANGES: dict[str, dict[str, Any]] = {
    "ppo-tiny": {"trainer.ranks": 2, "actor.layout": {"tensor": 2}},
    "dapo-qwen2.5-32b-32gpus": {"trainer.ranks": 2, "actor.layout": {"context": 2}},
    "grpo-qwen2.5-7b-8gpus": {"trainer.ranks": 2, "actor.layout": {"tensor": 2, "sequence_parallel": True}},
    "gspo-qwen3-30b-a3b-32gpus": {"trainer.ranks": 2, "actor.layout": {"expert": 2, "expert_tensor": 1}},
    "grpo-deepseek-v3-256gpus": {"trainer.ranks": 2, "actor.layout": {"pipeline": 2, "stages": [1, 3]}},
    "ppo-llama2-70b-critic-13b-16gpus": {
        "trainer.ranks": 2,
        "actor.layout": {"pipeline": 2},
        "critic.layout": {"tensor": 2, "sequence_parallel": True},
        "critic.optimizer.lr": 2e-3,
    },
    # The learning rates of these two when the numbers were recorded.
    "cispo": {"actor.optimizer.lr": 5e-3},
    "ppo": {"actor.optimizer.lr": 5e-3},
}

Recipe = dict[str, Any]
Columns = dict[str, list[Any]]  # key -> its value in each step, None where a step has none


def shipped() -> dict[str, Path]:
    """Recipe files by their path from the root."""
    return {str(file.relative_to(ROOT)): file for file in sorted((ROOT / "recipes").rglob("*.yaml"))}


def reduced(file: Path, folder: Path) -> Recipe:
    """The recipe as it runs here, with its model and its rollouts written into `folder`."""
    recipe: Recipe = yaml.safe_load(file.read_text())
    recipe["run"] |= {"name": file.stem, "steps": STEPS, "dir": str(folder / "runs")}
    recipe["run"].setdefault("seed", 1)
    recipe["run"].pop("checkpoint_every", None)
    recipe["trainer"] |= {"precision": "fp32", "threads": 1}
    for role in ("model", "critic"):
        if "path" in recipe.get(role, {}):
            recipe[role]["path"] = str(tiny_model(recipe[role]["path"], folder))
    for section in ("evaluation", "device", "weight_sync"):  # of engines and machines
        recipe.pop(section, None)
    recipe["algorithm"].pop("dynamic_sampling", None)  # replay has a fixed batch a step
    if file.parent.name != "cpu":
        reduce_sizes(recipe)
    for key, value in CHANGES.get(file.stem, {}).items():
        *path, last = key.split(".")
        target = recipe
        for part in path:
            target = target[part]
        target[last] = value
    recipe["rollout"] = {"max_new_tokens": recipe["rollout"]["max_new_tokens"], "replay": str(rollouts(recipe, folder))}
    return recipe


def reduce_sizes(recipe: Recipe) -> None:
    """Fewer and shorter sequences; updates a step and sequences a micro-batch stay about what they were."""
    algorithm, data, phases, rollout = recipe["algorithm"], recipe["data"], recipe["phases"], recipe["rollout"]
    sequences = phases["rollout"]["prompts"] * algorithm["group_size"]
    tokens = data["max_prompt_tokens"] + rollout["max_new_tokens"]
    data["prompts"]["size"] = 64
    data["max_prompt_tokens"] = min(data["max_prompt_tokens"], LONGEST_PROMPT)
    rollout["max_new_tokens"] = min(rollout["max_new_tokens"], LONGEST_COMPLETION)
    algorithm["group_size"] = min(algorithm["group_size"], 4)
    phases["rollout"]["prompts"] = 16 // algorithm["group_size"]
    if "overlong" in algorithm:
        algorithm["overlong"]["buffer"] = rollout["max_new_tokens"] // 4
    optimizer = recipe["actor"]["optimizer"]
    optimizer["lr"] = 1e-3  # large enough for three steps to show an update
    if "warmup_steps" in optimizer:
        optimizer["warmup_steps"] = 2
    share = max(1.0, tokens / (data["max_prompt_tokens"] + rollout["max_new_tokens"]))
    for phase in phases.values():
        if "mini_batch" in phase:
            phase["mini_batch"] = 16 * phase["mini_batch"] // sequences
        if "max_tokens" in phase.get("micro_batch", {}):
            phase["micro_batch"]["max_tokens"] = math.ceil(phase["micro_batch"]["max_tokens"] / share)


def tiny_model(path: str, folder: Path) -> Path:
    """Write the model that takes the place of `path`, with a tokenizer, unless it is there."""
    directory = folder / "models" / Path(path).name
    if not directory.is_dir():
        save_tiny_tokenizer(save_tiny_model(directory, **MODELS[path]))
    return directory


def rollouts(recipe: Recipe, folder: Path) -> Path:
    """Write the rollouts of every step, unless a recipe with the same batches has: the directory for `rollout.replay`."""
    wanted = [recipe[name] for name in ("model", "data", "rollout")] + [recipe["run"]["seed"], recipe.get("environment")]
    wanted += [
        recipe["algorithm"]["group_size"],
        recipe["phases"]["rollout"]["prompts"],
        recipe["actor"].get("router_replay"),
    ]
    directory = folder / "rollouts" / hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:12]
    if directory.is_dir():
        return directory
    directory.mkdir(parents=True)
    generator = np.random.default_rng(SEED)
    prompts = prompt_order(recipe)
    for step in range(1, STEPS + 1):
        batch = [next(prompts) for _ in range(recipe["phases"]["rollout"]["prompts"])]
        write_dump(directory / f"step-{step:06d}.npz", recipe, step, batch, generator)
    return directory


def prompt_order(recipe: Recipe) -> Iterator[tuple[list[int], str]]:
    """The prompts in the order of a run, as token ids and answer; for the first epoch."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(recipe["model"]["path"])
    data, seed = recipe["data"], recipe["run"]["seed"]
    source = data["prompts"]
    if source["kind"] == "jsonl":
        lines = [json.loads(line) for line in (ROOT / source["path"]).read_text().splitlines()]
        rows = [(line[source["prompt_field"]], line[source["answer_field"]]) for line in lines]
    else:
        import reasoning_gym

        dataset = reasoning_gym.create_dataset(source["task"], seed=seed, size=source["size"], **source.get("options", {}))
        rows = [(dataset[number]["question"], dataset[number]["answer"]) for number in range(source["size"])]
    system = [{"role": "system", "content": data["system_prompt"]}] if "system_prompt" in data else []
    prompts = []
    for question, answer in rows:
        text = data.get("prompt_template", "{question}").replace("{question}", question)
        chat = [*system, {"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        if len(ids) <= data["max_prompt_tokens"]:
            prompts.append((ids, answer))
    for number in np.random.default_rng([seed, 0]).permutation(len(prompts)):
        yield prompts[number]


def completion(recipe: Recipe, answer: str, generator: np.random.Generator) -> tuple[list[int], list[bool], dict[str, Any]]:
    """Token ids, which of them the policy sampled, and how it ended: the columns of the dump that are one value a sample."""
    limit = recipe["rollout"]["max_new_tokens"]
    if "environment" not in recipe:
        ids, reason = turn(answer, limit, generator)
        return ids, [True] * len(ids), {"finish_reasons": reason}
    ids = []
    sampled: list[bool] = []
    turns = int(generator.integers(1, 4))
    for number in range(turns):
        if number:
            observation = [2 + ord(letter) - 32 for letter in f"Turn {number}."]
            ids, sampled = ids + observation, sampled + [False] * len(observation)
        turn_ids, reason = turn(answer, limit, generator)
        ids, sampled = ids + turn_ids, sampled + [True] * len(turn_ids)
    done = bool(generator.random() < 0.7)
    facts = {"rewards": round(float(generator.random()), 3), "turns": turns, "malformed": int(generator.integers(0, 2)),
             "done": done, "failures": "", "causes": "",
             "notes": json.dumps({"rewards": [], "metrics": {}, "segments": {}})}  # fmt: skip
    reason = "stop" if done else "length"
    return ids, sampled, {"finish_reasons": reason} | {f"episode_{name}": value for name, value in facts.items()}


def turn(answer: str, limit: int, generator: np.random.Generator) -> tuple[list[int], str]:
    """A text with the right or a wrong answer, as token ids: mostly ended, else cut at the limit."""
    final_answer = answer if generator.random() < 0.5 else str(generator.integers(0, 100))
    tail = f" \\boxed{{{final_answer}}}" if limit >= 16 else final_answer
    length = limit if generator.random() < 0.15 else int(generator.integers(0, max(1, limit - len(tail))))
    body = "".join(generator.choice(list("ab cde0123456789"), length))
    ids = [2 + ord(letter) - 32 for letter in body + tail] + [1]
    return (ids, "stop") if len(ids) <= limit else (ids[:limit], "length")


def write_dump(
    file: Path, recipe: Recipe, step: int, prompts: Sequence[tuple[list[int], str]], generator: np.random.Generator
) -> None:
    """A step's rollouts, in the columns that `rollout.replay` reads."""
    size = recipe["algorithm"]["group_size"]
    questions = [ids for ids, _ in prompts for _ in range(size)]
    completions = [completion(recipe, answer, generator) for _, answer in prompts for _ in range(size)]
    answers, sampled = [ids for ids, _, _ in completions], np.concatenate([marks for _, marks, _ in completions])
    count = len(completions)
    first = (step - 1) * len(prompts)
    logprobs = model_logprobs(recipe["model"]["path"], questions, answers)
    logprobs = np.round(logprobs + generator.normal(0, 0.02, len(logprobs)), 4).clip(max=0)
    columns: dict[str, Any] = {
        "group_size": np.int64(size),
        "groups": np.repeat(np.arange(first, first + len(prompts)), size),
        "rollouts": np.arange(count),
        "prefixes": np.repeat(np.arange(len(prompts)), size),
        "prompt_lengths": np.array([len(ids) for ids in questions]),
        "completion_lengths": np.array([len(ids) for ids in answers]),
        "own_lengths": np.array([sum(marks) for _, marks, _ in completions]),
        "first_version": np.full(count, step - 1),
        "last_version": np.full(count, step - 1),
        "prompt_ids": np.concatenate(questions).astype(np.int32),
        "token_ids": np.concatenate(answers).astype(np.int32),
        "logprobs": np.where(sampled, logprobs, 0).astype(np.float32),
        "versions": np.full(len(sampled), step - 1),
        "own": sampled,
    }
    columns |= {name: np.array([facts[name] for _, _, facts in completions]) for name in completions[0][2]}
    if recipe["actor"].get("router_replay"):
        rows = int(columns["prompt_lengths"].sum() + columns["completion_lengths"].sum()) - count
        order = generator.random((rows, MOE_LAYERS, NUM_EXPERTS)).argsort(-1)
        columns["routing"] = order[:, :, :TOP_K].astype(np.uint8)
    np.savez(file, **columns)


def model_logprobs(path: str, questions: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> np.ndarray:
    """float32 [completion tokens]: Hugging Face's log-probability of every completion token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rows = [torch.tensor([*question, *answer]) for question, answer in zip(questions, answers, strict=True)]
    with torch.no_grad():  # padding follows the tokens, which do not see it
        logits = model(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), use_cache=False).logits
    parts = []
    for row, question, line in zip(rows, questions, logits.log_softmax(-1), strict=True):
        start = len(question)
        parts.append(line[start - 1 : len(row) - 1].gather(-1, row[start:, None])[:, 0].numpy())
    return np.concatenate(parts)


def fingerprint(recipe: Recipe) -> str:
    """Of the models and rollouts; not of the log-probabilities, whose last digit depends on the processor, and not of
    columns that came after the record."""
    left_out, digest = {"logprobs", "prefixes", "rollouts", "versions", "episode_notes"}, hashlib.sha256()
    for role in ("model", "critic"):
        if "path" in recipe.get(role, {}):
            digest.update((Path(recipe[role]["path"]) / "model.safetensors").read_bytes())
    for file in sorted(Path(recipe["rollout"]["replay"]).glob("*.npz")):
        with np.load(file) as dump:
            for name in sorted(set(dump.files) - left_out):
                digest.update(dump[name].tobytes())
    return digest.hexdigest()[:16]


def train(recipe: Recipe, folder: Path) -> list[dict[str, Any]]:
    """Run the recipe: the lines of its metrics. Raises RuntimeError with the end of the output when it fails."""
    name = recipe["run"]["name"]
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(recipe))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *TRAIN, str(file)]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=RUN_LIMIT_S,
            text=True,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{name} ran past {RUN_LIMIT_S:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"{name} ended with status {done.returncode}:\n{done.stdout[-2000:]}")
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def compared(lines: Sequence[Mapping[str, Any]]) -> Columns:
    """The numbers that a run must give again, nine digits of each."""
    keys = sorted({key for line in lines for key, value in line.items() if isinstance(value, int | float)})
    return {key: [rounded(line.get(key)) for line in lines] for key in keys if is_compared(key)}


def is_compared(key: str) -> bool:
    """Return whether a key of metrics.jsonl depends on neither time, memory nor machine."""
    return not key.startswith(EXCLUDED_PREFIXES) and not key.endswith(EXCLUDED_SUFFIXES) and "/per_" not in key


def rounded(value: Any) -> Any:
    return float(f"{value:.9g}") if isinstance(value, float) else value


def new_name(key: str) -> str:
    """What a recorded key is called now."""
    if key in RENAMED:
        return RENAMED[key]
    prefix = max((old for old in RENAMED if old.endswith("/") and key.startswith(old)), key=len, default="")
    return RENAMED[prefix] + key.removeprefix(prefix) if prefix else key


def difference(old: Any, new: Any) -> float:
    """Relative; infinite where only one is a number."""
    if old == new or (isinstance(old, float) and isinstance(new, float) and math.isnan(old) and math.isnan(new)):
        return 0.0
    if old is None or new is None or not math.isfinite(old) or not math.isfinite(new):
        return math.inf
    return abs(old - new) / max(abs(old), abs(new))


def measure(name: str, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Train one recipe: its numbers, or the error."""
    began = time.monotonic()
    row: dict[str, Any] = {"recipe": name, "inputs": fingerprint(recipe)}
    try:
        row["numbers"] = compared(train(recipe, folder))
    except RuntimeError as error:
        row["error"] = str(error)
    return row | {"seconds": time.monotonic() - began}


def measure_all(files: Mapping[str, Path]) -> list[dict[str, Any]]:
    """A row for each recipe."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        recipes = {name: reduced(file, folder) for name, file in files.items()}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda item: measure(item[0], item[1], folder), recipes.items()))


def is_chosen(name: str, words: Sequence[str]) -> bool:
    return not words or any(word in name for word in words)


def judge(row: dict[str, Any], recorded: Mapping[str, Any] | None, tolerance: float) -> None:
    """Add to a row what differs from the record: `differing` numbers as (key, step, old, new, relative difference)."""
    row |= {"compared": 0, "new_keys": 0, "largest": 0.0, "differing": []}
    if "error" in row:
        return
    if recorded is None:
        row["error"] = f"{row['recipe']} is not recorded"
        return
    if recorded["inputs"] != row["inputs"]:
        row["error"] = f"{row['recipe']}: the tiny models or the rollouts are not those of the record"
    numbers = row["numbers"]
    names = {key: new_name(key) for key in recorded["numbers"]}
    row["new_keys"] = len(numbers.keys() - set(names.values()))
    for key, olds in recorded["numbers"].items():
        for step, (old, new) in enumerate(zip(olds, numbers.get(names[key], [None] * STEPS), strict=True), start=1):
            relative = difference(old, new)
            row["compared"] += 1
            row["largest"] = max(row["largest"], relative)
            if relative > tolerance:
                row["differing"].append((names[key], step, old, new, relative))


def show(rows: Sequence[Mapping[str, Any]], checks: bool) -> None:
    table = Table(title=f"metrics of {STEPS} steps on replayed rollouts")
    table.add_column("recipe")
    for column in ("keys", "numbers compared", "differ", "largest difference", "new keys", "seconds"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = ["-"] * 4
        if checks:
            cells = [str(row["compared"]), str(len(row["differing"])), f"{row['largest']:.2g}", str(row["new_keys"])]
        table.add_row(row["recipe"], str(len(row.get("numbers", {}))), *cells, f"{row['seconds']:.0f}")
    Console(width=140).print(table)
    for row in rows:
        if "error" in row:
            print(row["error"])
        differing = sorted(row.get("differing", []), key=lambda change: (change[1], -change[4]))
        for key, step, old, new, relative in differing[:10]:
            print(f"{row['recipe']}: step {step}, {key}: {old} -> {new} ({relative:.2g})")
        if len(differing) > 10:
            print(f"{row['recipe']}: and {len(differing) - 10} more")


def origin() -> dict[str, Any]:
    """Where numbers come from: what a record names, so that it can be made again."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "megatron-core", "transformers", "numpy")}
    device = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return {"commit": commit, "device": device, "versions": versions, "steps": STEPS, "rollout_seed": SEED, "models": MODELS}


def record(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line a key, so that a diff of two records can be read."""
    records = {row["recipe"]: {"inputs": row["inputs"], "numbers": row["numbers"]} for row in rows}
    heads = json.dumps(origin(), indent=1)[:-2]
    recipes = [
        f'  "{name}": {{"inputs": "{entry["inputs"]}", "numbers": {{\n'
        + ",\n".join(f"   {json.dumps(key)}: {json.dumps(values)}" for key, values in entry["numbers"].items())
        + "\n  }}"
        for name, entry in records.items()
    ]
    path.write_text(heads + ',\n "recipes": {\n' + ",\n".join(recipes) + "\n }\n}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="write the numbers")
    parser.add_argument("--check", type=Path, nargs="?", const=RECORD, help="compare with a record; exit 1 when one differs")
    parser.add_argument("--tolerance", type=float, default=1e-8, help="largest relative difference")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="recipes with one of these words in their path"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.record is None and arguments.check is None:
        parser.error("give --record PATH, --check [PATH], or both")
    recorded = None if arguments.check is None else json.loads(arguments.check.read_text())["recipes"]
    files = {name: file for name, file in shipped().items() if is_chosen(name, arguments.only)}
    if recorded is not None:
        for name in files.keys() - recorded.keys():
            print(f"{name}: left out, it came after the record")
            del files[name]
    rows = measure_all(files)
    if recorded is not None:
        for row in rows:
            judge(row, recorded.get(row["recipe"]), arguments.tolerance)
        gone = [name for name in recorded if is_chosen(name, arguments.only) and name not in shipped()]
        rows += [{"recipe": name, "error": f"{name} is recorded and not shipped", "seconds": 0.0, "compared": 0,
                  "differing": [], "largest": 0.0, "new_keys": 0} for name in gone]  # fmt: skip
    show(rows, recorded is not None)
    failed = sum("error" in row for row in rows)
    if arguments.json is not None:
        content = origin() | {"tolerance": arguments.tolerance, "rows": rows}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    if arguments.record is not None and not failed:
        record(arguments.record, rows)
    if recorded is None:
        count = sum(len(values) for row in rows for values in row.get("numbers", {}).values())
        print(f"same numbers: {len(rows)} recipes, {count} numbers recorded, {failed} recipes failed")
        return 1 if failed else 0
    differing = sum(len(row["differing"]) for row in rows)
    count, largest = sum(row["compared"] for row in rows), max(row["largest"] for row in rows)
    print(
        f"same numbers: {len(rows)} recipes, {failed} failed; {count} numbers, {differing} differ "
        f"(largest relative difference {largest:.2g}, tolerance {arguments.tolerance:g})"
    )
    return 1 if failed or differing else 0


if __name__ == "__main__":
    sys.exit(main())
