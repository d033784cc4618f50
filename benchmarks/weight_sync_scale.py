"""How long would a weight sync take on a cluster? The real plan of large models, and a model of the links.

    python benchmarks/weight_sync_scale.py [--only NAME] [--nic 50e9] [--nvlink 450e9] [--copy 1.5e12] [--node-gpus 8]
        [--latency 30e-6] [--tensor 8] [--pipeline 8] [--data 8] [--expert 32] [--engines 16] [--rollout-tensor 8]
        [--rollout-data 4] [--json PATH] [--check]

For each model: a trainer layout, engines, and nodes of GPUs, with each `rollout.placement`; with --only the layouts may be
others. Weights travel in bf16 by the transport `group`, as a run sends them: by one plan and one order for all engines
(`megarl/weight_sync/buckets.py`), into two buckets.

- separate: the engines have GPUs of their own, on the nodes behind the trainer's. Each worker receives its own bytes from
  all ranks over its network card.
- colocated: as many engines as the trainer's GPUs hold, with a worker on each. In two legs the bytes of a worker travel over
  the network, or inside a node over NVLink, to the trainer rank on its GPU, and the worker copies them from the rank's
  buckets. What comes from the rank on the same GPU takes no link.

Columns:

- bytes: what a worker receives, over the bytes of its own shard.
- GB: the most that goes out of a rank's network card, into a worker's network card, and into a worker over NVLink.
- bound: as long as every shard comes from the rank in the plan, no schedule is faster. The slowest worker's bytes over its
  links, or the bytes that leave the nodes of the ranks of one pipeline stage over the network cards of all of these.
- megarl: the schedule of a run, by `benchmarks/sync_model.py`, whose docstring says what is assumed.
- by layer: the same where adapters are merged: the ranks of a stage send alone.
- broadcast: the usual method. The root of each stage gathers its tensors over its tensor and expert ranks and broadcasts
  them to every worker, each of which takes the whole model. Computed without latency or waits, gathering hidden behind
  broadcasting: the bytes of its links alone. `a node` is the same where a node takes the model once, over all of its network
  cards, from the trainer or from another node, and passes it on over NVLink.
- plan: processor seconds of one core for the plan and the streams, as a trainer rank makes them once, and the peak memory of
  the process that made them.

Engines of 32 workers are here for what their sync would cost: megarl places an engine on one node, and so refuses them on
nodes of 8 GPUs (`megarl/planner/placement.py`).

Targets (with --check, exit 1 when any is missed): every worker receives exactly its own shard; megarl within 1.15 x the
bound for every model and placement; the plans of the largest model in 10 s and 2 GB.

    python benchmarks/weight_sync_scale.py --machine --model DIRECTORY [--transport mapped] [--tensor 1] [--pipeline 2]
        [--rollout-tensor 1] [--engines 1] [--hand-over 1e-4] [--cores 2] [--bucket-bytes BYTES] [--bytes-per-weight 2]
        [--rates 4e9 inf inf 5e9 inf] [--json PATH] [--check]

predicts instead a sync between processes of this machine by the same model, by `mapped`, by `group` over gloo, or in
`two_legs` over gloo and shared memory, and measures it (`benchmarks/sync_rates.py`) in turns with the input of the model:
bytes a second of each of the threads of one rank and one worker, and the extra cost of a bucket that travels, and of one
that a server hands over, as threads wake each other: what the simplest sync takes longer than the model says, divided by
their number. The seconds from the signal of one process to the answer of another, and the cores, are given; buckets have by
default the size that a run gives them. Target: the median of the measured seconds 1.0 to 1.3 x the prediction. With the five
rates given nothing is measured. Layouts are those that a recipe may have; options of the other mode are refused.
"""

from __future__ import annotations

import argparse
import json
import math
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

from benchmarks.sync_model import Cluster, Machine, Rates, Reader, sync_seconds  # noqa: E402
from benchmarks.sync_rates import TRANSPORTS, InTurns, Sync, measured_in_turns  # noqa: E402
from megarl.models import ModelShape  # noqa: E402
from megarl.models.layout import Layout, RolloutLayout  # noqa: E402
from megarl.models.vllm_weights import check_layout  # noqa: E402
from megarl.recipe import Recipe  # noqa: E402
from megarl.recipe.layout_section import layout_fits_model, rank_rules, spread_layers  # noqa: E402
from megarl.recipe.weight_sync_section import BUCKET_BYTES  # noqa: E402
from megarl.weight_sync.boxes import vllm_columns  # noqa: E402
from megarl.weight_sync.buckets import PieceStream, Round, sync_rounds, sync_stream  # noqa: E402
from megarl.weight_sync.copies import MOST_THREADS  # noqa: E402
from megarl.weight_sync.manifest import SyncSettings  # noqa: E402
from megarl.weight_sync.plan import ReshardPlan, sync_plan  # noqa: E402

BYTES = 2  # bf16
WITHIN = 1.15
AT_MOST = 1.3  # measured over predicted, on this machine
MOST_PLAN_SECONDS, MOST_PLAN_BYTES = 10.0, 2e9
# Options that one mode alone reads, with their defaults: one H100 in one direction with its network card of 400 Gb/s, and
# this machine, with the seconds in which one process wakes another.
OF_CLUSTERS: dict[str, Any] = {"only": None, "nvlink": 450e9, "nic": 50e9, "copy": 1.5e12, "latency": 30e-6, "node_gpus": 8}
OF_CLUSTERS |= {"data": None, "expert": None, "rollout_data": None}
OF_MACHINE: dict[str, Any] = {"model": None, "transport": "mapped", "rates": None, "hand_over": 1e-4, "cores": 2}
OF_MACHINE |= {"bucket_bytes": None, "bytes_per_weight": 2}
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
    """A model, the layouts of its trainer and of each of its engines, where the engines are, and bytes of a bucket."""

    model: str
    trainer: Layout
    rollout: RolloutLayout
    engines: int
    bucket_bytes: int = 256 << 20
    placement: str = "separate"

    @property
    def shape(self) -> ModelShape:
        return ModelShape.from_config(MODELS[self.model])

    def colocated(self) -> Case:
        """As many engines as the trainer's GPUs hold. Raises ValueError where they hold none."""
        engines = self.trainer.ranks // self.rollout.workers
        if not engines:
            raise ValueError(
                f"--rollout-tensor x --rollout-data = {self.rollout.workers} workers of an engine do not fit on the "
                f"{self.trainer.ranks} GPUs of the trainer"
            )
        return replace(self, engines=engines, placement="colocated")

    def source_nodes(self, cluster: Cluster) -> tuple[int, ...]:
        return tuple(rank // cluster.node_gpus for rank in range(self.trainer.ranks))

    def streams(self, plan: ReshardPlan, by_layer: bool = False) -> list[PieceStream]:
        """The streams to the workers of an engine."""
        settings = SyncSettings("bf16", self.rollout, 1, self.bucket_bytes, 0.0, transport="group", merges=by_layer)
        return [sync_stream(self.shape, plan, worker, settings) for worker in range(self.rollout.workers)]

    def readers(self, cluster: Cluster, streams: Sequence[PieceStream]) -> list[Reader]:
        """The workers of all engines, on one GPU after another, from the first node of the trainer or behind its last."""
        buckets = list(map(bucket_parts, streams))
        shared = self.placement == "colocated"
        first = 0 if shared else -(-self.trainer.ranks // cluster.node_gpus)
        readers = []
        for engine in range(self.engines):
            for worker in range(self.rollout.workers):
                gpu = engine * self.rollout.workers + worker
                node, server = first + gpu // cluster.node_gpus, gpu if shared else None
                readers.append(Reader(buckets[worker], node, engine, worker, server))
        return readers

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
    messages = [str(replace(violation, nearest=violation.nearest.partition(", or ")[0])) for violation in broken]
    try:
        check_layout(shape, rollout)
    except ValueError as error:
        messages.append(str(error).partition("; ")[0] + "; 1 always does")
    if messages:
        options = {"actor.layout.": "--", "rollout.tensor": "--rollout-tensor", "rollout.data": "--rollout-data"}
        raise ValueError(reduce(lambda text, names: text.replace(*names), options.items(), "\n".join(messages)))


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


def bucket_parts(stream: PieceStream) -> list[list[tuple[int, int]]]:
    """The source rank and the bytes of each part of each bucket."""
    return [[(part.source_rank, part.end - part.start) for part in parts] for parts in stream.parts]


def plan_cost(case: Case) -> tuple[float, int]:
    """(processor seconds, peak bytes) of the plan, its hash, the streams to an engine's workers and their rounds, which a
    trainer rank keeps as long as it lives; in a process of their own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_plan_cost, (case,))


def _plan_cost(case: Case) -> tuple[float, int]:
    began = time.process_time()
    plan = sync_plan(case.shape, case.trainer, case.rollout)
    assert plan.hash
    assert sync_rounds(plan, case.streams(plan), False)
    # Not the peak of getrusage: a new process has that of the process that started it.
    (peak,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return time.process_time() - began, int(peak) * 1024


@dataclass(frozen=True)
class Traffic:
    """Bytes: the most out of a rank's and into a worker's network card, and into a worker over NVLink; the most out of all
    ranks of a pipeline stage over their network cards."""

    out_of_rank: float
    into_worker: float
    near: float
    out_of_stage: float


def traffic(case: Case, cluster: Cluster, readers: Sequence[Reader]) -> Traffic:
    out, into, near = np.zeros(case.trainer.ranks), 0.0, 0.0
    nodes = np.array(cluster.source_nodes)
    for reader in readers:
        received = np.zeros(case.trainer.ranks)
        for rank, size in (part for bucket in reader.buckets for part in bucket):
            received[rank] += 0 if rank == reader.server else size
        from_node = nodes == reader.node
        out += np.where(from_node, 0, received)
        into, near = max(into, received[~from_node].sum()), max(near, received[from_node].sum())
    stages = out.reshape(case.trainer.pipeline, -1).sum(axis=1)
    return Traffic(*map(float, (out.max(), into, near, stages.max())))


def broadcast_seconds(case: Case, cluster: Cluster, model_bytes: float) -> tuple[float, float]:
    """(every worker takes the whole model, every node takes it once) of gather and broadcast."""
    stage_ranks = case.trainer.ranks // case.trainer.pipeline
    gather = model_bytes / case.trainer.pipeline / (cluster.nvlink if stage_ranks <= cluster.node_gpus else cluster.nic)
    everyone = model_bytes / cluster.nic
    once = max(model_bytes / cluster.nic / cluster.node_gpus, model_bytes / cluster.nvlink)
    return max(gather, everyone), max(gather, once)


def rate_case(case: Case, cluster: Cluster) -> dict[str, Any]:
    cluster = replace(cluster, source_nodes=case.source_nodes(cluster))
    plan = sync_plan(case.shape, case.trainer, case.rollout)
    boxes = vllm_columns(case.shape, case.rollout, lambda weight: not weight.fixed)
    shard = np.bincount(boxes.rank, boxes.sizes, case.rollout.workers)
    excess = np.bincount(plan.destination_rank, plan.sizes, case.rollout.workers) / shard
    streams, by_layer = case.streams(plan), case.streams(plan, by_layer=True)
    readers = case.readers(cluster, streams)
    moved = traffic(case, cluster, readers)
    stage_ranks = case.trainer.ranks // case.trainer.pipeline
    bound_workers = max(moved.into_worker / cluster.nic, moved.near / cluster.nvlink)
    bound_ranks = moved.out_of_stage / stage_ranks / cluster.nic
    seconds, peak = plan_cost(case)
    whole = vllm_columns(case.shape, RolloutLayout(), lambda weight: not weight.fixed)
    model_bytes = float(whole.sizes.sum()) * BYTES
    everyone, once = broadcast_seconds(case, cluster, model_bytes)
    return {
        "model": case.model,
        "placement": case.placement,
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
        "megarl": sync_seconds(readers, sync_rounds(plan, streams, False), cluster),
        "by_layer": sync_seconds(case.readers(cluster, by_layer), sync_rounds(plan, by_layer, True), cluster),
        "broadcast": everyone,
        "broadcast_a_node": once,
        "plan_seconds": seconds,
        "plan_peak_bytes": peak,
    }


def machine_readers(sync: Sync) -> tuple[list[Reader], list[Round]]:
    """The workers of a sync on this machine, and the rounds; mapped pieces stand for buckets."""
    plan, workers = sync_plan(sync.shape, sync.trainer, sync.rollout), sync.rollout.workers
    mapped, readers = sync.transport == "mapped", []
    streams = [sync_stream(sync.shape, plan, worker, sync.settings) for worker in range(workers)]
    for engine in range(sync.engines):
        for worker in range(workers):
            server = sync.servers[engine][worker] if sync.servers else None
            stream = streams[worker]
            pieces = [[part] for part in zip(stream.source.tolist(), stream.size.tolist(), strict=True)]
            readers.append(Reader(pieces if mapped else bucket_parts(stream), engine=engine, worker=worker, server=server))
    return readers, [] if mapped else sync_rounds(plan, streams, False)


def num_signals(readers: Sequence[Reader]) -> tuple[int, int]:
    """How many buckets travel, each with messages that start together, and how many a server hands over."""
    travel = sum(any(rank != reader.server for rank, _ in parts) for reader in readers for parts in reader.buckets)
    return travel, sum(len(reader.buckets) for reader in readers if reader.server is not None)


def predict(sync: Sync, timed: InTurns, machine: Machine) -> dict[str, float]:
    """Bytes and seconds of a sync on one machine, and the seconds of it that messages and hand-overs cost besides."""
    (readers, rounds), costs = machine_readers(sync), [0.0, 0.0]
    for transport, seconds in timed.simplest_s.items() if sync.transport != "mapped" else ():
        simplest, simplest_rounds = machine_readers(sync.simplest(transport))
        extra_s = max(0.0, seconds - sync_seconds(simplest, simplest_rounds, machine))
        kind = int(transport == "two_legs")
        costs[kind] = extra_s / num_signals(simplest)[kind]
    signals_s = sum(cost * count for cost, count in zip(costs, num_signals(readers), strict=True))
    num_bytes = float(sum(size for reader in readers for parts in reader.buckets for _, size in parts))
    return {"bytes": num_bytes, "signals": signals_s, "seconds": sync_seconds(readers, rounds, machine) + signals_s}


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
    columns = [
        "model",
        "placement",
        "trainer",
        "engines",
        "bytes",
        "GB out",
        "in",
        "NVLink",
        "bound: workers",
        "ranks",
        "megarl",
    ]
    for name in [*columns, "/ bound", "by layer", "broadcast", "a node", "plan s", "plan GB"]:
        table.add_column(name, justify="right")
    for row in rows:
        trainer, rollout, moved = row["trainer"], row["rollout"], row["link_bytes"]
        expert = " EP" if rollout["expert_parallel"] else ""
        table.add_row(
            row["model"],
            row["placement"],
            f"TP{trainer['tensor']} PP{trainer['pipeline']} DP{trainer['data']} EP{trainer['expert']}",
            f"{row['engines']} x TP{rollout['tensor']} DP{rollout['data']}{expert}",
            f"{row['most_share']:.2f}",
            *(f"{moved[name] / 1e9:.1f}" for name in ("out_of_rank", "into_worker", "near")),
            *(f"{row[name]:.3f}" for name in ("bound_workers", "bound_ranks", "megarl")),
            f"{row['megarl'] / row['bound']:.3f}",
            *(f"{row[name]:.2f}" for name in ("by_layer", "broadcast", "broadcast_a_node")),
            f"{row['plan_seconds']:.2f}",
            f"{row['plan_peak_bytes'] / 1e9:.2f}",
        )
    Console(width=200).print(table)


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
    kind = "cpu_two_legs" if arguments.transport == "two_legs" else "cpu"
    bucket_bytes = arguments.bucket_bytes or BUCKET_BYTES[kind]
    sync = Sync(shape, trainer, rollout, engines, arguments.transport, arguments.bytes_per_weight, bucket_bytes)
    # As `megarl.weight_sync.copies.num_threads` for this many cores.
    copy_threads = max(1, min(MOST_THREADS, arguments.cores // rollout.workers)) if sync.transport == "mapped" else 0
    given = arguments.rates is not None
    timed = InTurns(Rates(*arguments.rates), {}, math.nan) if given else measured_in_turns(sync)
    machine = Machine(arguments.cores, timed.rates, arguments.hand_over, copy_threads)
    predicted = predict(sync, timed, machine)
    gigabytes = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in timed.rates._asdict().items())
    print(
        f"weight_sync_scale: {predicted['bytes'] / 1e6:.1f} MB by {sync.transport} in {predicted['seconds']:.4f} s on "
        f"{arguments.cores} cores, {predicted['signals']:.4f} s of it for messages as such; GB/s of a thread: {gigabytes}"
    )
    if not given:
        predicted |= {"measured": timed.sync_s, "ratio": timed.sync_s / predicted["seconds"], **timed.rates._asdict()}
        print(
            f"weight_sync_scale: measured {timed.sync_s:.4f} s, {predicted['ratio']:.2f} x the prediction "
            f"(target 1.0 to {AT_MOST})"
        )
    if arguments.json is not None:
        save(arguments.json, {key: str(value) for key, value in vars(arguments).items()}, predicted)
    return 1 if arguments.check and not 1.0 <= predicted.get("ratio", 1.0) <= AT_MOST else 0


def positive(text: str) -> int:
    """Parse a whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def settle(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Give defaults to what this mode reads and the command line leaves out; end the program for what nothing would read."""
    defaults, others, how = (OF_MACHINE, OF_CLUSTERS, "with") if arguments.machine else (OF_CLUSTERS, OF_MACHINE, "without")
    unread = [f"--{name.replace('_', '-')}" for name in others if getattr(arguments, name) is not None]
    if unread:
        parser.error(f"{how} --machine nothing reads {', '.join(unread)}; leave it out")
    for name, default in defaults.items():
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
    parser.add_argument("--transport", choices=TRANSPORTS)
    parser.add_argument("--rates", type=float, nargs=5, metavar=("WRITE", "SEND", "RECEIVE", "PLACE", "COPY"))
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
        cases = [placed for case in cases for placed in (case, case.colocated())]
    except ValueError as error:
        parser.error(str(error))
    cluster = Cluster(arguments.node_gpus, arguments.nvlink, arguments.nic, arguments.copy, arguments.latency)
    rows = [rate_case(case, cluster) for case in cases]
    print_table(rows)
    misses = [(name, f"{row['model']}, {row['placement']}") for row in rows for name in missed(row)]
    for name, model in misses:
        print(f"target missed: {name} of {model}")
    if arguments.json is not None:
        save(arguments.json, asdict(cluster), {"models": rows})
    last = rows[-1]
    print(
        f"weight_sync_scale: {len(rows)} cases, {len(misses)} targets missed; megarl at most "
        f"{max(row['megarl'] / row['bound'] for row in rows):.3f} x the bound, {last['model']} in {last['megarl']:.2f} s "
        f"(gather and broadcast {last['broadcast']:.0f} s), its plan of {last['copies']} copies in "
        f"{last['plan_seconds']:.1f} s and {last['plan_peak_bytes'] / 1e9:.2f} GB"
    )
    return 1 if arguments.check and misses else 0


if __name__ == "__main__":
    sys.exit(main())
