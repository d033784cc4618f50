"""How fast do new weights get from Megatron ranks into a real vLLM engine on this machine, and how fast by other methods?

    python benchmarks/weight_sync.py [--model DIRECTORY] [--rounds 7] [--bucket-bytes 4194304] [--json PATH] [--check]

By the transport `mapped`, for each model: one rank to an engine of one worker, and four ranks (tensor 2, pipeline 2) to an
engine of two tensor ranks, or two ranks (pipeline 2) to one worker where heads cannot be halved. Without --model:
SmolLM2-135M, and random weights of a Llama of 330 MB in bf16. The methods take turns, so that all see the same machine:

- megarl: the sync of a run. The engine stands still from pause to resume; the whole sync adds the time in which rank 0 asks
  the engine and hears from it. `transfer` is the time of the slowest worker until it has copied all bytes, without checksums
  and without vLLM's packing of what was written (`repack`, which every method needs). A worker has as many threads as its
  engine has cores for it, up to four, which copy, hash and pack at the same time; their seconds are divided by their number.
- memcpy: one thread copies the same bytes from tensor to tensor, into memory that was touched before.
- checkpoint: the usual method. Rank 0 gathers every tensor from all ranks, then every worker maps the whole model for vLLM's
  loader. The loader packs as it goes: its movement is everything but megarl's repack of that round, so it holds the packing
  that takes longer with one thread, and the packing of an embedding that nobody reads packed.
  For megarl and for checkpoint the second of two syncs counts: in a run plan, mapping and process groups exist already.
- disk: rank 0 gathers, writes a safetensors file, and the engine reloads its weights from the file.

Medians of the rounds; the first round warms up. Targets (--check: exit 1 when any is missed): from one rank to one worker,
transfer at least 0.7 times the rate of memcpy, and the whole sync at most 1.4 times transfer and repack; from several ranks,
megarl's movement (transfer) at least 5 times faster than checkpoint's (gather and transfer), and megarl's whole sync at
least 3 times faster than checkpoint's and 3.5 times faster than disk's.
"""

from __future__ import annotations

import argparse
import asyncio
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
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' models and rank processes

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from megarl.models import ModelShape  # noqa: E402
from megarl.models.layout import Layout, RolloutLayout  # noqa: E402
from megarl.models.megatron_weights import megatron_boxes  # noqa: E402
from megarl.models.model_files import copy_model_files  # noqa: E402
from megarl.recipe.recipe import Recipe  # noqa: E402
from megarl.weight_sync.manifest import SyncSettings  # noqa: E402
from megarl.weight_sync.publish import WeightSync  # noqa: E402
from tests.memory_cases import write_model  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.rollout_cases import checkpoint, cut, recipe  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 14, "hidden_size": 896, "intermediate_size": 2688, "vocab_size": 24000,
    "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
    "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
ALONE = "1 to 1"
# The trainer's layout, and the engine's workers.
CUTS = {ALONE: (Layout(), 1), "2 to 1": (Layout(pipeline=2), 1), "4 to 2": (Layout(tensor=2, pipeline=2), 2)}
DEADLINE_S = 900.0
Times = dict[str, float]


class Trainer:
    """A trainer rank with its shards, and on rank 0 an engine and the means to give it weights in three ways."""

    def __init__(self, model: str, layout: Layout, rollout: int, precision: str, bucket_bytes: int) -> None:
        self.rank, self.layout, self.dtype = int(os.environ["RANK"]), layout, DTYPES[precision]
        self.model = Path(model)
        self.shape = ModelShape.from_directory(model)
        self.boxes = megatron_boxes(self.shape, layout)
        shards = cut(self.boxes, checkpoint(self.model))
        self.shards = in_one_buffer(shards[self.rank], self.dtype)
        self.sizes = {rank: {name: tuple(shard.shape) for name, shard in held.items()} for rank, held in shards.items()}
        self.settings = SyncSettings(precision, RolloutLayout(tensor=rollout), 1, bucket_bytes, DEADLINE_S)
        self.version = 0
        self.pool: Any = None
        if self.rank == 0:
            # vLLM takes the last folder that it loaded from for its model's, so it stays until the end.
            self.folder = tempfile.mkdtemp()
            copy_model_files(self.model, self.folder)
            self.pool = self._open(rollout, precision)

    def _open(self, rollout: int, precision: str) -> Any:
        from megarl.rollout.pool import EnginePool

        base = recipe(self.model, tensor=rollout).model_dump()
        base["trainer"]["precision"] = precision
        pool = EnginePool(Recipe.model_validate(base), str(self.model), (1,), seed=0)
        pool.start()
        return pool

    def reshard(self) -> Times:
        """megarl's method."""
        group = None if self.layout.ranks == 1 else dist.group.WORLD
        metrics, _ = self._publish_twice(self.layout, self.settings, self.shards, group)
        names = ("total_s", "standstill_s", "transfer_s", "repack_s", "received_bytes", "bound_bytes")
        return {name: metrics[f"sync/{name}"] for name in names}

    def _publish_twice(
        self, layout: Layout, settings: SyncSettings, shards: dict[str, torch.Tensor], group: dist.ProcessGroup | None
    ) -> tuple[Times, float]:
        """Metrics and seconds of the second sync. Each method has a `WeightSync` of its own, with groups of its own, which
        workers leave when they hear of the next."""
        with contextlib.closing(WeightSync(self.shape, layout, settings, self.rank, group)) as sync:
            for _ in range(2):
                self.version += 1
                began = time.perf_counter()
                metrics = sync.publish(self.version, shards, self.pool)
        return metrics, time.perf_counter() - began

    def memcpy(self) -> Times:
        """Copy what all workers receive, on rank 0."""
        if self.rank:
            return {}
        sources = [shard for shard in self.everything().values()]
        targets = [torch.empty_like(source) for source in sources]
        for _ in range(2):  # the first touch of the targets is not measured
            began = time.perf_counter()
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
        num_bytes = sum(source.nbytes for source in sources)
        return {"bytes_per_s": num_bytes / (time.perf_counter() - began)}

    def everything(self) -> dict[str, torch.Tensor]:
        """Tensors as large as all of the model."""
        if not hasattr(self, "_everything"):
            self._everything = {name: tensor.to(self.dtype) for name, tensor in checkpoint(self.model).items()}
        return self._everything

    def checkpoint(self) -> Times:
        """Gather, then the whole model to every worker."""
        began = time.perf_counter()
        tensors = self._gather()
        gathered = time.perf_counter()
        if self.rank:
            self.version += 2
            return {}
        (shards,) = cut(megatron_boxes(self.shape, Layout()), tensors).values()
        shards = {name: shard.to(self.dtype) for name, shard in shards.items()}
        metrics, sync_s = self._publish_twice(Layout(), replace(self.settings, mode="checkpoint"), shards, None)
        gather_s = gathered - began
        return {"total_s": gather_s + sync_s, "transfer_s": gather_s + metrics["sync/transfer_s"]}

    def disk(self) -> Times:
        """Gather, write a file, have the engine read it."""
        began = time.perf_counter()
        tensors = self._gather()
        if self.pool is None:
            return {}
        save_file(tensors, f"{self.folder}/model.safetensors")
        self._reload(self.folder)
        total_s = time.perf_counter() - began
        os.sync()  # otherwise the system writes the file out while the next method is measured
        return {"total_s": total_s}

    def _reload(self, folder: str) -> None:
        import ray

        def reload(engine: Any) -> None:
            call = engine._engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            loop = engine._engine.output_handler.get_loop()  # of the actor; this function runs in another thread
            asyncio.run_coroutine_threadsafe(call, loop).result(DEADLINE_S)

        ray.get(self.pool.engines[0]._actor.__ray_call__.remote(reload), timeout=DEADLINE_S)

    def _gather(self) -> dict[str, torch.Tensor]:
        """On rank 0 every checkpoint tensor, from the shards of all ranks."""
        if self.rank:
            for name in sorted(self.shards):
                dist.send(self.shards[name], 0)
            return {}
        held = {0: self.shards}
        for rank in range(1, self.layout.ranks):
            held[rank] = {name: torch.empty(self.sizes[rank][name], dtype=self.dtype) for name in self.sizes[rank]}
            for name in sorted(held[rank]):
                dist.recv(held[rank][name], rank)
        ends: dict[str, tuple[int, int]] = {}
        for part in self.boxes:
            rows, columns = ends.get(part.name, (0, 0))
            ends[part.name] = (max(rows, part.row1), max(columns, part.col1))
        tensors = {name: torch.empty(size, dtype=self.dtype) for name, size in ends.items()}
        for part in self.boxes:
            rows, columns = part.row1 - part.row0, part.col1 - part.col0
            box = held[part.rank][part.parameter][part.local_row :, part.local_col :][:rows, :columns]
            tensors[part.name][part.row0 : part.row1, part.col0 : part.col1] = box
        shapes = {name: tensor.shape for name, tensor in self.everything().items()}
        return {name: tensor.view(shapes[name]) for name, tensor in tensors.items() if name in shapes}

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
            shutil.rmtree(self.folder)


def in_one_buffer(shards: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Local parameters one behind the other, as megatron-core's data parallelism holds them."""
    buffer = torch.empty(sum(shard.numel() for shard in shards.values()), dtype=dtype)
    parts = buffer.split([shard.numel() for shard in shards.values()])
    for part, shard in zip(parts, shards.values(), strict=True):
        part.view(shard.shape).copy_(shard)
    return {name: part.view(shard.shape) for part, (name, shard) in zip(parts, shards.items(), strict=True)}


def measure(
    model: str, layout: Layout, rollout: int, precision: str, bucket_bytes: int, rounds: int
) -> list[dict[str, Times]]:
    """On one rank: every round's times of each way; empty ones on ranks other than 0."""
    torch.set_num_threads(1)
    if layout.ranks > 1:
        dist.init_process_group("gloo")
    trainer = Trainer(model, layout, rollout, precision, bucket_bytes)
    ways = {"megarl": trainer.reshard, "memcpy": trainer.memcpy, "checkpoint": trainer.checkpoint, "disk": trainer.disk}
    measured = []
    try:
        for _ in range(rounds + 1):
            times = {}
            for name, way in ways.items():
                if layout.ranks > 1:
                    dist.barrier()
                times[name] = way()
            measured.append(times)
    finally:
        trainer.close()
    return measured[1:]


def medians(rounds: list[dict[str, Times]]) -> dict[str, Times]:
    for times in rounds:
        if times["checkpoint"]:
            times["checkpoint"]["transfer_s"] -= times["megarl"]["repack_s"]
    return {
        way: {key: statistics.median(times[way][key] for times in rounds) for key in rounds[0][way]} for way in rounds[0]
    }


def judge(case: str, times: dict[str, Times]) -> dict[str, tuple[float, float, bool]]:
    """Each target by its name: value, limit, and whether it is reached."""
    megarl, others = times["megarl"], times["checkpoint"]
    if case == ALONE:
        rate = megarl["received_bytes"] / megarl["transfer_s"] / times["memcpy"]["bytes_per_s"]
        whole = megarl["total_s"] / (megarl["transfer_s"] + megarl["repack_s"])
        return {
            "rate of transfer / rate of memcpy": (rate, 0.7, rate >= 0.7),
            "whole / (transfer + repack)": (whole, 1.4, whole <= 1.4),
        }
    ratios = {
        "checkpoint's movement / megarl's": (others["transfer_s"] / megarl["transfer_s"], 5.0),
        "checkpoint's whole / megarl's": (others["total_s"] / megarl["total_s"], 3.0),
        "disk's whole / megarl's": (times["disk"]["total_s"] / megarl["total_s"], 3.5),
    }
    return {name: (value, limit, value >= limit) for name, (value, limit) in ratios.items()}


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="milliseconds, medians")
    for column in ("model", "ranks to workers", "way", "movement", "repack", "pause to resume", "whole"):
        table.add_column(column, justify="left" if column in ("model", "way") else "right")
    for row in rows:
        for way, times in row["medians"].items():
            if way == "memcpy":
                shown = [f"{1e3 * row['medians']['megarl']['received_bytes'] / times['bytes_per_s']:.0f}"]
            else:
                keys = ("transfer_s", "repack_s", "standstill_s", "total_s")
                shown = [f"{1e3 * times[key]:.0f}" if key in times else "" for key in keys]
            table.add_row(row["model"], row["case"], way, *shown)
    console = Console(width=110)
    console.print(table)
    for row in rows:
        for name, (value, limit, reached) in row["targets"].items():
            console.print(
                f"{row['model']}, {row['case']}: {name} {value:.2f} (target {limit}) {'' if reached else 'MISSED'}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-bytes", type=int, default=4 << 20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    if arguments.model is None:
        write_model(LLAMA, folder / "llama-330MB")
        models = [ROOT / "models" / "SmolLM2-135M-Instruct", folder / "llama-330MB"]
    else:
        models = [arguments.model]
    rows: list[dict[str, Any]] = []
    for model in models:
        halved = ModelShape.from_directory(model).heads % 2 == 0  # SmolLM2 has 9 heads
        for case in (ALONE, "4 to 2" if halved else "2 to 1"):
            layout, rollout = CUTS[case]
            work = (str(model), layout, rollout, arguments.precision, arguments.bucket_bytes, arguments.rounds)
            times = medians(run_ranks(measure, layout.ranks, *work, deadline_s=2 * DEADLINE_S)[0])
            rows.append({"model": model.name, "case": case, "medians": times, "targets": judge(case, times)})
    shutil.rmtree(folder)
    show(rows)
    if arguments.json is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        device = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        config = {key: str(value) for key, value in vars(arguments).items() if key != "json"}  # a path of this machine
        arguments.json.write_text(json.dumps({"commit": commit, "device": device, "config": config, "rows": rows}, indent=2))
    missed = sum(not reached for row in rows for _, _, reached in row["targets"].values())
    print(f"weight sync: {sum(len(row['targets']) for row in rows)} targets, {missed} missed")
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
