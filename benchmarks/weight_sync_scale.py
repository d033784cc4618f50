"""How long would a weight sync take on a cluster? The real plan of large models, and a model of the links.

    python benchmarks/weight_sync_scale.py [--only NAME] [--nic 50e9] [--nvlink 450e9] [--json PATH] [--check]

For each model: a trainer layout, engines, and nodes of 8 GPUs. The trainer and the engines have GPUs of their own, as far as
possible on nodes of their own. Weights travel in bf16. Columns:

- bytes: what a worker receives, over the bytes of its own shard.
- bound: as long as every shard comes from the trainer, no schedule is faster. The slowest worker's bytes over its link, or
  the bytes that only the ranks of one pipeline stage have over the links of all of these. Workers of several engines on one
  node that hold the same count once.
- megarl: the schedule of `megarl/reshard/order.py`, by `benchmarks/sync_model.py`, whose docstring says what is assumed.
- in order: the same if every worker began with the first layer.
- broadcast: gather and broadcast, as others do it. The root of each stage gathers its tensors over its tensor and expert
  ranks and broadcasts them to every worker, each of which takes the whole model. Rated without latency or waits, gathering
  hidden behind broadcasting: its links' bytes alone. `a node` is the same where a node takes the model once, over all of its
  network cards, from the trainer or from another node, and hands it on over NVLink.
- plan: processor seconds of one core for the plans of all engines, and the peak memory of the process that made them.

Targets (with --check, exit 1 when one is missed): every worker receives exactly its own shard; megarl within 1.15 x of the
bound for every model; the plans of the largest one in 10 s and 2 GB.

    python benchmarks/weight_sync_scale.py --machine --model DIRECTORY [--transport shared_memory] [--tensor 1]
        [--pipeline 2] [--rollout-tensor 1] [--engines 1] [--hand-over 1e-4] [--cores 2] [--bucket-bytes 4194304]
        [--bytes-per-weight 2] [--rates 4e9 inf inf 5e9] [--check]

predicts instead a sync between processes of this machine by `benchmarks/machine_model.py`, and measures it in turns with
what the model is fed (`benchmarks/sync_rates.py`): bytes a second of each of the threads of one rank and one worker, and,
where messages travel, what one costs besides, as threads wake each other: what these two take longer than the model says,
over their messages. The seconds from one end's signal to the other's answer, and the cores, are given. Target: the median of
what was measured 1.0 to 1.3 x the prediction. With the four rates given nothing is measured.
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks.sync_model

from benchmarks.machine_model import Machine, Rates, machine_seconds  # noqa: E402
from benchmarks.sync_model import Cluster, Reader, bucket_parts, sync_seconds  # noqa: E402
from megarl.family import ModelShape  # noqa: E402
from megarl.reshard.boxes import Layout, RolloutLayout  # noqa: E402
from megarl.reshard.engines import engine_plan  # noqa: E402
from megarl.reshard.order import copy_order  # noqa: E402
from megarl.reshard.plan import ReshardPlan  # noqa: E402
from megarl.reshard.sides import vllm_boxes  # noqa: E402

BYTES = 2  # bf16
WITHIN = 1.15
PIECE_BYTES = 2 << 20  # `megarl.sync.in_place.PIECE_BYTES`, which needs torch
MOST_COPY_THREADS = 4  # `megarl.sync.copies.MOST_THREADS`, likewise
AT_MOST = 1.3  # measured over predicted, on this machine
MOST_PLAN_SECONDS, MOST_PLAN_BYTES = 10.0, 2e9
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

    def source_nodes(self, cluster: Cluster) -> list[int]:
        return [rank // cluster.node_gpus for rank in range(self.trainer.ranks)]

    def worker_nodes(self, engine: int, cluster: Cluster) -> list[int]:
        """Engines stand one after the other, from the first node behind the trainer's."""
        first = -(-self.trainer.ranks // cluster.node_gpus)
        gpus = range(engine * self.rollout.workers, (engine + 1) * self.rollout.workers)
        return [first + gpu // cluster.node_gpus for gpu in gpus]


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


def plans(case: Case, cluster: Cluster) -> Iterator[ReshardPlan]:
    """The plan of each engine."""
    nodes = case.source_nodes(cluster)
    for engine in range(case.engines):
        yield engine_plan(case.shape, case.trainer, case.rollout, engine, nodes, case.worker_nodes(engine, cluster))


def plan_cost(case: Case, cluster: Cluster) -> tuple[float, int]:
    """(processor seconds, peak bytes) of the plans and hashes of all engines, in a process of their own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_plan_cost, (case, cluster))


def _plan_cost(case: Case, cluster: Cluster) -> tuple[float, int]:
    began = time.process_time()
    made = list(plans(case, cluster))
    assert len({plan.hash for plan in made}) > 0
    # Not the peak of getrusage, which a new process has from the one that started it.
    (peak,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return time.process_time() - began, int(peak) * 1024


@dataclass(frozen=True)
class Stream:
    """A worker that receives, by its plan, and how many others of its node take the same copy."""

    plan: ReshardPlan
    worker: int
    node: int
    followers: int


def streams(case: Case, cluster: Cluster, made: Sequence[ReshardPlan]) -> list[Stream]:
    """One for each shard of each node: the worker of the first engine that has it there receives."""
    sharing: dict[tuple[int, int], list[int]] = {}
    for engine in range(case.engines):
        for worker, node in enumerate(case.worker_nodes(engine, cluster)):
            sharing.setdefault((node, worker), []).append(engine)
    return [Stream(made[engines[0]], worker, node, len(engines) - 1) for (node, worker), engines in sorted(sharing.items())]


def bound_seconds(case: Case, cluster: Cluster, received: Sequence[Stream]) -> tuple[float, float]:
    """(workers', trainer ranks') least seconds."""
    stage_ranks = case.trainer.ranks // case.trainer.pipeline
    nodes, most = np.array(case.source_nodes(cluster)), 0.0
    from_stage = np.zeros(case.trainer.pipeline)
    for stream in received:
        own = stream.plan.to_destination(stream.worker)
        size, near = stream.plan.sizes[own] * BYTES, nodes[stream.plan.source_rank[own]] == stream.node
        most = max(most, size[~near].sum() / cluster.nic, size[near].sum() / cluster.nvlink)
        ranks = stream.plan.source_rank[own][~near]
        from_stage += np.bincount(ranks // stage_ranks, size[~near], case.trainer.pipeline)
    return most, float(from_stage.max()) / stage_ranks / cluster.nic


def schedule_seconds(case: Case, cluster: Cluster, received: Sequence[Stream], rotated: bool) -> float:
    """megarl's time by the model; not `rotated`, every worker begins with the first layer."""
    readers = []
    for number, stream in enumerate(received):
        place = (number, len(received)) if rotated else (0, 1)
        order = copy_order(stream.plan, stream.worker, *place)
        readers.append(Reader(bucket_parts(stream.plan, order, BYTES, case.bucket_bytes), stream.node, stream.followers))
    return sync_seconds(readers, case.source_nodes(cluster), cluster)


def broadcast_seconds(case: Case, cluster: Cluster, model_bytes: float) -> tuple[float, float]:
    """(every worker takes the whole model, every node takes it once) of gather and broadcast."""
    stage_ranks = case.trainer.ranks // case.trainer.pipeline
    gather = model_bytes / case.trainer.pipeline / cluster.rate(stage_ranks <= cluster.node_gpus)
    everyone = model_bytes / cluster.nic
    once = max(model_bytes / cluster.nic / cluster.node_gpus, model_bytes / cluster.nvlink)
    return max(gather, everyone), max(gather, once)


def rate_case(case: Case, cluster: Cluster) -> dict[str, Any]:
    made = list(plans(case, cluster))
    boxes = vllm_boxes(case.shape, case.rollout, lambda weight: not weight.fixed)
    shard = np.bincount(boxes.rank, boxes.sizes, case.rollout.workers)
    excess = [np.bincount(plan.destination_rank, plan.sizes, case.rollout.workers) / shard for plan in made]
    received = streams(case, cluster, made)
    workers, ranks = bound_seconds(case, cluster, received)
    seconds, peak = plan_cost(case, cluster)
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
        "copies": sum(map(len, made)),
        "worker_bytes": float(shard.max()) * BYTES,
        "least_share": float(np.min(excess)),
        "most_share": float(np.max(excess)),
        "bound_workers": workers,
        "bound_ranks": ranks,
        "bound": max(workers, ranks),
        "megarl": schedule_seconds(case, cluster, received, rotated=True),
        "in_order": schedule_seconds(case, cluster, received, rotated=False),
        "broadcast": everyone,
        "broadcast_a_node": once,
        "plan_seconds": seconds,
        "plan_peak_bytes": peak,
    }


def machine_readers(
    shape: ModelShape, trainer: Layout, rollout: RolloutLayout, engines: int, itemsize: int, bucket_bytes: int
) -> list[Reader]:
    """A sync's workers, all on node 0."""
    plan = engine_plan(shape, trainer, rollout)
    orders = [copy_order(plan, worker, worker, rollout.workers) for worker in range(rollout.workers)]
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
        "alone": machine_seconds(readers, replace(machine, num_cores=sys.maxsize)),
        "work": num_bytes * seconds / machine.num_cores,
        "messages": message_s * num_messages(readers),
        "seconds": machine_seconds(readers, machine) + message_s * num_messages(readers),
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
    columns = ["model", "trainer", "engines", "GB a worker", "bytes", "bound: workers", "ranks", "megarl", "/ bound"]
    for name in [*columns, "in order", "broadcast", "a node", "plan s", "plan GB"]:
        table.add_column(name, justify="right")
    for row in rows:
        trainer, rollout = row["trainer"], row["rollout"]
        expert = " EP" if rollout["expert_parallel"] else ""
        table.add_row(
            row["model"],
            f"TP{trainer['tensor']} PP{trainer['pipeline']} DP{trainer['data']} EP{trainer['expert']}",
            f"{row['engines']} x TP{rollout['tensor']} DP{rollout['data']}{expert}",
            f"{row['worker_bytes'] / 1e9:.1f}",
            f"{row['most_share']:.2f}",
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


def run_machine(arguments: argparse.Namespace) -> int:
    shape = ModelShape.from_directory(arguments.model)
    trainer, rollout = Layout(arguments.tensor, arguments.pipeline), RolloutLayout(arguments.rollout_tensor)
    in_place = arguments.transport == "shared_memory"
    sizes = arguments.bytes_per_weight, PIECE_BYTES if in_place else arguments.bucket_bytes
    # As `megarl.sync.copies.num_copy_threads` says, which needs torch.
    copy_threads = max(1, min(MOST_COPY_THREADS, arguments.cores // rollout.workers)) if in_place else 0
    timed, message_s = None, 0.0
    if arguments.rates is not None:
        machine = Machine(arguments.cores, Rates(*arguments.rates), arguments.hand_over, copy_threads)
    else:
        from benchmarks.sync_rates import Sync, measured_in_turns  # here, because they need torch

        own = arguments.engines, arguments.transport, arguments.bytes_per_weight, arguments.bucket_bytes
        timed = measured_in_turns(Sync(shape, trainer, rollout, *own))
        machine = Machine(arguments.cores, timed.rates, arguments.hand_over, copy_threads)
        if not in_place:
            simplest = machine_readers(shape, Layout(), RolloutLayout(), 1, *sizes)
            message_s = max(0.0, timed.simplest_s - machine_seconds(simplest, machine)) / num_messages(simplest)
    found = predict_machine(machine_readers(shape, trainer, rollout, arguments.engines, *sizes), machine, message_s)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(MODELS), help="one model")
    # One H100 in one direction, and its network card of 400 Gb/s.
    for name, default in (("nvlink", 450e9), ("nic", 50e9), ("copy", 1.5e12), ("latency", 30e-6)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--machine", action="store_true")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--transport", choices=("shared_memory", "gloo"), default="shared_memory")
    parser.add_argument("--rates", type=float, nargs=4, metavar=("WRITE", "SEND", "RECEIVE", "PLACE"))
    parser.add_argument("--hand-over", type=float, default=1e-4)  # half of `transport.LOOK_S`, on average
    sizes = {"tensor": 1, "pipeline": 2, "rollout-tensor": 1, "engines": 1, "cores": 2}
    for name, number in (sizes | {"bucket-bytes": 4194304, "bytes-per-weight": 2}).items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.machine:
        return run_machine(arguments)
    cluster = Cluster(8, arguments.nvlink, arguments.nic, arguments.copy, arguments.copy, arguments.latency)
    rows = [rate_case(case, cluster) for case in CASES if arguments.only in (None, case.model)]
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
        f"(gather and broadcast {last['broadcast']:.0f} s), its {last['engines']} plans of {last['copies']} copies in "
        f"{last['plan_seconds']:.1f} s and {last['plan_peak_bytes'] / 1e9:.2f} GB"
    )
    return 1 if arguments.check and misses else 0


if __name__ == "__main__":
    sys.exit(main())
