"""Ranks and engines get cores of their own by the rule, and are really kept to them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megarl.cluster.cores import BIND, NodeLoad, engine_cores, node_load, rank_cores, thread_environment
from megarl.planner.placement import EnginePlace
from megarl.rollout import handle
from tests.planner.test_placement import of

# Cores, what runs there, and the cores of each rank and of each engine; () is not bound.
DEALT: dict[str, tuple[range, NodeLoad, list[list[int]], list[list[int]]]] = {
    "a rank, and an engine that takes turns": (range(2), NodeLoad(1, 1, (1,), True), [[0, 1]], [[0, 1]]),
    "two ranks take turns with an engine": (range(2), NodeLoad(2, 1, (1,), True), [[0], [1]], [[0, 1]]),
    "two of each": (range(4), NodeLoad(2, 1, (1, 1), True), [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
    "beside each other": (range(4), NodeLoad(2, 1, (1, 1), False), [[0], [1]], [[2], [3]]),
    "by workers": (range(8), NodeLoad(1, 1, (2, 1), False), [[0, 1]], [[2, 3, 4, 5], [6, 7]]),
    "what does not divide": (range(5), NodeLoad(2, 1, (), False), [[0, 1], [2, 3, 4]], []),
    "no ranks": (range(4), NodeLoad(0, 1, (1, 1), False), [], [[0, 1], [2, 3]]),
    "the cores that were granted": (range(8, 12), NodeLoad(2, 1, (1,), True), [[8, 9], [10, 11]], [[8, 9, 10, 11]]),
    "fewer cores than ranks": (range(2), NodeLoad(4, 1, (1,), True), [[]] * 4, [[0, 1]]),
    "fewer cores than workers": (range(2), NodeLoad(2, 1, (2, 1), True), [[0], [1]], [[], []]),
    "fewer cores than both together": (range(2), NodeLoad(2, 1, (1,), False), [[], []], [[]]),
    "more threads than cores": (range(4), NodeLoad(2, 4, (1,), True), [[], []], [[0, 1, 2, 3]]),
    "as many threads as cores": (range(4), NodeLoad(2, 2, (1,), True), [[0, 1], [2, 3]], [[0, 1, 2, 3]]),
}


@pytest.mark.parametrize("name", DEALT)
def test_cores_are_dealt(name: str) -> None:
    cores, load, ranks, engines = DEALT[name]
    assert [list(rank_cores(cores, load, rank)) for rank in range(load.ranks)] == ranks
    assert [list(engine_cores(cores, load, engine)) for engine in range(len(load.workers))] == engines


def test_nobody_beside_another_shares_a_core() -> None:
    for num_cores in range(1, 20):
        for ranks in range(4):
            for workers in ((1,), (2, 1), (3, 3, 3)):
                load = NodeLoad(ranks, 1, workers, take_turns=False)
                taken = [rank_cores(range(num_cores), load, rank) for rank in range(ranks)]
                taken += [engine_cores(range(num_cores), load, engine) for engine in range(len(workers))]
                flat = [core for part in taken for core in part]
                assert flat == (list(range(num_cores)) if num_cores >= ranks + sum(workers) else [])


def test_the_load_of_a_node_is_what_was_placed_there() -> None:
    places = (EnginePlace(2, (0, 1)), EnginePlace(3, (0, 1)), EnginePlace(2, (2, 3)))
    recipe = of(8, "separate", engines=3, tensor=2)
    assert node_load(recipe, places, 1, 4) == NodeLoad(4, 1, (), False)
    assert node_load(recipe, places, 2, 4) == NodeLoad(0, 1, (2, 2), False)
    assert node_load(of(2, engines=1), (EnginePlace(0, (0,)),), 0, 2) == NodeLoad(2, 1, (1,), True)


def test_what_the_user_has_chosen_stays() -> None:
    assert thread_environment({"HOME": "/"}, 3) == {"OMP_NUM_THREADS": "3", BIND: "1"}
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        assert thread_environment({name: "4"}, 3) == {}
    if handle.device_platform.kind != "cpu":
        pytest.skip("vLLM for CPUs alone reads them")
    bound = handle.engine_environment(1, {"OMP_NUM_THREADS": "3", BIND: "1"})
    assert (bound["OMP_NUM_THREADS"], bound["VLLM_CPU_OMP_THREADS_BIND"]) == ("1", "nobind")
    chosen = handle.engine_environment(1, {"OMP_NUM_THREADS": "3", "VLLM_CPU_OMP_THREADS_BIND": "0-2"})
    assert (chosen["OMP_NUM_THREADS"], chosen["VLLM_CPU_OMP_THREADS_BIND"]) == ("3", "0-2")
    # Threads on cores of their own wait for each other in a loop, as libgomp has it; others might wait for their own core.
    assert "OMP_WAIT_POLICY" not in bound and chosen["OMP_WAIT_POLICY"] == "PASSIVE"
    assert handle.engine_environment(1, {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"
    assert bound["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    local = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}
    assert handle.engine_environment(1, local)["GLIBC_TUNABLES"] == local["GLIBC_TUNABLES"]


def test_a_process_is_bound_with_the_threads_that_it_has_and_what_it_starts() -> None:
    """In a process of its own: this one is to keep its cores."""
    core = min(os.sched_getaffinity(0))
    code = f"""
import os, subprocess, threading
from pathlib import Path
from megarl.cluster.cores import bind
end = threading.Event()
threading.Thread(target=end.wait).start()
bind([{core}])
found = [os.sched_getaffinity(int(thread.name)) for thread in Path("/proc/self/task").iterdir()]
end.set()
child = subprocess.run(["python3", "-c", "import os; print(os.sched_getaffinity(0))"], capture_output=True, text=True)
assert len(found) == 2 and found == [{{{core}}}] * 2 and child.stdout.strip() == "{{{core}}}", (found, child)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
