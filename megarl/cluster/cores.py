"""Which cores of a node every trainer rank and every engine gets, on CPUs. No torch.

Ranks and colocated engines take turns, so that each side is dealt all cores; separate engines on a trainer's node work
beside the ranks, and both are dealt the cores together. A worker of an engine is dealt as many as a rank. Parts are of
neighbours, as even as they can be. Where there are fewer cores than processes to deal them to nobody is bound: the scheduler
shares better then. On GPUs nobody is bound either: which cores are near a device, the site knows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.planner.placement import EnginePlace
from megarl.recipe.recipe import Recipe

# The launcher says to ranks that nobody has chosen threads for them.
BIND = "MEGARL_BIND_CORES"
# Whoever sets one of them wants to place threads himself.
CHOSEN = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")


@dataclass(frozen=True)
class NodeLoad:
    """What a node runs: `ranks` trainer ranks of `threads` threads each, and engines with so many `workers` each."""

    ranks: int
    threads: int
    workers: tuple[int, ...]
    take_turns: bool


def thread_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """What a launcher adds to the environment of ranks that have so many threads: nothing where the user has chosen."""
    if any(name in environment for name in CHOSEN):
        return {}
    # Without the first torchrun would say 1, silently.
    return {"OMP_NUM_THREADS": str(threads), BIND: "1"}


def node_load(recipe: Recipe, places: Sequence[EnginePlace], node: int, ranks_per_node: int) -> NodeLoad:
    """What a node of a job runs, from the places of all engines."""
    ranks = ranks_per_node if node < recipe.trainer.ranks // ranks_per_node else 0
    workers = tuple(recipe.rollout.layout.workers for place in places if place.node == node)
    return NodeLoad(ranks, recipe.trainer.threads, workers, recipe.rollout.placement == "colocated")


def rank_cores(cores: Sequence[int], load: NodeLoad, local_rank: int) -> tuple[int, ...]:
    """Those of a node's `cores` that a trainer rank of it runs on; none where it is not bound, as where it has more threads
    than it would have cores."""
    parts = _dealt(cores, load.ranks + (0 if load.take_turns else sum(load.workers)))
    own = parts[local_rank] if parts else ()
    return own if len(own) >= load.threads else ()


def engine_cores(cores: Sequence[int], load: NodeLoad, engine: int) -> tuple[int, ...]:
    """Those of a node's `cores` that all workers of an engine of it run on, by its number on the node; none where it is not
    bound."""
    before = (0 if load.take_turns else load.ranks) + sum(load.workers[:engine])
    parts = _dealt(cores, (0 if load.take_turns else load.ranks) + sum(load.workers))
    return tuple(core for part in parts[before : before + load.workers[engine]] for core in part)


def worker_threads(cores: Sequence[int], workers: int) -> int:
    """Threads of each worker of an engine on its cores. Where a worker has more than two, one is left to what schedules its
    work, in Python; of two both compute, as scheduling waits for them most of the time (`benchmarks/end_to_end.py`)."""
    own = len(cores) // workers
    return own - 1 if own > 2 else max(1, own)


def bind(cores: Iterable[int]) -> None:
    """Have all threads of this process, and all that they start from here on, run on these cores alone."""
    chosen = set(cores)
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), chosen)
        except ProcessLookupError:  # it has ended since
            continue


def _dealt(cores: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Neighbours dealt to so many parts; nothing where there are too few."""
    if len(cores) < parts:
        return []
    return [tuple(cores[len(cores) * part // parts : len(cores) * (part + 1) // parts]) for part in range(parts)]
