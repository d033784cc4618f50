"""The vLLM engine process dies in the middle of a run that plays episodes: the run goes on with a new engine, or ends naming
the engine and can be resumed."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cloudpickle
import pytest

from megarl.cluster.cores import BIND, NodeLoad, engine_cores, rank_cores
from megarl.trainer import Trainer
from tests.ranks import run_ranks
from tests.runs import RUN_DEADLINE_S, metrics_of, tiny_recipe, tiny_run, train_on_ranks
from tests.trainer.test_turns import CHANGES, check_run, evaluated, questions

pytestmark = [pytest.mark.sync, pytest.mark.slow]
STEPS, KILLS = 4, (2, 3)


def train_and_kill(recipe, note):
    """Kill the engine's process in the rollouts of two steps, as soon as it has its requests. `note` is a file for the cores
    that rank 0 and the engine are bound to."""
    from megarl.rollout.handle import EngineHandle
    from tests.runs import _train

    step, call, killed = Trainer.step, EngineHandle.call, []
    running = 0

    def noting_step(trainer, number):
        nonlocal running
        running = number
        return step(trainer, number)

    def call_and_kill(handle, method, *arguments, **options):
        reference = call(handle, method, *arguments, **options)
        if method == "sample" and running in KILLS and running not in killed:
            killed.append(running)
            engine = handle.process.pids[0][0]
            Path(note).write_text(json.dumps([sorted(os.sched_getaffinity(process)) for process in (0, engine)]))
            os.kill(engine, signal.SIGKILL)
        return reference

    os.environ[BIND] = "1"  # as `megarl train` has it
    with mock.patch.object(Trainer, "step", noting_step), mock.patch.object(EngineHandle, "call", call_and_kill):
        _train(recipe, False)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run with an environment whose engine was killed twice and may be started again once, and the changes
    of its recipe."""
    folder = tmp_path_factory.mktemp("killed")
    tiny_run(folder, "qwen3", layers=2)
    questions(folder)
    # The other tests take shared memory.
    changes = {"weight_sync": {"transport": "group", "wire": "delta"}, "rollout__max_restarts": 1}
    changes |= CHANGES | evaluated(folder)
    recipe = tiny_recipe(folder, "killed", False, 2, 1, 2, STEPS, **changes)
    with pytest.raises(AssertionError, match=r"rollout engine 0 died in phase rollout after 1 restarts"):
        run_ranks(train_and_kill, 2, str(recipe), str(folder / "cores"), deadline_s=RUN_DEADLINE_S)
    return folder, changes


def test_a_killed_engine_is_started_again_and_without_restarts_left_the_run_names_it(killed):
    first, second = metrics_of(killed[0], "killed")
    assert (first["rollout/num_restarts"], second["rollout/num_restarts"]) == (0, 1)
    assert "resync/count" not in first and second["resync/count"] == 1
    assert second["resync/received_bytes"] == second["resync/bound_bytes"] > 0
    assert {key for key in second if key.startswith("resync/")} - {"resync/count"} == {
        f"re{key}" for key in second if key.startswith("sync/") and key != "sync/version"
    }
    assert second["sync/changed_share"] < 1 == second["resync/changed_share"], "only a new engine takes all weights"
    _assert_synchronised([first, second])


def test_a_run_plays_episodes_and_trains_on_what_the_policy_said(killed):
    """Also in the step in which the engine died, and in evaluations."""
    assert len(metrics_of(killed[0], "killed")) == 2
    check_run(killed[0], "killed")


def test_one_update_a_batch_has_a_ratio_of_exactly_one(killed):
    for line in metrics_of(killed[0], "killed"):
        assert "schedule/actor_logprob/micro_batches" not in line
        assert line["actor/ratio_drift_max"] == line["actor/ratio_drift_mean"] == line["actor/ratio_drift_exceeded"] == 0


def test_a_rank_has_cores_of_its_own_and_an_engine_that_takes_turns_has_those_of_all_ranks(killed):
    cores, load = sorted(os.sched_getaffinity(0)), NodeLoad(2, 1, (1,), take_turns=True)
    expected = [list(rank_cores(cores, load, 0)) or cores, list(engine_cores(cores, load, 0)) or cores]
    assert json.loads((killed[0] / "cores").read_text()) == expected


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
                await self._alive().engine_core.call_utility_async("collective_rpc", cloudpickle.dumps(lose))
            return report

    with mock.patch.object(handle, "RolloutEngine", Forgetful):
        _train(recipe, False)


@pytest.mark.nightly  # in CI a canary finds this in engines without a run: tests/weight_sync/test_canary.py
@pytest.mark.parametrize("action", ["stop", "warn"])
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


@pytest.mark.nightly  # in CI a run is resumed with an engine in test_run.py
def test_a_run_whose_engine_died_too_often_is_resumed(killed):
    folder, changes = killed
    train_on_ranks(tiny_recipe(folder, "killed", False, 2, 1, 2, STEPS, **changes), resume=True)
    resumed = metrics_of(folder, "killed")
    assert [line["step"] for line in resumed] == list(range(1, STEPS + 1))
    _assert_synchronised(resumed)


def _assert_synchronised(lines):
    assert all(line["mismatch/logprob_max"] <= 1e-4 for line in lines), "new engines have the synchronised weights"
    assert all(line["sync/received_bytes"] == line["sync/bound_bytes"] for line in lines)


def test_syncs_to_engines_that_were_started_again_are_added_up():
    sync_metrics = iter([{"sync/sent_bytes": 5, "sync/total_s": 0.5, "sync/bytes_per_s": 10.0, "sync/mapped": 1.0},
                  {"sync/sent_bytes": 7, "sync/total_s": 0.25, "sync/bytes_per_s": 28.0, "sync/mapped": 0.0}])  # fmt: skip
    pipeline: Any = SimpleNamespace(version=3, restart_metrics={}, _publish=lambda version, engines: next(sync_metrics))
    assert Trainer.take_restart_metrics(pipeline) == {}
    for engine in (0, 1):
        Trainer._sync_restarted(pipeline, [engine])
    assert Trainer.take_restart_metrics(pipeline) == {
        "resync/count": 2, "resync/sent_bytes": 12, "resync/total_s": 0.75, "resync/bytes_per_s": 28.0, "resync/mapped": 0.0,
    }  # fmt: skip
    assert Trainer.take_restart_metrics(pipeline) == {}, "each sync is in one line"
