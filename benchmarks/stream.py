"""How much faster is a stream of rollouts than waiting for each batch? The trainer of a run, with engines by the clock.

    python benchmarks/stream.py [--only NAME] [--steps 8] [--slots 8] [--step-seconds 4] [--json PATH] [--check]

A cell trains a random model of two layers with Megatron on one rank, with the stream, router, admission, reward workers and
weight sync of a run. The engines are those of `clock_engines.py`: 8 of them with 8 slots each, for 64 groups of 8 a step.
Completions have log-normal lengths, mean 4,000, cut at 32,768 tokens; the trainer gets a token for 4,096 of them. A step's
completions at full slots take `--step-seconds`, as long as the longest completion does alone. (With more slots that takes
several steps, more than S = 2 allows it, and no stream can hide it.) The update ends when the clock says so: training takes
1/4, 1/2 or all of the time of generation. Weights go to the engines as adapters, which are small, at each step.

    generation  seconds at full slots: tokens of the groups that were taken, by slots and the time of a token
    / bound     mean seconds of a step over the larger one of generation and training; the first steps are not counted
    loop        processor time of the thread `rollout stream` for 512 completions, as a share of a second; median of steps
    late        seconds by which Megatron alone took longer than the training that the cell wants, at most
    load        processes that wanted to run in the last minute: with more than this machine has cores, repeat

Targets (with --check, exit 1 when one is missed):

1. S = 2: a step takes at most 1.10 of the larger one of generation and training, in each cell.
2. Training as long as generation: a step is at least 1.8 times faster with S = 2 than with S = 0.
3. Rank 0's loop takes under 5 % of one core at 512 completions a second, in the cell whose step takes one second.

4. S = 0: a step whose rewards are computed as completions arrive, and whose reference_logprob starts early, is at least 1.15
   times faster than behind a barrier after the last completion.

In the cells `barrier` rewards take a quarter of `--step-seconds` in all, and training three quarters, a third of which is
reference_logprob: it takes its time by the clock, too, on each part of the batch as much as the part has sequences.
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
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' models and recipes

from benchmarks.clock_engines import (  # noqa: E402
    LONGEST,
    TOKENS_EACH,
    ClockEngines,
    ClockHandle,
    lengths_of,
)
from megarl import build  # noqa: E402
from megarl.cluster.engine_nodes import set_stage  # noqa: E402
from megarl.cluster.ray_cluster import start_cluster, stop_cluster  # noqa: E402
from megarl.megatron.batch import Batch  # noqa: E402
from megarl.megatron.parallel import Place, start_control, start_parallel  # noqa: E402
from megarl.models.layout import Layout  # noqa: E402
from megarl.platform import current as device_platform  # noqa: E402
from megarl.recipe import Recipe, load_recipe  # noqa: E402
from megarl.recipe.sizes import with_engine_sizes  # noqa: E402
from megarl.reward.workers import RewardWorkers  # noqa: E402
from megarl.rollout import pool  # noqa: E402
from megarl.rollout.taken import Taken  # noqa: E402
from megarl.schedule import Plan  # noqa: E402
from megarl.telemetry.clock import PhaseClock, recording  # noqa: E402
from megarl.telemetry.run_directory import RunDirectory  # noqa: E402
from megarl.trainer import Trainer  # noqa: E402
from tests.ports import unused_port  # noqa: E402
from tests.runs import tiny_recipe, tiny_run  # noqa: E402

MOST_OF_BOUND, LEAST_GAIN, LEAST_EARLY_GAIN, MOST_OF_CORE = 1.10, 1.8, 1.15, 0.05
COMPLETIONS_A_SECOND = 512
REWARD_WORKERS = 2
FASTEST = "512 a second S=2"
STREAMED, BARRIER = "no barrier S=0", "barrier S=0"


@dataclass(frozen=True)
class Cell:
    """`training` and `rewards` are shares of the seconds of a step's generation: `step_s`, or `Sizes.step_s` for None.
    `reference` of them, a part of `training`, is reference_logprob. With `barrier` nothing is scored and no phase starts
    before the last completion is there."""

    name: str
    max_staleness: int
    training: float
    rewards: float = 0.0
    reference: float = 0.0
    barrier: bool = False
    step_s: float | None = None


CELLS = [
    *(Cell(f"{name} S={s}", s, share) for name, share in (("4:1", 0.25), ("2:1", 0.5), ("1:1", 1.0)) for s in (0, 2)),
    Cell(FASTEST, 2, 1.0, step_s=1.0),
    Cell(STREAMED, 0, 0.75, rewards=0.25, reference=0.25),
    Cell(BARRIER, 0, 0.75, rewards=0.25, reference=0.25, barrier=True),
]


@dataclass(frozen=True)
class Sizes:
    """What all cells share. `warmup` steps are not counted."""

    steps: int
    slots: int
    step_s: float
    warmup: int = 3
    engines: int = 8
    groups: int = 64
    members: int = 8

    @property
    def rows(self) -> int:
        return self.groups * (self.steps + self.warmup + 3)

    @property
    def token_s(self) -> float:
        """Seconds of a token, so that a mean step takes `step_s` at full slots."""
        tokens = sum(int(lengths_of(row, self.members).sum()) for row in range(self.rows))
        return self.step_s * self.slots * self.engines / (tokens / self.rows * self.groups)


class PacedTrainer(Trainer):
    """Ends each forward phase when it has taken its part of `reference_s`, and each update when training has taken the
    rest of `training_s`."""

    def __init__(self, *arguments: Any, training_s: float, reference_s: float) -> None:
        super().__init__(*arguments)
        self._update_s, self._reference_s, self._taken_at = training_s - reference_s, reference_s, 0.0
        self.tokens: list[int] = []  # of each step
        self.late_s: list[float] = []  # by which Megatron alone took longer

    def _batch(self, taken: Taken, *arguments: Any) -> Any:
        self._taken_at, members = time.monotonic(), self.recipe.algorithm.group_size
        groups = taken.rollouts.groups[::members].tolist()
        self.tokens.append(sum(int(lengths_of(group, members).sum()) for group in groups))
        return super()._batch(taken, *arguments)

    def _forward(self, plan: Plan, batch: Batch, name: str) -> Any:
        begun, result = time.monotonic(), super()._forward(plan, batch, name)
        if plan.phase == "reference_logprob":
            share_s = self._reference_s * len(batch.lengths) / self.recipe.num_sequences
            time.sleep(max(0.0, begun + share_s - time.monotonic()))
            self._taken_at = time.monotonic()  # when the update may begin
        return result

    def _update(self, *arguments: Any) -> Any:
        self._taken_at = max(self._taken_at, time.monotonic() if self._reference_s else 0.0)
        updated = super()._update(*arguments)
        left_s = self._taken_at + self._update_s - time.monotonic()
        self.late_s.append(max(0.0, -left_s))
        time.sleep(max(0.0, left_s))
        return updated


class RewardsBehindBarrier(RewardWorkers):
    """Scores nothing before the last completion of a step is there."""

    def _send(self) -> None:
        if self._training.sends_all:
            super()._send()


def write_recipe(folder: Path, cell: Cell, sizes: Sizes) -> Recipe:
    """Return the recipe of a cell, for the model of `tiny_run`."""
    sequences = sizes.groups * sizes.members
    micro_batch = {"micro_batch": {"max_tokens": 4096}}
    changes: dict[str, Any] = {
        "algorithm": {"advantage": "grpo", "group_size": sizes.members, "mismatch": {"correction": "truncate"}}
                     | ({"kl": {"place": "loss", "coefficient": 0.01, "estimator": "k3"}} if cell.reference else {}),
        "reward": [{"kind": "function", "target": "benchmarks.clock_engines:timed_reward"}],
        "actor__lora": {"rank": 1, "alpha": 1.0, "targets": ["qkv", "proj"], "send": "adapter"},
        "rollout": {"max_new_tokens": LONGEST // TOKENS_EACH, "engines": sizes.engines, "kv_cache_bytes": 16 << 20,
                    "max_staleness": cell.max_staleness, "timeout_s": 120},
        "weight_sync": {"in_flight": "keep" if cell.max_staleness else "wait", "canary": None},
        "phases": {"rollout": {"prompts": sizes.groups, "max_concurrent": sizes.slots},
                   # Where rewards take time, small tasks, so that both workers end together.
                   "reward": {"workers": REWARD_WORKERS} | ({"sequences": min(16, sequences)} if cell.rewards else {}),
                   "actor_update": {"mini_batch": sequences} | micro_batch}
                  | ({"actor_logprob": micro_batch} if cell.max_staleness else {})
                  | ({"reference_logprob": micro_batch | {"start": "whole" if cell.barrier else "early"}}
                     if cell.reference else {}),
    }  # fmt: skip
    each_s = cell.rewards * sizes.step_s * REWARD_WORKERS / sequences
    rows = [{"question": str(row), "answer": f"{each_s:.6f}"} for row in range(sizes.rows)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = cell.name.replace(" ", "-").replace(":", "-").replace("=", "")
    file = tiny_recipe(folder, name, False, 1, 1, 1, sizes.warmup + sizes.steps, **changes)
    return with_engine_sizes(load_recipe(file), device_platform.total_bytes)


@dataclass(frozen=True)
class Ranks:
    """The process groups of the only trainer rank, for all cells."""

    place: Place
    control: Any

    @classmethod
    def start(cls) -> Ranks:
        """Start them in this process."""
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(rank | {"MASTER_PORT": str(unused_port())})
        torch.set_num_threads(1)
        device_platform.start_process_group(0, 120.0)
        control = start_control(600.0)
        [place] = start_parallel([Layout()], 1, 120.0, 0).values()
        return cls(place, control)


def loop_clock() -> float:
    """Return the processor time of the stream's thread so far."""
    [thread] = [thread for thread in threading.enumerate() if thread.name == "rollout stream"]
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def run_cell(cell: Cell, sizes: Sizes, folder: Path, engines: Any, ranks: Ranks) -> dict[str, Any]:
    """Train, and return the figures of the counted steps."""
    sizes = sizes if cell.step_s is None else replace(sizes, step_s=cell.step_s)
    if not cell.max_staleness:  # each step is like the first, and takes long
        sizes = replace(sizes, warmup=1, steps=-(-sizes.steps // 2))
    recipe = write_recipe(folder, cell, sizes)
    training_s, clock = cell.training * sizes.step_s, PhaseClock()
    handle = partial(ClockHandle, engines=engines, token_s=sizes.token_s)
    with ExitStack() as stack:
        stack.enter_context(recording(clock))
        stack.enter_context(mock.patch.object(pool, "EngineHandle", handle))
        if cell.barrier:
            stack.enter_context(mock.patch.object(build, "RewardWorkers", RewardsBehindBarrier))
        places = dict.fromkeys(recipe.layouts, ranks.place)
        stage = set_stage(recipe, os.environ)
        parts = build.build_parts(recipe, places, ranks.control, RunDirectory.of(recipe), stage, stack)
        reference_s = cell.reference * sizes.step_s
        trainer = PacedTrainer(recipe, 0, parts, clock, training_s=training_s, reference_s=reference_s)
        trainer.sync(0)
        seconds, loop_seconds, metrics = [], [], []
        for number in range(1, sizes.warmup + sizes.steps + 1):
            begun, loop_begun = time.monotonic(), loop_clock()
            metrics.append(trainer.step(number))
            seconds.append(time.monotonic() - begun)
            loop_seconds.append(loop_clock() - loop_begun)
    counted = slice(sizes.warmup, None)
    generation_s = statistics.mean(trainer.tokens[counted]) * sizes.token_s / (sizes.slots * sizes.engines)
    step_s, completions = statistics.mean(seconds[counted]), sizes.groups * sizes.members
    return asdict(cell) | {
        "step_s": step_s,
        "seconds": seconds,
        "generation_s": generation_s,
        "training_s": training_s,
        "of_bound": step_s / max(generation_s, training_s),
        "loop_share": statistics.median(loop_seconds[counted]) / completions * COMPLETIONS_A_SECOND,
        "sync_s": statistics.mean(line["sync/total_s"] for line in metrics[counted]),
        "late_s": max(trainer.late_s),
        "load": os.getloadavg()[0],
    }


def run_cells(cells: Sequence[Cell], sizes: Sizes) -> list[dict[str, Any]]:
    """Return the row of each cell."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_run(folder, layers=2)
        ranks = Ranks.start()
        start_cluster()
        try:
            remote = ray.remote(ClockEngines).options(
                num_cpus=0, max_concurrency=100_000, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}}
            )
            engines = remote.remote()
            return [run_cell(cell, sizes, folder, engines, ranks) for cell in cells]
        finally:
            stop_cluster()
            torch.distributed.destroy_process_group()


def is_judged(row: dict[str, Any]) -> bool:
    """Return whether a cell has target 1: at one second a step, the costs of two cores would count too much."""
    return bool(row["max_staleness"] >= 2 and row["name"] != FASTEST)


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the targets that the rows miss, each with its value."""
    by_name = {row["name"]: row for row in rows}
    texts = []
    for row in filter(is_judged, rows):
        if row["of_bound"] > MOST_OF_BOUND:
            texts.append(f"1: {row['name']} takes {row['of_bound']:.2f} of the bound")
    if (fastest := by_name.get(FASTEST)) is not None and fastest["loop_share"] >= MOST_OF_CORE:
        texts.append(f"3: the loop takes {fastest['loop_share']:.1%} of a core")
    if (gain := ratio(by_name, "1:1 S=0", "1:1 S=2")) is not None and gain < LEAST_GAIN:
        texts.append(f"2: S = 2 is {gain:.2f} times faster")
    if (gain := ratio(by_name, BARRIER, STREAMED)) is not None and gain < LEAST_EARLY_GAIN:
        texts.append(f"4: no barrier is {gain:.2f} times faster")
    return texts


def ratio(by_name: dict[str, dict[str, Any]], slow: str, fast: str) -> float | None:
    """Return how many times faster a cell is; None without both cells."""
    return by_name[slow]["step_s"] / by_name[fast]["step_s"] if {slow, fast} <= by_name.keys() else None


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each cell."""
    table = Table(title="seconds of a step", title_justify="left")
    for column in ("cell", "step", "generation", "training", "/ bound", "loop", "sync", "late", "load"):
        table.add_column(column, justify="left" if column == "cell" else "right")
    for row in rows:
        seconds = (f"{row[key]:.2f}" for key in ("step_s", "generation_s", "training_s", "of_bound"))
        table.add_row(row["name"], *seconds, f"{row['loop_share']:.1%}", f"{row['sync_s']:.2f}", f"{row['late_s']:.2f}",
                      f"{row['load']:.1f}")  # fmt: skip
    Console(width=110).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cells whose name holds this")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--slots", type=int, default=8, help="of an engine")
    parser.add_argument("--step-seconds", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    cells = [cell for cell in CELLS if arguments.only is None or arguments.only in cell.name]
    if not cells:
        parser.error(f"--only {arguments.only}: no such cell; the cells are {', '.join(cell.name for cell in CELLS)}")
    sizes = Sizes(arguments.steps, arguments.slots, arguments.step_seconds)
    rows = run_cells(cells, sizes)
    print_table(rows)
    misses = missed(rows)
    for text in misses:
        print(f"target {text}")
    if arguments.json is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        device = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        content = {"commit": commit, "device": device, "config": asdict(sizes), "cells": rows}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    by_name = {row["name"]: row for row in rows}
    gains = [
        f"{what} {gain:.2f} times faster"
        for what, slow, fast in (
            ("S = 2 against S = 0 at 1:1", "1:1 S=0", "1:1 S=2"),
            ("early phases and rewards against a barrier at S = 0", BARRIER, STREAMED),
        )
        if (gain := ratio(by_name, slow, fast)) is not None
    ]
    worst = max((row["of_bound"] for row in filter(is_judged, rows)), default=None)
    parts = [f"{len(rows)} cells, {len(misses)} targets missed", *gains]
    parts += [] if worst is None else [f"S = 2 at most {worst:.2f} of the bound"]
    print(f"stream: {'; '.join(parts)}")
    return 1 if arguments.check and misses else 0


if __name__ == "__main__":
    sys.exit(main())
