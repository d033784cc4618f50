"""Ranks and engines get their own cores, and stay on these cores."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

from megarl.cluster.cores import BIND, NodeLoad, engine_cores, node_load, rank_cores, thread_environment
from megarl.planner.placement import EnginePlace
from megarl.rollout import handle
from tests.planner.test_placement import of


@pytest.mark.parametrize("take_turns", [False, True])
def test_processes_that_work_at_the_same_time_have_even_parts_of_the_granted_cores(take_turns: bool) -> None:
    """With fewer cores than processes none is bound. An engine with several workers has as many parts."""
    for num_cores, ranks, workers in itertools.product(range(1, 20), range(4), ((), (1,), (2, 1), (3, 3, 3))):
        cores, load = range(8, 8 + num_cores), NodeLoad(ranks, 1, workers, take_turns)
        rank_parts = [(rank_cores(cores, load, rank), 1) for rank in range(ranks)]
        engine_parts = [(engine_cores(cores, load, engine), size) for engine, size in enumerate(workers)]
        for parts in [rank_parts, engine_parts] if take_turns else [rank_parts + engine_parts]:
            num_parts = sum(size for _, size in parts)
            taken = [core for part, _ in parts for core in part]
            assert taken == (list(cores) if num_cores >= num_parts > 0 else [])
            assert not taken or all(abs(len(part) - num_cores * size / num_parts) < 1 for part, size in parts)


def test_a_rank_with_more_threads_than_cores_is_not_bound() -> None:
    for threads, cores in ((2, (0, 1)), (3, ())):
        assert rank_cores(range(4), NodeLoad(2, threads, (1,), True), 0) == cores


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
