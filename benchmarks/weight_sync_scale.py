"""How long would a weight sync take on a cluster? The real plan of large models, and a model of the links.

    python benchmarks/weight_sync_scale.py [--only NAME] [--nic 50e9] [--nvlink 450e9] [--node-gpus 8]
        [--json PATH] [--check] [--tensor 8] [--pipeline 8] [--data 8] [--expert 32] [--engines 16]
        [--rollout-tensor 8] [--rollout-data 4]

For each model: a trainer layout, engines, and nodes of GPUs; with --only the layouts may be others. The trainer and the
engines have GPUs of their own, as far as possible on nodes of their own. Weights travel in bf16, as a run sends them: by one
plan for all engines, to the workers of each in its order (`megarl/weight_sync/stream.py`), into two buckets. Columns:

- bytes: what a worker receives, over the bytes of its own shard.
- GB: the most that goes out of a rank's network card, into a worker's, and out of a worker's NVLink.
- bound: as long as every shard comes from the trainer, no schedule is faster. The slowest worker's bytes over its link, or
  the bytes that only the ranks of one pipeline stage have over the links of all of these. Workers of several engines on one
  node that hold the same count once.
- megarl: the schedule of a run, by `benchmarks/sync_model.py`, whose docstring says what is assumed.
- in order: the same if every worker began with the first layer.
- broadcast: gather and broadcast, as others do it. The root of each stage gathers its tensors over its tensor and expert
  ranks and broadcasts them to every worker, each of which takes the whole model. Rated without latency or waits, gathering
  hidden behind broadcasting: its links' bytes alone. `a node` is the same where a node takes the model once, over all of its
  network cards, from the trainer or from another node, and hands it on over NVLink.
- plan: processor seconds of one core for the plan and the streams to all workers, as a trainer rank makes them once, and
  the peak memory of the process that made them.

Engines of 32 workers are in here for what their sync would cost: megarl places an engine on one node, and so refuses them on
nodes of 8 GPUs (`megarl/planner/placement.py`).

Targets (with --check, exit 1 when one is missed): every worker receives exactly its own shard; megarl within 1.15 x of the
bound for every model; the plans of the largest one in 10 s and 2 GB.

    python benchmarks/weight_sync_scale.py --machine --model DIRECTORY [--transport shared_memory] [--tensor 1]
        [--pipeline 2] [--rollout-tensor 1] [--engines 1] [--hand-over 1e-4] [--cores 2] [--bucket-bytes 4194304]
        [--bytes-per-weight 2] [--rates 4e9 inf inf 5e9] [--check]

predicts instead a sync between processes of this machine by the same model, and measures it in turns with what the model is
fed (`benchmarks/sync_rates.py`): bytes a second of each of the threads of one rank and one worker, and, where messages
travel, what one costs besides, as threads wake each other: what these two take longer than the model says, over their
messages. The seconds from one end's signal to the other's answer, and the cores, are given. Target: the median of what was
measured 1.0 to 1.3 x the prediction. With the four rates given nothing is measured. Layouts are what a recipe may have, and
what only the other of the two modes reads is refused.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks.sync_model

from benchmarks.sync_model import Cluster, Machine, Rates, Reader, bucket_parts, sync_seconds  # noqa: E402
from megarl.models import ModelShape  # noqa: E402
from megarl.models.layout import Layout, RolloutLayout  # noqa: E402
from megarl.models.vllm_weights import check_layout  # noqa: E402
from megarl.recipe import Recipe  # noqa: E402
from megarl.recipe.layout_section import layout_fits_model, rank_rules, spread_layers  # noqa: E402
from megarl.weight_sync.boxes import vllm_boxes  # noqa: E402
from megarl.weight_sync.plan import ReshardPlan, engine_plan  # noqa: E402
from megarl.weight_sync.stream import Stream, copy_order  # noqa: E402

BYTES = 2  # bf16
WITHIN = 1.15
PIECE_BYTES = 2 << 20  # `megarl.weight_sync.in_place.PIECE_BYTES`, which needs torch
MOST_COPY_THREADS = 4  # `megarl.weight_sync.copies.MOST_THREADS`, likewise
AT_MOST = 1.3  # measured over predicted, on this machine
MOST_PLAN_SECONDS, MOST_PLAN_BYTES = 10.0, 2e9
# Options that one mode alone reads, with their defaults: one H100 in one direction with its network card of 400 Gb/s, and
# this machine, where `hand_over` is half of `transport.LOOK_S`, on average.
OF_CLUSTERS: dict[str, Any] = {"only": None, "nvlink": 450e9, "nic": 50e9, "copy": 1.5e12, "latency": 30e-6, "node_gpus": 8}
OF_CLUSTERS |= {"data": None, "expert": None, "rollout_data": None}
OF_MACHINE: dict[str, Any] = {"model": None, "transport": "shared_memory", "rates": None, "hand_over": 1e-4, "cores": 2}
OF_MACHINE |= {"bucket_bytes": 4 << 20, "bytes_per_weight": 2}
QWEN3_MOE = {
    "model_type": "qwen3_moe", "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 3, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
}  # fmt: skip
MODELS = {
    "Qwen3-30B-A3B": QWEN3_MOE
    | {"num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768},
    "Qwen3-235B-A22B": QWEN3_MOE
    | {"num_hidden_layers": 94, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536}
    | {"num_attention_heads": 64},
    "DeepSeek-V3": DEEPSEEK,
    "Kimi-K2-like": DEEPSEEK
    | {"num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840, "first_k_dense_replace": 1}
    | {"n_routed_experts": 384, "n_group": 1, "topk_group": 1},
}

# What rules on layouts do not read.
ANY_ACTOR: dict[str, Any] = {"optimizer": {"lr": 1e-6}}
ANY_RECIPE: dict[str, Any] = {
    "run": {"name": "any", "steps": 1},
    "model": {"path": "any"},
    "data": {"prompts": {"kind": "reasoning_gym", "task": "any", "size": 1}, "max_prompt_tokens": 1},
    "reward": [{"kind": "last_number"}],
    "algorithm": {"advantage": "grpo", "group_size": 2},
    "rollout": {"max_new_tokens": 1},
    "phases": {"rollout": {"prompts": 1}, "actor_update": {"mini_batch": 1, "micro_batch": {"sequences": 1}}},
}


@dataclass(frozen=True)
class Case:
    """A model, how its trainer and each of its engines are cut, and bytes of a bucket."""

    model: str
    trainer: Layout
    rollout: RolloutLayout
    engines: int
    bucket_bytes: int = 256 << 20

    @property
    def shape(self) -> ModelShape:
        return ModelShape.from_config(MODELS[self.model])

    def source_nodes(self, cluster: Cluster) -> tuple[int, ...]:
        return tuple(rank // cluster.node_gpus for rank in range(self.trainer.ranks))

    def worker_nodes(self, engine: int, cluster: Cluster) -> tuple[int, ...]:
        """Engines stand one after the other, from the first node behind the trainer's."""
        first = -(-self.trainer.ranks // cluster.node_gpus)
        gpus = range(engine * self.rollout.workers, (engine + 1) * self.rollout.workers)
        return tuple(first + gpu // cluster.node_gpus for gpu in gpus)

    def order(self, plan: ReshardPlan, engine: int, worker: int) -> np.ndarray:
        """As `megarl.weight_sync.manifest.sync_stream` has it, which needs torch."""
        workers = self.rollout.workers
        return copy_order(plan, worker, (engine * workers + worker, self.engines * workers))

    def cut(self, arguments: argparse.Namespace) -> Case:
        """With the layouts that the command line gives in place of its own. Raises ValueError naming an option that does not
        cut the model."""
        given = {name: getattr(arguments, name) for name in ("tensor", "pipeline", "data", "expert")}
        given = {name: number for name, number in given.items() if number is not None}
        rollout = {"tensor": arguments.rollout_tensor, "data": arguments.rollout_data}
        rollout = {name: number for name, number in rollout.items() if number is not None}
        if not given and not rollout and arguments.engines is None:
            return self
        trainer = replace(self.trainer, **given)
        if trainer.pipeline != self.trainer.pipeline:
            trainer = replace(trainer, stages=stages_of(self.shape, trainer.pipeline))
        engine = replace(self.rollout, **rollout)
        check_cut(self.shape, trainer, engine)
        engines = self.engines if arguments.engines is None else arguments.engines
        return replace(self, trainer=trainer, rollout=engine, engines=engines)


def stages_of(shape: ModelShape, pipeline: int) -> tuple[int, ...]:
    """Layers of each stage where these are not even."""
    uneven = shape.num_layers % pipeline and pipeline <= shape.num_layers
    return tuple(spread_layers(shape.num_layers, pipeline)) if uneven else ()


def check_cut(shape: ModelShape, trainer: Layout, rollout: RolloutLayout) -> None:
    """The rules of a recipe on how a model is cut. Raises ValueError naming the option that breaks one."""
    names = ("tensor", "pipeline", "expert", "expert_tensor", "stages")
    layout = {name: getattr(trainer, name) for name in names} | {"sequence_parallel": trainer.tensor > 1}
    recipe = Recipe.model_validate(
        ANY_RECIPE | {"trainer": {"ranks": trainer.ranks, "precision": "bf16"}, "actor": ANY_ACTOR | {"layout": layout}}
    )
    broken = [*rank_rules(recipe), *layout_fits_model(recipe, shape, "actor")]
    # What may be written into a recipe in place of another number has no option here.
    said = [str(replace(one, nearest=one.nearest.partition(", or ")[0])) for one in broken]
    try:
        check_layout(shape, rollout)
    except ValueError as error:
        said.append(str(error).partition("; ")[0] + "; 1 always does")
    if said:
        options = {"actor.layout.": "--", "rollout.tensor": "--rollout-tensor", "rollout.data": "--rollout-data"}
        raise ValueError(reduce(lambda text, names: text.replace(*names), options.items(), "\n".join(said)))


CASES = (
    Case("Qwen3-30B-A3B", Layout(2, 2, 4, expert=8, expert_tensor=1), RolloutLayout(4), 8, 128 << 20),
    Case(
        "Qwen3-235B-A22B",
        Layout(4, 4, 8, expert=32, expert_tensor=1, stages=(24, 24, 23, 23)),
        RolloutLayout(8, expert_parallel=True),
        8,
    ),
    Case(
        "DeepSeek-V3",
        Layout(8, 8, 4, expert=32, expert_tensor=1, stages=(7, 8, 8, 8, 8, 8, 7, 7)),
        RolloutLayout(8, data=4, expert_parallel=True),
        4,
    ),
    Case(
        "Kimi-K2-like",
        Layout(8, 8, 8, expert=32, expert_tensor=1, stages=(7, 8, 8, 8, 8, 8, 7, 7)),
        RolloutLayout(8, data=4, expert_parallel=True),
        16,
        512 << 20,
    ),
)


def plan_cost(case: Case) -> tuple[float, int]:
    """(processor seconds, peak bytes) of the plan, its hash and the streams to all workers with their parts, which a trainer
    rank keeps as long as it lives; in a process of their own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_plan_cost, (case,))


def _plan_cost(case: Case) -> tuple[float, int]:
    began = time.process_time()
    plan = engine_plan(case.shape, case.trainer, case.rollout)
    assert plan.hash
    streams = []
    for engine in range(case.engines):
        for worker in range(case.rollout.workers):
            stream = Stream.of(plan, case.order(plan, engine, worker), BYTES, case.bucket_bytes)
            assert stream.parts, "worked out once, at the latest in the first sync, and kept by the stream"
            streams.append(stream)
    # Not the peak of getrusage, which a new process has from the one that started it.
    (peak,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return time.process_time() - began, int(peak) * 1024


def receivers(case: Case, cluster: Cluster, plan: ReshardPlan, rotated: bool = True) -> list[Reader]:
    """The workers of each engine that receives: the first one on its node, or nodes; the others there take what that one
    received. Not `rotated`, every worker begins with the first layer."""
    together: dict[tuple[int, ...], list[int]] = {}
    for engine in range(case.engines):
        together.setdefault(case.worker_nodes(engine, cluster), []).append(engine)
    readers = []
    for nodes, engines in together.items():
        for worker, node in enumerate(nodes):
            order = case.order(plan, engines[0], worker) if rotated else copy_order(plan, worker)
            readers.append(Reader(bucket_parts(plan, order, BYTES, case.bucket_bytes), node, len(engines) - 1))
    return readers


@dataclass(frozen=True)
class Traffic:
    """Bytes: the most out of a rank's and into a worker's network card, and into a worker over NVLink from a rank, or out of
    one to the others of its node; and the most out of all ranks of a pipeline stage."""

    out_of_rank: float
    into_worker: float
    near: float
    handed_over: float
    out_of_stage: float


def traffic(case: Case, cluster: Cluster, readers: Sequence[Reader]) -> Traffic:
    out, into, near, handed_over = np.zeros(case.trainer.ranks), 0.0, 0.0, 0.0
    for reader in readers:
        received = np.zeros(case.trainer.ranks)
        for rank, size in (part for bucket in reader.buckets for part in bucket):
            received[rank] += size
        from_node = np.array(cluster.source_nodes) == reader.node
        out += np.where(from_node, 0, received)
        into, near = max(into, received[~from_node].sum()), max(near, received[from_node].sum())
        handed_over = max(handed_over, reader.followers * received.sum())
    stages = out.reshape(case.trainer.pipeline, -1).sum(axis=1)
    return Traffic(*map(float, (out.max(), into, near, handed_over, stages.max())))


def broadcast_seconds(case: Case, cluster: Cluster, model_bytes: float) -> tuple[float, float]:
    """(every worker takes the whole model, every node takes it once) of gather and broadcast."""
    stage_ranks = case.trainer.ranks // case.trainer.pipeline
    gather = model_bytes / case.trainer.pipeline / (cluster.nvlink if stage_ranks <= cluster.node_gpus else cluster.nic)
    everyone = model_bytes / cluster.nic
    once = max(model_bytes / cluster.nic / cluster.node_gpus, model_bytes / cluster.nvlink)
    return max(gather, everyone), max(gather, once)


def rate_case(case: Case, cluster: Cluster) -> dict[str, Any]:
    cluster = replace(cluster, source_nodes=case.source_nodes(cluster))
    plan = engine_plan(case.shape, case.trainer, case.rollout)
    boxes = vllm_boxes(case.shape, case.rollout, lambda weight: not weight.fixed)
    shard = np.bincount(boxes.rank, boxes.sizes, case.rollout.workers)
    excess = np.bincount(plan.destination_rank, plan.sizes, case.rollout.workers) / shard
    readers = receivers(case, cluster, plan)
    moved = traffic(case, cluster, readers)
    stage_ranks = case.trainer.ranks // case.trainer.pipeline
    bound_workers = max(moved.into_worker / cluster.nic, moved.near / cluster.nvlink)
    bound_ranks = moved.out_of_stage / stage_ranks / cluster.nic
    seconds, peak = plan_cost(case)
    whole = vllm_boxes(case.shape, RolloutLayout(), lambda weight: not weight.fixed)
    model_bytes = float(whole.sizes.sum()) * BYTES
    everyone, once = broadcast_seconds(case, cluster, model_bytes)
    return {
        "model": case.model,
        "trainer": asdict(case.trainer),
        "rollout": asdict(case.rollout),
        "engines": case.engines,
        "bucket_bytes": case.bucket_bytes,
        "model_bytes": model_bytes,
        "copies": len(plan),
        "worker_bytes": float(shard.max()) * BYTES,
        "least_share": float(excess.min()),
        "most_share": float(excess.max()),
        "link_bytes": asdict(moved),
        "bound_workers": bound_workers,
        "bound_ranks": bound_ranks,
        "bound": max(bound_workers, bound_ranks),
        "megarl": sync_seconds(readers, cluster),
        "in_order": sync_seconds(receivers(case, cluster, plan, rotated=False), cluster),
        "broadcast": everyone,
        "broadcast_a_node": once,
        "plan_seconds": seconds,
        "plan_peak_bytes": peak,
    }


def machine_order(plan: ReshardPlan, worker: int, workers: int, engines: int, in_place: bool) -> np.ndarray:
    """As `megarl.weight_sync.publish` has it, which needs torch. Of engines on one node the first leads, in its own order
    where engines have some; what is read in place has one for all of them."""
    return copy_order(plan, worker, (worker, workers if in_place else engines * workers))


def machine_readers(
    shape: ModelShape,
    trainer: Layout,
    rollout: RolloutLayout,
    engines: int,
    itemsize: int,
    bucket_bytes: int,
    in_place: bool,
) -> list[Reader]:
    """A sync's workers, all on node 0; read in place, what stands for buckets are pieces."""
    plan, workers = engine_plan(shape, trainer, rollout), rollout.workers
    orders = [machine_order(plan, worker, workers, engines, in_place) for worker in range(workers)]
    return [Reader(bucket_parts(plan, order, itemsize, bucket_bytes), 0, engines - 1) for order in orders]


def num_messages(readers: Sequence[Reader]) -> int:
    return sum(len(parts) for reader in readers for parts in reader.buckets)


def predict_machine(readers: Sequence[Reader], machine: Machine, message_s: float) -> dict[str, float]:
    """Seconds of a sync on one machine, those if it had a core for each thread, and those of the work alone if no thread
    waited for another. `message_s` are those that a message costs besides."""
    num_bytes = float(sum(size for reader in readers for parts in reader.buckets for _, size in parts))
    engines, rates = 1 + readers[0].followers, machine.rates
    seconds = 1 / rates.write + 1 / rates.send + 1 / rates.receive + engines / rates.place
    return {
        "bytes": num_bytes,
        "alone": sync_seconds(readers, replace(machine, num_cores=sys.maxsize)),
        "work": num_bytes * seconds / machine.num_cores,
        "messages": message_s * num_messages(readers),
        "seconds": sync_seconds(readers, machine) + message_s * num_messages(readers),
    }


def missed(row: dict[str, Any]) -> list[str]:
    """The targets that a model misses."""
    failed = {
        "bytes": (row["least_share"], row["most_share"]) != (1.0, 1.0),
        "schedule": row["megarl"] > WITHIN * row["bound"],
        "plan": row["plan_seconds"] > MOST_PLAN_SECONDS or row["plan_peak_bytes"] > MOST_PLAN_BYTES,
    }
    return [name for name, wrong in failed.items() if wrong]


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(title="seconds of one weight sync, by the model of the links", title_justify="left")
    columns = ["model", "trainer", "engines", "bytes", "GB out", "in", "NVLink", "bound: workers", "ranks", "megarl"]
    for name in [*columns, "/ bound", "in order", "broadcast", "a node", "plan s", "plan GB"]:
        table.add_column(name, justify="right")
    for row in rows:
        trainer, rollout, moved = row["trainer"], row["rollout"], row["link_bytes"]
        expert = " EP" if rollout["expert_parallel"] else ""
        table.add_row(
            row["model"],
            f"TP{trainer['tensor']} PP{trainer['pipeline']} DP{trainer['data']} EP{trainer['expert']}",
            f"{row['engines']} x TP{rollout['tensor']} DP{rollout['data']}{expert}",
            f"{row['most_share']:.2f}",
            *(f"{number / 1e9:.1f}" for number in (moved["out_of_rank"], moved["into_worker"])),
            f"{max(moved['near'], moved['handed_over']) / 1e9:.1f}",
            *(f"{row[name]:.3f}" for name in ("bound_workers", "bound_ranks", "megarl")),
            f"{row['megarl'] / row['bound']:.3f}",
            *(f"{row[name]:.2f}" for name in ("in_order", "broadcast", "broadcast_a_node")),
            f"{row['plan_seconds']:.2f}",
            f"{row['plan_peak_bytes'] / 1e9:.2f}",
        )
    Console(width=190).print(table)


def save(path: Path, config: dict[str, Any], content: dict[str, Any]) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    device = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    path.write_text(json.dumps({"commit": commit, "device": device, "config": config, **content}, indent=1) + "\n")


def run_machine(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    shape = ModelShape.from_directory(arguments.model)
    pipeline, engines = arguments.pipeline or 2, arguments.engines or 1
    trainer = Layout(arguments.tensor or 1, pipeline, stages=stages_of(shape, pipeline))
    rollout = RolloutLayout(arguments.rollout_tensor or 1)
    try:
        check_cut(shape, trainer, rollout)
    except ValueError as error:
        parser.error(str(error))
    in_place = arguments.transport == "shared_memory"
    sizes = arguments.bytes_per_weight, PIECE_BYTES if in_place else arguments.bucket_bytes, in_place
    # As `megarl.weight_sync.copies.num_copy_threads` says, which needs torch.
    copy_threads = max(1, min(MOST_COPY_THREADS, arguments.cores // rollout.workers)) if in_place else 0
    timed, message_s = None, 0.0
    if arguments.rates is not None:
        machine = Machine(arguments.cores, Rates(*arguments.rates), arguments.hand_over, copy_threads)
    else:
        from benchmarks.sync_rates import Sync, measured_in_turns  # here, because they need torch

        own = engines, arguments.transport, arguments.bytes_per_weight, arguments.bucket_bytes
        timed = measured_in_turns(Sync(shape, trainer, rollout, *own))
        machine = Machine(arguments.cores, timed.rates, arguments.hand_over, copy_threads)
        if not in_place:
            simplest = machine_readers(shape, Layout(), RolloutLayout(), 1, *sizes)
            message_s = max(0.0, timed.simplest_s - sync_seconds(simplest, machine)) / num_messages(simplest)
    found = predict_machine(machine_readers(shape, trainer, rollout, engines, *sizes), machine, message_s)
    gigabytes = [f"{rate / 1e9:.1f}" for rate in machine.rates]
    print(
        f"weight_sync_scale: {found['bytes'] / 1e6:.1f} MB by {arguments.transport} in {found['seconds']:.3f} s on "
        f"{arguments.cores} cores, {found['messages']:.3f} s of it for messages as such; {found['alone']:.3f} s with a core "
        f"for each thread, {found['work']:.3f} s if none waited. GB/s of a thread: a rank {gigabytes[0]}, its network "
        f"{gigabytes[1]}, a worker's {gigabytes[2]}, a worker {gigabytes[3]}"
    )
    if timed is not None:
        found |= {"measured": timed.sync_s, "ratio": timed.sync_s / found["seconds"], **timed.rates._asdict()}
        print(
            f"weight_sync_scale: measured {timed.sync_s:.3f} s, {found['ratio']:.2f} x the prediction "
            f"(target 1.0 to {AT_MOST})"
        )
    if arguments.json is not None:
        save(arguments.json, {key: str(value) for key, value in vars(arguments).items()}, found)
    return 1 if arguments.check and not 1.0 <= found.get("ratio", 1.0) <= AT_MOST else 0


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def settle(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Give defaults to what this mode reads and the command line leaves out; end the program for what nothing would read."""
    own, others, how = (OF_MACHINE, OF_CLUSTERS, "with") if arguments.machine else (OF_CLUSTERS, OF_MACHINE, "without")
    unread = [f"--{name.replace('_', '-')}" for name in others if getattr(arguments, name) is not None]
    if unread:
        parser.error(f"{how} --machine nothing reads {', '.join(unread)}; leave it out")
    for name, default in own.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    if arguments.machine and arguments.model is None:
        parser.error("--machine needs --model, a directory with a config.json")
    if arguments.rates is not None and arguments.check:
        parser.error("--check compares a prediction with what was measured, and with --rates nothing is; leave one out")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(MODELS), help="one model")
    for name in ("nvlink", "nic", "copy", "latency", "hand-over"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--machine", action="store_true")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--transport", choices=("shared_memory", "gloo"))
    parser.add_argument("--rates", type=float, nargs=4, metavar=("WRITE", "SEND", "RECEIVE", "PLACE"))
    for name in ("tensor", "pipeline", "data", "expert", "rollout-tensor", "rollout-data", "engines"):
        parser.add_argument(f"--{name}", type=positive)
    for name in ("node-gpus", "cores", "bucket-bytes", "bytes-per-weight"):
        parser.add_argument(f"--{name}", type=positive)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    settle(parser, arguments)
    if arguments.machine:
        return run_machine(parser, arguments)
    layouts = [arguments.tensor, arguments.pipeline, arguments.data, arguments.expert]
    layouts += [arguments.rollout_tensor, arguments.rollout_data, arguments.engines]
    if arguments.only is None and any(number is not None for number in layouts):
        parser.error("another layout is of one model: name it by --only")
    try:
        cases = [case.cut(arguments) for case in CASES if arguments.only in (None, case.model)]
    except ValueError as error:
        parser.error(str(error))
    rates = arguments.nvlink, arguments.nic, arguments.copy, arguments.copy, arguments.latency
    cluster = Cluster(arguments.node_gpus, *rates)
    rows = [rate_case(case, cluster) for case in cases]
    print_table(rows)
    misses = [(name, row["model"]) for row in rows for name in missed(row)]
    for name, model in misses:
        print(f"target missed: {name} of {model}")
    if arguments.json is not None:
        save(arguments.json, asdict(cluster), {"models": rows})
    last = rows[-1]
    print(
        f"weight_sync_scale: {len(rows)} models, {len(misses)} targets missed; megarl at most "
        f"{max(row['megarl'] / row['bound'] for row in rows):.3f} x the bound, {last['model']} in {last['megarl']:.2f} s "
        f"(gather and broadcast {last['broadcast']:.0f} s), its plan of {last['copies']} copies in "
        f"{last['plan_seconds']:.1f} s and {last['plan_peak_bytes'] / 1e9:.2f} GB"
    )
    return 1 if arguments.check and misses else 0


if __name__ == "__main__":
    sys.exit(main())
