"""The vLLM engine process dies in the middle of a run: the run finishes, or ends naming it and can be resumed."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megarl.cores import CHOSEN, NodeLoad, engine_cores, rank_cores
from tests.runs import figures, megarl, tiny_recipe, tiny_run

pytestmark = [pytest.mark.sync, pytest.mark.slow]
START_DEADLINE_S, END_DEADLINE_S = 240, 60
# Long completions: the run spends most of its time in rollouts.
LONG = {
    "data__max_prompt_tokens": 8,
    "rollout__max_new_tokens": 200,
    "phases__actor_update__micro_batch": {"max_tokens": 900},
}


def _poll(condition, deadline_s, what):
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} not within {deadline_s} s"
        time.sleep(0.2)
    return found


def _start(recipe):
    # As the user has it who has chosen no threads.
    environment = {name: value for name, value in os.environ.items() if name not in CHOSEN}
    return subprocess.Popen(
        [sys.executable, "-m", "megarl.cli", "train", str(recipe)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def _engine_cores(run):
    processes = psutil.Process(run.pid).children(recursive=True)
    return [process for process in processes if "EngineCore" in " ".join(process.cmdline() or [process.name()])]


def _assert_bound(run):
    """Two ranks with cores of their own, and an engine that takes turns with both of them, where there are two cores."""
    cores, load = sorted(os.sched_getaffinity(0)), NodeLoad(2, 1, (1,), take_turns=True)
    children = psutil.Process(run.pid).children(recursive=True)
    ranks = [one for one in children if "megarl.train" in one.cmdline() and one.ppid() == run.pid]
    assert sorted(one.cpu_affinity() for one in ranks) == [list(rank_cores(cores, load, rank)) or cores for rank in (0, 1)]
    for one in _engine_cores(run):
        assert one.cpu_affinity() == list(engine_cores(cores, load, 0))


def _kill_engine_after(run, folder, name, steps, look=lambda run: None):
    metrics = folder / "runs" / name / "metrics.jsonl"

    def ready():
        assert run.poll() is None, run.stdout.read()[-3000:]
        return metrics.is_file() and len(metrics.read_text().splitlines()) >= steps and _engine_cores(run)

    processes = _poll(ready, START_DEADLINE_S, f"step {steps} with a running engine")
    look(run)
    for process in processes:
        process.send_signal(signal.SIGKILL)


def test_a_killed_engine_is_started_again_and_without_restarts_left_the_run_names_it_and_resumes(tmp_path):
    tiny_run(tmp_path, "qwen3")
    steps = 6
    # The other tests take shared memory.
    changes = LONG | {"weight_sync": {"transport": "gloo", "wire": "delta"}}
    changes |= {"rollout__max_restarts": 1, "run__checkpoint_every": 1}
    recipe = tiny_recipe(tmp_path, "killed", False, 2, 1, 2, steps, **changes)
    run = _start(recipe)
    _kill_engine_after(run, tmp_path, "killed", 2, _assert_bound)
    _kill_engine_after(run, tmp_path, "killed", 4)
    output, _ = run.communicate(timeout=END_DEADLINE_S)
    assert run.returncode != 0
    assert "rollout engine 0" in output and "phase rollout" in output, output[-3000:]
    lines = figures(tmp_path, "killed")
    assert 4 <= len(lines) < steps
    assert max(line["rollout/num_restarts"] for line in lines) == 1, "it went on with a new engine before it ended"
    # What travels whole comes before the first step and to the new engine alone, unless the old one died in a sync.
    assert sum(line["sync/changed_share"] == 1 for line in lines) <= 1

    megarl("train", str(recipe), "--resume")
    lines = figures(tmp_path, "killed")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(line["mismatch/logprob_max"] <= 1e-4 for line in lines), "new engines have the synchronised weights"
    assert all(line["sync/received_bytes"] == line["sync/bound_bytes"] for line in lines)
