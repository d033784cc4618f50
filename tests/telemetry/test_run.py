"""A run of two ranks that writes all that `telemetry` can ask for, fails in its last step, and goes on."""

from __future__ import annotations

import gzip
import json
import re
from unittest import mock

import pytest

from megarl.megatron.role import Role
from megarl.telemetry.disk import read_lines
from tests.ranks import run_ranks
from tests.runs import RUN_DEADLINE_S, _train, fake_rollouts, metrics_of, tiny_recipe, tiny_run, train_on_ranks
from tests.sink_cases import tensorboard_points

pytestmark = pytest.mark.slow
STEPS, PROFILED, SAMPLES, RANKS = 3, 2, 3, 2


def _fail_in_the_last_step(recipe):
    """Train until the update of the last step fails."""
    update, calls = Role.update, []

    def fail(self, *arguments):
        calls.append(1)
        if len(calls) == STEPS:
            raise RuntimeError("lost")
        return update(self, *arguments)

    with mock.patch.object(Role, "update", fail), pytest.raises(RuntimeError, match="lost"):
        _train(recipe, False)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The run's directory, after its second start."""
    folder = tmp_path_factory.mktemp("telemetry")
    tiny_run(folder, layers=2)
    replay = fake_rollouts(folder, STEPS)
    telemetry = {"sinks": [{"kind": "tensorboard"}], "samples_per_step": SAMPLES,
                 "profile": {"steps": [PROFILED], "ranks": [1]}}  # fmt: skip
    recipe = tiny_recipe(folder, "all", False, RANKS, 1, 1, STEPS, rollout__replay=str(replay), telemetry=telemetry,
                         run__checkpoint_every=1)  # fmt: skip
    run_ranks(_fail_in_the_last_step, RANKS, str(recipe), deadline_s=RUN_DEADLINE_S)
    train_on_ranks(recipe, resume=True)
    return folder / "runs" / "all"


def test_a_sink_has_every_step_of_both_starts_once(directory):
    """The other kinds of sinks: test_sinks.py."""
    lines = metrics_of(directory.parents[1], "all")
    assert [line["telemetry/sink_failures"] for line in lines] == [0] * STEPS
    expected = [(line["step"], pytest.approx(line["actor/grad_norm"], abs=1e-3)) for line in lines]
    assert len(expected) == STEPS
    assert tensorboard_points(directory / "tensorboard", "actor/grad_norm") == expected


def test_a_table_of_samples_is_written_for_each_step(directory):
    files = sorted((directory / "samples").iterdir())
    assert [file.name for file in files] == [f"step-{step:06d}.jsonl" for step in range(1, STEPS + 1)]
    rows = read_lines(files[-1])
    assert [(row["step"], row["sample"]) for row in rows] == [(STEPS, 0), (STEPS, 5), (STEPS, 10)]
    for row in rows:
        assert re.search(r"\d\+\d", row["prompt"]) and row["prompt_tokens"] == 4 and row["finish_reason"] == "stop"
        assert row["valid"] and row["reason"] is None and row["version"] == row["first_version"] == 0
        assert row["reward"] == row["parts"]["digits"] >= 0 and isinstance(row["advantage"], float)
        assert 1 <= row["completion_tokens"] <= 12
    assert len({row["group"] for row in rows}) == 3


def test_the_profile_of_a_step_shows_its_phases_on_the_rank_that_was_asked_for(directory):
    (file,) = (directory / "profile").iterdir()
    assert file.name == f"step-{PROFILED:06d}-rank-00001.json.gz"
    with gzip.open(file, "rt") as text:
        events = json.load(text)["traceEvents"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    names = {event["name"] for event in ranges}
    assert {"rollout", "reward", "plan", "advantage", "actor_update", "weight_sync", "forward", "backward"} <= names
    (update,) = [event for event in ranges if event["name"] == "actor_update"]
    inside = [event for event in events if event.get("cat") == "cpu_op" and event["name"] == "aten::mm"
              and update["ts"] <= event["ts"] <= update["ts"] + update["dur"]]  # fmt: skip
    assert inside, "the products of the update are shown in its range"
