"""Ranks and engines get their own cores, and stay on these cores."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megarl.cluster.cores import BIND, NodeLoad, engine_cores, node_load, rank_cores, thread_environment
from megarl.planner.placement import EnginePlace
from megarl.rollout import handle
from tests.planner.test_placement import of

# Cores, load, and the cores of each rank and of each engine; [] is not bound.
CASES: dict[str, tuple[range, NodeLoad, list[list[int]], list[list[int]]]] = {
    "a rank, and an engine that takes turns": (range(2), NodeLoad(1, 1, (1,), True), [[0, 1]], [[0, 1]]),
    "two ranks take turns with an engine": (range(2), NodeLoad(2, 1, (1,), True), [[0], [1]], [[0, 1]]),
    "two of each": (range(4), NodeLoad(2, 1, (1, 1), True), [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
    "only the granted cores": (range(8, 12), NodeLoad(2, 1, (1,), True), [[8, 9], [10, 11]], [[8, 9, 10, 11]]),
    "fewer cores than ranks": (range(2), NodeLoad(4, 1, (1,), True), [[]] * 4, [[0, 1]]),
    "fewer cores than workers": (range(2), NodeLoad(2, 1, (2, 1), True), [[0], [1]], [[], []]),
    "more threads than cores": (range(4), NodeLoad(2, 4, (1,), True), [[], []], [[0, 1, 2, 3]]),
    "as many threads as cores": (range(4), NodeLoad(2, 2, (1,), True), [[0, 1], [2, 3]], [[0, 1, 2, 3]]),
}


@pytest.mark.parametrize("name", CASES)
def test_cores_of_ranks_and_engines(name: str) -> None:
    cores, load, ranks, engines = CASES[name]
    assert [list(rank_cores(cores, load, rank)) for rank in range(load.ranks)] == ranks
    assert [list(engine_cores(cores, load, engine)) for engine in range(len(load.workers))] == engines


def test_separate_processes_share_no_core_and_have_even_parts() -> None:
    for num_cores in range(1, 20):
        for ranks in range(4):
            for workers in ((), (1,), (2, 1), (3, 3, 3)):
                load, num_parts = NodeLoad(ranks, 1, workers, take_turns=False), ranks + sum(workers)
                taken = [rank_cores(range(num_cores), load, rank) for rank in range(ranks)]
                taken += [engine_cores(range(num_cores), load, engine) for engine in range(len(workers))]
                flat = [core for part in taken for core in part]
                assert flat == (list(range(num_cores)) if num_cores >= num_parts > 0 else [])
                for part, size in zip(taken, [1] * ranks + list(workers), strict=True):
                    assert not flat or abs(len(part) - num_cores * size / num_parts) < 1


def test_the_load_of_a_node_follows_the_placement() -> None:
    places = (EnginePlace(2, (0, 1)), EnginePlace(3, (0, 1)), EnginePlace(2, (2, 3)))
    recipe = of(8, "separate", engines=3, tensor=2)
    assert node_load(recipe, places, 1, 4) == NodeLoad(4, 1, (), False)
    assert node_load(recipe, places, 2, 4) == NodeLoad(0, 1, (2, 2), False)
    assert node_load(of(2, engines=1), (EnginePlace(0, (0,)),), 0, 2) == NodeLoad(2, 1, (1,), True)


def test_the_users_choice_of_threads_stays() -> None:
    assert thread_environment({"HOME": "/"}, 3) == {"OMP_NUM_THREADS": "3", BIND: "1"}
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        assert thread_environment({name: "4"}, 3) == {}
    if handle.device_platform.kind != "cpu":
        pytest.skip("only vLLM for CPUs reads these variables")
    # Bound threads spin while they wait, as libgomp does by default; unbound threads might spin on a core that they wait
    # for.
    bound = handle.engine_environment(1, {"OMP_NUM_THREADS": "3", BIND: "1"})
    assert (bound["OMP_NUM_THREADS"], bound["VLLM_CPU_OMP_THREADS_BIND"]) == ("1", "nobind")
    assert bound["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1" and "OMP_WAIT_POLICY" not in bound
    chosen = {"OMP_NUM_THREADS": "3", "VLLM_CPU_OMP_THREADS_BIND": "0-2", "GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}
    assert handle.engine_environment(1, chosen).items() >= (chosen | {"OMP_WAIT_POLICY": "PASSIVE"}).items()
    chosen["OMP_WAIT_POLICY"] = "ACTIVE"
    assert handle.engine_environment(1, chosen).items() >= chosen.items()


def test_binding_covers_the_threads_and_children_of_a_process() -> None:
    """Bind another process, because the test process must keep its cores."""
    core = min(os.sched_getaffinity(0))
    code = f"""
import os, subprocess, threading
from pathlib import Path
from megarl.cluster.cores import bind
end = threading.Event()
threading.Thread(target=end.wait).start()
bind([{core}])
affinities = [os.sched_getaffinity(int(thread.name)) for thread in Path("/proc/self/task").iterdir()]
end.set()
child = subprocess.run(["python3", "-c", "import os; print(os.sched_getaffinity(0))"], capture_output=True, text=True)
assert affinities == [{{{core}}}] * 2 and child.stdout.strip() == "{{{core}}}", (affinities, child)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
