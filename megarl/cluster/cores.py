"""Assign the cores of a node to trainer ranks and engines, on CPUs. No torch.

Colocated engines take turns with the ranks, so ranks and engines each get all cores. Separate engines on a trainer's node
share the cores with the ranks. A worker of an engine gets as many neighbouring cores as a rank, in parts as even as
possible. With fewer cores than processes no process is bound, because the scheduler shares better. On GPUs no process is
bound either: the site knows which cores are near a device.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.planner.placement import EnginePlace
from megarl.recipe.recipe import Recipe

# The launcher sets this variable for the ranks if the user has not chosen threads.
BIND = "MEGARL_BIND_CORES"
# A user who sets one of these variables places the threads.
CHOSEN = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")


@dataclass(frozen=True)
class NodeLoad:
    """The processes of a node: `ranks` trainer ranks of `threads` threads, and engines of `workers` workers."""

    ranks: int
    threads: int
    workers: tuple[int, ...]
    take_turns: bool


def thread_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the variables that a launcher gives ranks with `threads` threads; none if the user has chosen threads."""
    if any(name in environment for name in CHOSEN):
        return {}
    # Without OMP_NUM_THREADS torchrun would set 1.
    return {"OMP_NUM_THREADS": str(threads), BIND: "1"}


def node_load(recipe: Recipe, places: Sequence[EnginePlace], node: int, ranks_per_node: int) -> NodeLoad:
    """Return the processes of a node, given the places of all engines."""
    ranks = ranks_per_node if node < recipe.trainer.ranks // ranks_per_node else 0
    workers = tuple(recipe.rollout.layout.workers for place in places if place.node == node)
    return NodeLoad(ranks, recipe.trainer.threads, workers, recipe.rollout.placement == "colocated")


def rank_cores(cores: Sequence[int], load: NodeLoad, local_rank: int) -> tuple[int, ...]:
    """Return the cores of a trainer rank; none if the rank is unbound or would have more threads than cores."""
    part = _parts(cores, load.ranks + (0 if load.take_turns else sum(load.workers)), local_rank, 1)
    return part if len(part) >= load.threads else ()


def engine_cores(cores: Sequence[int], load: NodeLoad, engine: int) -> tuple[int, ...]:
    """Return the cores of all workers of an engine, by the engine's number on the node; none if the engine is unbound."""
    num_ranks = 0 if load.take_turns else load.ranks
    first = num_ranks + sum(load.workers[:engine])
    return _parts(cores, num_ranks + sum(load.workers), first, load.workers[engine])


def _parts(cores: Sequence[int], num_parts: int, first: int, count: int) -> tuple[int, ...]:
    """Split the cores into even parts of neighbours; return `count` parts from `first` on, or none for too few cores."""
    if len(cores) < num_parts:
        return ()
    return tuple(cores[len(cores) * first // num_parts : len(cores) * (first + count) // num_parts])


def worker_threads(cores: Sequence[int], workers: int) -> int:
    """Return the threads of each worker of an engine. With more than two cores a worker leaves one core to its Python
    scheduler; with two cores both compute, because the scheduler mostly waits (`benchmarks/end_to_end.py`)."""
    cores_per_worker = len(cores) // workers
    return cores_per_worker - 1 if cores_per_worker > 2 else max(1, cores_per_worker)


def bind(cores: Iterable[int]) -> None:
    """Keep all threads of this process, and their later children, on these cores."""
    chosen = set(cores)
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), chosen)
