"""The vLLM engine process dies in the middle of a run: the run finishes, or ends naming it and can be resumed."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cloudpickle
import psutil
import pytest

from megarl.cluster.cores import CHOSEN, NodeLoad, engine_cores, rank_cores
from megarl.trainer import Trainer
from tests.ranks import run_ranks
from tests.runs import RUN_DEADLINE_S, metrics_of, tiny_recipe, tiny_run, train_on_ranks

pytestmark = [pytest.mark.sync, pytest.mark.slow]
START_DEADLINE_S, END_DEADLINE_S = 420, 180
MOST_STEPS = 40  # it never comes so far, however late it is that this process sees a step
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


def _processes(run, word):
    """Those below the command whose own commands have this in them."""
    found = []
    for process in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            if word in " ".join(process.cmdline() or [process.name()]):
                found.append(process)
    return found


def _engine_cores(run):
    return _processes(run, "EngineCore")


def _assert_bound(run):
    """Two ranks with cores of their own, and an engine that takes turns with both of them, where there are two cores."""
    cores, load = sorted(os.sched_getaffinity(0)), NodeLoad(2, 1, (1,), take_turns=True)
    ranks = [one for one in _processes(run, "megarl") if one.ppid() == run.pid]
    assert sorted(one.cpu_affinity() for one in ranks) == [list(rank_cores(cores, load, rank)) or cores for rank in (0, 1)]
    for one in _engine_cores(run):
        assert one.cpu_affinity() == list(engine_cores(cores, load, 0))


def _kill_engine_after(run, folder, name, restarts, steps, look=lambda run: None):
    """After so many steps that engines with so many restarts took part in."""
    metrics = folder / "runs" / name / "metrics.jsonl"

    def ready():
        assert run.poll() is None, run.stdout.read()[-3000:]
        lines = metrics.read_text().splitlines(keepends=True) if metrics.is_file() else []
        done = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be under way
        return sum(line["rollout/num_restarts"] == restarts for line in done) >= steps and _engine_cores(run)

    processes = _poll(ready, START_DEADLINE_S, f"step {steps} after {restarts} restarts with a running engine")
    look(run)
    for process in processes:
        process.send_signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run whose engine was killed twice, the changes of its recipe, what it said, and its figures."""
    folder = tmp_path_factory.mktemp("killed")
    tiny_run(folder, "qwen3")
    # The other tests take shared memory.
    changes = LONG | {"weight_sync": {"transport": "gloo", "wire": "delta"}}
    changes |= {"rollout__max_restarts": 1, "run__checkpoint_every": 1}
    run = _start(tiny_recipe(folder, "killed", False, 2, 1, 2, MOST_STEPS, **changes))
    try:
        _kill_engine_after(run, folder, "killed", restarts=0, steps=2, look=_assert_bound)
        _kill_engine_after(run, folder, "killed", restarts=1, steps=1)
        output, _ = run.communicate(timeout=END_DEADLINE_S)
    finally:
        run.terminate()
    assert run.returncode != 0
    return folder, changes, output, metrics_of(folder, "killed")


def test_a_killed_engine_is_started_again_and_without_restarts_left_the_run_names_it(killed):
    _, _, output, lines = killed
    # In a rollout, as a rule, which is most of a step.
    assert re.search(r"rollout engine 0 died in phase (rollout|weight_sync) after 1 restarts", output), output[-3000:]
    assert 3 <= len(lines) < MOST_STEPS
    assert max(line["rollout/num_restarts"] for line in lines) == 1, "it went on with a new engine before it ended"
    # In a sync it is served again by that same sync.
    (phase,) = re.findall(r"rollout engine 0 is lost in phase (\w+) and started again", output)
    again = [line for line in lines if "resync/count" in line]
    assert [line["resync/count"] for line in again] == [1] * (phase == "rollout")
    for line in again:
        assert line["resync/received_bytes"] == line["resync/bound_bytes"] > 0
        assert {key for key in line if key.startswith("resync/")} - {"resync/count"} == {
            f"re{key}" for key in line if key.startswith("sync/") and key != "sync/version"
        }
    # What travels whole comes before the first step and to the new engine alone, unless the old one died in a sync.
    assert sum(line["sync/changed_share"] == 1 for line in lines) <= 1
    _assert_synchronised(lines)


BROKEN_VERSION = 2


def train_with_an_engine_that_loses_a_buffer(recipe):
    """Its table of rotary angles is zero after it took that version, as after a sleep that dropped it."""
    from megarl.rollout import handle
    from tests.runs import _train

    def lose(worker):
        for module in worker.model_runner.get_model().modules():
            if hasattr(module, "rotary_emb"):
                module.rotary_emb.cos_sin_cache.zero_()

    class Forgetful(handle.RolloutEngine):
        async def receive(self, manifest_values):
            report = await super().receive(manifest_values)
            if manifest_values["version"] == BROKEN_VERSION:
                await self._engine.engine_core.call_utility_async("collective_rpc", cloudpickle.dumps(lose))
            return report

    with mock.patch.object(handle, "RolloutEngine", Forgetful):
        _train(recipe, False)


@pytest.mark.parametrize("action", ["stop", pytest.param("warn", marks=pytest.mark.nightly)])
def test_a_run_stops_before_it_samples_from_an_engine_that_lost_a_buffer(tmp_path, action):
    tiny_run(tmp_path, "qwen3")
    recipe = tiny_recipe(tmp_path, "drift", False, 2, 1, 2, 3, weight_sync__canary={"action": action})
    if action == "stop":
        drift = (
            rf"SyncError: weight_sync.canary: rollout engine 0 does not .* version {BROKEN_VERSION}: .* sequence \d, token"
        )
        with pytest.raises(AssertionError, match=drift):
            run_ranks(train_with_an_engine_that_loses_a_buffer, 2, str(recipe), deadline_s=RUN_DEADLINE_S)
    else:
        run_ranks(train_with_an_engine_that_loses_a_buffer, 2, str(recipe), deadline_s=RUN_DEADLINE_S)
    drifts = [line["sync/canary_drift"] for line in metrics_of(tmp_path, "drift")]
    assert drifts == [0.0] if action == "stop" else [0.0, 1.0, 1.0]


def test_syncs_to_engines_that_were_started_again_are_added_up():
    found = iter([{"sync/sent_bytes": 5, "sync/total_s": 0.5, "sync/bytes_per_s": 10.0, "sync/in_place": 1.0},
                  {"sync/sent_bytes": 7, "sync/total_s": 0.25, "sync/bytes_per_s": 28.0, "sync/in_place": 0.0}])  # fmt: skip
    pipeline: Any = SimpleNamespace(version=3, restart_metrics={}, _publish=lambda version, engines: next(found))
    assert Trainer.take_restart_metrics(pipeline) == {}
    for engine in (0, 1):
        Trainer._sync_restarted(pipeline, [engine])
    assert Trainer.take_restart_metrics(pipeline) == {
        "resync/count": 2,
        "resync/sent_bytes": 12,
        "resync/total_s": 0.75,
        "resync/bytes_per_s": 28.0,
        "resync/in_place": 0.0,
    }
    assert Trainer.take_restart_metrics(pipeline) == {}, "each sync is in one line"


@pytest.mark.nightly  # in CI what is resumed with an engine was preempted, test_launch_slurm_run.py
def test_a_run_whose_engine_died_too_often_is_resumed(killed):
    folder, changes, _, lines = killed
    steps = len(lines) + 2
    train_on_ranks(tiny_recipe(folder, "killed", False, 2, 1, 2, steps, **changes), resume=True)
    resumed = metrics_of(folder, "killed")
    assert [line["step"] for line in resumed] == list(range(1, steps + 1))
    _assert_synchronised(resumed)


def _assert_synchronised(lines):
    assert all(line["mismatch/logprob_max"] <= 1e-4 for line in lines), "new engines have the synchronised weights"
    assert all(line["sync/received_bytes"] == line["sync/bound_bytes"] for line in lines)
