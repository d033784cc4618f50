"""How fast does megarl train end to end, and what does it learn, beside TRL's GRPOTrainer on the same machine?

    python benchmarks/end_to_end.py [--sides megarl,trl-hf,trl-vllm] [--seeds 3] [--steps 20] [--json PATH] [--check]
    python benchmarks/end_to_end.py --sides trl-hf --first-seed 2 --seeds 1 --json part.json   (one part of it)
    python benchmarks/end_to_end.py --merge part1.json part2.json ... [--json PATH] [--check]  (and all of them together)

GRPO of SmolLM2-135M-Instruct on the task of `recipes/quickstart.yaml`: 8 prompts x 8 completions of up to 64 tokens, one
update a batch, clip 0.2 / 0.28, mean over all tokens, k3 KL of 0.04 against a reference, temperature 1, learning rate,
optimizer and clipping of the recipe. Both sides read the same prompts in the same order from one file, score with the
same function, run in the same precision (bf16 where the processor multiplies it, else fp32) and may use all
cores.

megarl: one trainer rank with a thread for each core, one vLLM engine, prompts shared by their groups (`share_prompts`);
no other option differs from the defaults but for sizes. TRL 1.16.0 is put into `.venv-trl` without its dependencies,
beside the stack of .venv, so that both run the same torch, transformers and vLLM. `trl-hf` generates with Hugging Face,
`trl-vllm` with vLLM in its process. Differences from TRL's defaults, each as megarl has it: loss_type "dapo" is the mean
over all tokens of a batch; KL without importance weights; no importance sampling correction, which spares it a pass; no
gradient checkpointing (--checkpointing turns it on), as megarl recomputes nothing. Replaced in `trl-vllm`: its weight
sync, which loads into tensors that vLLM has packed away on a CPU and fails (vLLM's own reload stands in), and the
engine's number format, which TRL leaves to the checkpoint's (`end_to_end_trl.py`).

Steps are measured from end to end; the first one warms up. Useful tokens are those of prompts and completions. Peak
memory is what the machine had less of than before. CPU seconds are of all of a side's processes: where a machine is not
quiet they say more than the clock. Each result is merged with others only if commit, device and settings are the same.

Targets (with --check, exit 1 when one is missed or a side has fewer than three seeds): useful tokens a second at least
2.5 times those of TRL in each mode; mean reward of the last quarter of the steps at most 0.05 below TRL's, which three
seeds may differ by; framework overhead under 5 % of a step: the time outside of the engine's work, the model's passes,
the optimizer and vLLM's repack.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.end_to_end_figures import (  # noqa: E402
    LEAST_SEEDS,
    MEGARL,
    PARTS,
    PEERS,
    Run,
    megarl_steps,
    merged,
    summary,
    targets,
    too_few,
)
from megarl.cluster.processes import end_at_once  # noqa: E402

RECIPE = ROOT / "recipes" / "quickstart.yaml"
TRL, TRL_FOLDER = "trl==1.16.0", ROOT / ".venv-trl"
KL, MAX_NEW_TOKENS, MAX_TOKENS = 0.04, 64, 1024
DEADLINE_S = 4 * 3600.0


def main() -> int:
    arguments = parsed()
    if arguments.merge:
        contents = [json.loads(path.read_text()) for path in arguments.merge]
        content = contents[0] | {"runs": merged(contents)}
    else:
        content = described(arguments) | {"runs": []}
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            for side in arguments.sides.split(","):
                content["runs"].append(run_side(side, seed, content["config"]))
    outcomes = targets(content["runs"])
    content |= {
        "targets": {
            name: dict(zip(("value", "limit", "reached"), outcome, strict=True)) for name, outcome in outcomes.items()
        }
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    show(content["runs"])
    few = too_few(content["runs"])
    messages = [
        f"{name} {value:.3g} (target {limit}{'' if reached else ', MISSED'})"
        for name, (value, limit, reached) in outcomes.items()
    ]
    print("end to end: " + "; ".join([*messages, *few]))
    return int(arguments.check and bool(few or not all(reached for *_, reached in outcomes.values())))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default=",".join((MEGARL, *PEERS)))
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precision", choices=("fp32", "bf16"))
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel trainer ranks of megarl; they share the cores")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences of TRL's micro-batches")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing in TRL, as is its default")
    parser.add_argument("--merge", type=Path, nargs="+", help="results to put together; nothing is run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.sides.split(",")) - {MEGARL, *PEERS}:
        parser.error(f"--sides: {sorted(unknown)[0]!r} is none of {', '.join((MEGARL, *PEERS))}")
    if arguments.check and not arguments.merge and arguments.seeds < LEAST_SEEDS:
        parser.error(f"--seeds {arguments.seeds}: --check compares {LEAST_SEEDS} or more a side")
    return arguments


def described(arguments: argparse.Namespace) -> dict[str, Any]:
    """Commit, device and what all sides are told."""
    from megarl.cluster.doctor import multiplies_bf16
    from megarl.recipe import load_recipe

    bf16 = multiplies_bf16()
    precision = arguments.precision or ("bf16" if bf16 else "fp32")
    recipe = load_recipe(RECIPE, [f"trainer.precision={precision}"])
    optimizer, loss = recipe.actor.optimizer, recipe.algorithm.policy_loss
    assert loss.kind == "clip", "TRL clips the ratio"
    config = {
        "model": recipe.model.path, "precision": precision, "steps": arguments.steps, "cores": os.cpu_count(),
        "prompts": recipe.phases.rollout.prompts, "group_size": recipe.algorithm.group_size, "kl": KL,
        "max_prompt_tokens": recipe.data.max_prompt_tokens, "max_new_tokens": MAX_NEW_TOKENS,
        "max_model_len": recipe.data.max_prompt_tokens + MAX_NEW_TOKENS,
        "temperature": recipe.rollout.temperature, "low": loss.low,
        "high": loss.high, "lr": optimizer.lr, "weight_decay": optimizer.weight_decay,
        "beta1": optimizer.beta1, "beta2": optimizer.beta2, "epsilon": optimizer.epsilon, "grad_clip": optimizer.grad_clip,
        "megarl": {"ranks": arguments.ranks, "max_tokens": MAX_TOKENS},
        "trl": {"micro_batch": arguments.micro_batch, "checkpointing": arguments.checkpointing, "version": TRL},
    }  # fmt: skip
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit,
        "device": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores" + ", no bf16 units" * (not bf16),
        "config": config,
    }


def run_side(side: str, seed: int, config: dict[str, Any]) -> Run:
    """Train one seed of one side; its figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = write_prompts(folder / "prompts.jsonl", seed, config)
        # Each side sees to its threads; a number that somebody chose for another program would bind them.
        environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *environment.get("PYTHONPATH", "").split(os.pathsep)])
        if side == MEGARL:
            command, lines = megarl_command(folder, prompts, seed, config), folder / "run" / "metrics.jsonl"
        else:
            install_trl()
            environment["PYTHONPATH"] += os.pathsep + str(TRL_FOLDER)
            command, lines = trl_command(folder, prompts, side, seed, config), folder / "steps.jsonl"
        begun = time.perf_counter()
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                peak_bytes, cpu = watch(process, lines)
            finally:  # at its deadline, or where somebody ends this benchmark, its ranks and engines end too
                end_at_once(tree(process.pid) if process.poll() is None else [])
        seconds = time.perf_counter() - begun
        if process.returncode:
            tail = "\n".join((folder / "log").read_text().splitlines()[-30:])
            raise SystemExit(f"{side}, seed {seed}, ended with {process.returncode}:\n{tail}")
        steps = (
            megarl_steps(folder / "run") if side == MEGARL else [json.loads(line) for line in lines.read_text().splitlines()]
        )
    for number, step in enumerate(steps):
        step["cpu_seconds"] = cpu[number] - cpu[number - 1] if number else None
    start_s = seconds - sum(step["seconds"] for step in steps)
    print(f"{side}, seed {seed}: {seconds:.0f} s, {steps[-1]['seconds']:.1f} s the last step", flush=True)
    return {"side": side, "seed": seed, "start_s": start_s, "peak_bytes": peak_bytes, "steps": steps}


def write_prompts(path: Path, seed: int, config: dict[str, Any]) -> Path:
    """The prompts of all steps of a seed, as the quickstart draws them; a line each, in the order of use."""
    from megarl.data.prompts import PromptStream
    from megarl.data.tokenizer import load_tokenizer
    from megarl.models.model_files import model_directory
    from megarl.recipe import load_recipe

    recipe = load_recipe(RECIPE, [])
    stream = PromptStream(recipe.data, seed, load_tokenizer(str(model_directory(recipe.model.path))))
    template = recipe.data.prompt_template or "{question}"
    prompts = stream.take(config["steps"] * config["prompts"])
    rows = [{"question": template.replace("{question}", prompt.question), "answer": prompt.answer} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def megarl_command(folder: Path, prompts: Path, seed: int, config: dict[str, Any]) -> list[str]:
    ranks, cap = config["megarl"]["ranks"], config["megarl"]["max_tokens"]
    threads = max(1, config["cores"] // ranks)
    cut = f"micro_batch: {{max_tokens: {cap}}}, share_prompts: true"
    sequences = config["prompts"] * config["group_size"]
    overrides = [
        "run.name=run", f"run.dir={folder}", f"run.seed={seed}", f"run.steps={config['steps']}", "run.trace=spans",
        f"trainer.precision={config['precision']}", f"trainer.ranks={ranks}", f"trainer.threads={threads}",
        "actor.layout={tensor: 1, pipeline: 1}", f"rollout.max_new_tokens={config['max_new_tokens']}",
        f"algorithm.kl={{place: loss, estimator: k3, coefficient: {config['kl']}}}",
        f"data.prompts={{kind: jsonl, path: {prompts}, prompt_field: question, answer_field: answer}}",
        "data.prompt_template=null", "data.shuffle=false",
        f"phases.reference_logprob={{{cut}}}", f"phases.actor_update={{mini_batch: {sequences}, {cut}}}",
    ]  # fmt: skip
    return [sys.executable, "-m", "megarl.cli", "train", str(RECIPE), *overrides]


def trl_command(folder: Path, prompts: Path, side: str, seed: int, config: dict[str, Any]) -> list[str]:
    settings = {"side": side, "seed": seed, "threads": config["cores"], "steps_file": str(folder / "steps.jsonl")}
    settings |= {"prompts_file": str(prompts), "folder": str(folder / "trl"), "model": str(ROOT / config["model"])}
    (folder / "settings.json").write_text(json.dumps(config | config["trl"] | settings))
    return [sys.executable, str(ROOT / "benchmarks" / "end_to_end_trl.py"), str(folder / "settings.json")]


def install_trl() -> None:
    """TRL alone, into a folder that only its runs have on their path."""
    if (TRL_FOLDER / f"{TRL.replace('==', '-')}.dist-info").is_dir():
        return
    shutil.rmtree(TRL_FOLDER, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(TRL_FOLDER), "--no-deps", TRL]
    subprocess.run(pip, check=True, timeout=600)


def watch(process: subprocess.Popen[bytes], lines: Path) -> tuple[int, list[float]]:
    """Wait for a side's end: how much less memory the machine had than before, at most, and the CPU seconds of all its
    processes at the end of each step, which is when a line comes into its file. Not the sum of their memory: to have the
    kernel go through the pages of large processes took more than half a core from the side that was measured."""
    deadline, peak = time.monotonic() + DEADLINE_S, 0
    spent: dict[int, float] = {}
    at_line: list[float] = []
    before = psutil.virtual_memory().available
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise SystemExit(f"no end within {DEADLINE_S:.0f} s")
        for member in tree(process.pid):
            try:
                spent[member.pid] = sum(member.cpu_times()[:2])
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        peak = max(peak, before - psutil.virtual_memory().available)
        count = lines.read_text().count("\n") if lines.is_file() else 0
        at_line += [sum(spent.values())] * (count - len(at_line))
        time.sleep(1.0)
    count = lines.read_text().count("\n") if lines.is_file() else 0
    return peak, at_line + [sum(spent.values())] * (count - len(at_line))


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def show(runs: list[Run]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="seconds of a step, means of all seeds; the first step is left out")
    for column in ("side", "step", *PARTS, "CPU", "tokens/s", "completion tokens", "peak GB"):
        table.add_column(column, justify="left" if column == "side" else "right")
    console = Console(width=125)
    for side in (MEGARL, *PEERS):
        if (means := summary(runs, side)) is None:
            continue
        cells = [f"{means[part]:.1f}" for part in ("seconds", *PARTS)]
        cells.append("" if means["cpu_seconds"] is None else f"{means['cpu_seconds']:.1f}")
        more = (f"{means['tokens_per_s']:.0f}", f"{means['completion_tokens']:.0f}", f"{means['peak_bytes'] / 1e9:.1f}")
        table.add_row(side, *cells, *more)
    console.print(table)
    for run in runs:
        console.print(
            f"{run['side']}, seed {run['seed']}, reward: " + " ".join(f"{step['reward']:.2f}" for step in run["steps"])
        )
    if (megarl_means := summary(runs, MEGARL)) is not None:
        parts = sorted(megarl_means["overhead"].items(), key=lambda item: -item[1])
        console.print("megarl's overhead, seconds a step: " + ", ".join(f"{name} {spent:.2f}" for name, spent in parts))


if __name__ == "__main__":
    sys.exit(main())
