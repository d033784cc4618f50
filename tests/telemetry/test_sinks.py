"""Sinks get each step once, never delay a step, and never end a run."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from megarl.recipe import Recipe, RecipeError, parse_recipe
from megarl.recipe.device_section import with_gpus, without_gpus
from megarl.telemetry import sinks as module
from megarl.telemetry.exit_status import COMPLETE, FAILED, REQUEUE, Preempted
from megarl.telemetry.sinks import Memory, Relay, Sinks, open_sinks
from tests.recipe_cases import edited, make_folder
from tests.sink_cases import (
    mlflow_client,
    mlflow_points,
    sample_row,
    tensorboard_points,
    wait_for,
    wait_for_wandb,
    wandb_points,
    wandb_records,
)


class Kept:
    """A sink that keeps its calls in `given`, waits for `gate`, and fails at the steps `fails`."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        self.given: list[Any] = []
        self.fails, self.gate = fails, threading.Event()
        self.gate.set()

    def write(self, step: int, metrics: Any, rows: Any) -> None:
        self.gate.wait()
        if step in self.fails:
            raise OSError("no space left on device")
        self.given.append((step, metrics["reward/mean"], len(rows)))

    def close(self, status: int) -> None:
        self.given.append(status)


def relay_to(sink: Kept, folder: Path) -> Relay:
    return Relay("telemetry.sinks.0", "wandb", Memory(folder / "wandb.json", new=True), lambda: sink)


def test_a_failing_sink_is_reported_once_and_counted_and_other_sinks_get_everything(tmp_path, caplog):
    broken, whole = Kept(fails=(1, 3)), Kept()
    sinks = Sinks([relay_to(broken, tmp_path / "broken"), relay_to(whole, tmp_path / "whole")])
    with caplog.at_level(logging.WARNING), sinks:
        for step in (1, 2, 3):
            sinks.write(step, {"reward/mean": step / 2}, [sample_row(step, 0)] if step == 2 else [])
    assert broken.given == [(2, 1.0, 1), COMPLETE]
    assert whole.given == [(1, 0.5, 0), (2, 1.0, 1), (3, 1.5, 0), COMPLETE]
    assert sinks.metrics() == {"telemetry/sink_failures": 2} and sinks.metrics() == {"telemetry/sink_failures": 0}
    (warning,) = caplog.messages
    assert "telemetry.sinks.0 (wandb): step 1 not written: OSError: no space left on device" in warning
    assert "metrics.jsonl has every step" in warning


def test_a_hanging_sink_delays_no_step_and_the_end_only_briefly(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(module, "CLOSE_S", 0.1)
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    hangs, whole = Kept(), Kept()
    hangs.gate.clear()
    try:
        sinks = Sinks([relay_to(hangs, tmp_path / "hangs"), relay_to(whole, tmp_path / "whole")])
        with sinks:
            for step in range(1, 9):
                whole_has = len(whole.given)
                sinks.write(step, {"reward/mean": 0.0}, [])  # returns while the first sink hangs in step 1
                wait_for(lambda has=whole_has: len(whole.given) > has)
        wait_for(lambda: whole.given[-1] == COMPLETE)  # the end waited so briefly that a busy machine may finish later
        assert [step for step, *_ in whole.given[:-1]] == list(range(1, 9))
        assert sinks.metrics()["telemetry/sink_failures"] >= 6, "one running call and two waiting calls are not lost yet"
        assert hangs.given == []
    finally:
        hangs.gate.set()


def test_a_sink_that_cannot_be_opened_is_tried_again(tmp_path):
    sink, tries = Kept(), []

    def open_late() -> Kept:
        tries.append(1)
        if len(tries) <= 2:
            raise ConnectionError("no route to host")
        return sink

    with Sinks([Relay("telemetry.sinks.0", "wandb", Memory(tmp_path / "wandb.json", True), open_late)]) as sinks:
        for step in (1, 2):
            sinks.write(step, {"reward/mean": 0.0}, [])
    assert sink.given == [(2, 0.0, 0), COMPLETE]
    assert sinks.metrics() == {"telemetry/sink_failures": 2}, "at the start, and step 1"


ENDS = [(KeyError("it fails"), FAILED), (Preempted("later", REQUEUE), REQUEUE), (Preempted("lost", 1), FAILED)]


@pytest.mark.parametrize(("error", "end"), ENDS)
def test_a_sink_learns_of_an_end_before_the_last_step(tmp_path, error, end):
    sink = Kept()
    with pytest.raises(type(error)), Sinks([relay_to(sink, tmp_path)]) as sinks:
        sinks.write(1, {"reward/mean": 0.0}, [])
        raise error
    assert sink.given == [(1, 0.0, 0), end]


def recipe_with(**telemetry: Any) -> Recipe:
    return parse_recipe(edited(("telemetry", telemetry))())


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    return make_folder(tmp_path, monkeypatch)


def violations(**telemetry: Any) -> list[str]:
    with pytest.raises(RecipeError) as error:
        recipe_with(**telemetry)
    return [str(violation) for violation in error.value.violations]


def test_a_sink_without_its_package_is_refused_by_the_recipe(in_folder, monkeypatch):
    result = importlib.util.find_spec
    (in_folder / "wandb").mkdir()  # a directory that wandb makes in a working directory is not the package
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else result(name))
    assert violations(sinks=[{"kind": "tensorboard"}, {"kind": "mlflow"}]) == [
        "telemetry.sinks.1.kind = 'mlflow': the package mlflow-skinny is not installed; it is in megarl's extra `sinks`; "
        "nearest: pip install mlflow-skinny"
    ]
    monkeypatch.setattr(sys, "path", [str(in_folder)])
    monkeypatch.setattr(importlib.util, "find_spec", result)
    for name in [name for name in sys.modules if name.split(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    assert result("wandb") is not None, "a namespace"
    assert "pip install wandb" in "".join(violations(sinks=[{"kind": "wandb"}]))


def test_settings_that_do_not_fit_the_run_are_named(in_folder):
    assert violations(sinks=[{"kind": "wandb"}, {"kind": "wandb"}]) == [
        "telemetry.sinks.1.kind = 'wandb': each kind of sink can be given once; nearest: leave it out"
    ]
    (message,) = violations(sinks=[{"kind": "mlflow", "uri": "https://me:secret@host:5000"}])
    assert "telemetry.sinks.0.uri" in message and "secret" not in message and "MLFLOW_TRACKING_PASSWORD" in message
    (message,) = violations(samples_per_step=17)
    assert "telemetry.samples_per_step = 17: a step has 16 sequences" in message and message.endswith("nearest: 16")
    assert violations(profile={"steps": [3, 4], "ranks": [7, 8]}) == [
        "telemetry.profile.steps.1 = 4: the run has 3 steps (run.steps); nearest: 3",
        "telemetry.profile.ranks.1 = 8: the run has 8 ranks (trainer.ranks), and the first is 0; nearest: 7",
    ]


def test_settings_that_this_machine_cannot_serve_are_refused_at_the_start_and_not_by_a_check(in_folder):
    recipe = recipe_with(profile={"kind": "nsight", "steps": [1]})
    assert [violation.key for violation in without_gpus(recipe)] == ["telemetry.profile.kind"]
    assert list(with_gpus(recipe)) == []


def test_a_recipe_without_sinks_imports_no_sink_library():
    libraries = "{'wandb', 'mlflow', 'tensorboard'}"
    code = f"import sys, megarl.telemetry.sinks; assert not {libraries} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


KINDS = ("tensorboard", "wandb", "mlflow")


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """Write a run with two starts: steps 1 to 3, and then steps 3 and 4 from a checkpoint after step 2; return its
    folder."""
    folder = tmp_path_factory.mktemp("sinks")
    with pytest.MonkeyPatch.context() as patch:
        recipe_folder = tmp_path_factory.mktemp("recipe")
        make_folder(recipe_folder, patch)
        recipe = recipe_with(sinks=[{"kind": kind} for kind in KINDS])
    for start, (done, steps) in enumerate(((0, (1, 2, 3)), (2, (3, 4)))):
        with open_sinks(recipe, folder, done) as sinks:
            for step in steps:
                metrics = {"step": step, "reward/mean": step + start / 2, "reward/none": None, "reward/text": "text"}
                sinks.write(step, metrics, [sample_row(step, sample) for sample in (0, 5)])
        assert sinks.metrics() == {"telemetry/sink_failures": 0}
        wait_for_wandb(folder, start + 1)
    return folder


FIRST_KEPT = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5)]


def test_tensorboard_shows_the_last_version_of_each_step_once(twice):
    assert tensorboard_points(twice / "tensorboard", "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5)]


def test_wandb_offline_has_each_step_once_in_one_run_and_no_facts_about_the_machine(twice):
    assert wandb_points(twice, "reward/mean") == FIRST_KEPT
    records = list(wandb_records(twice))
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    memory = json.loads((twice / "sinks" / "wandb.json").read_text())
    assert {run.run_id for run in runs} == {memory["id"]} and memory["step"] == 4
    assert {run.project for run in runs} == {"megarl"}
    kinds = {record.WhichOneof("record_type") for record in records}
    assert not kinds & {"stats", "environment", "output", "output_raw", "metadata"}, kinds
    tables = [json.loads(path.read_text()) for path in twice.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert sorted(table["data"][0][0] for table in tables) == [1, 2, 3, 4]
    assert all(len(table["data"]) == 2 and "reason" in table["columns"] for table in tables)
    assert not list(twice.glob("wandb/offline-run-*/files/*require*"))


def test_mlflow_in_a_directory_has_each_step_once_in_one_run(twice):
    run = json.loads((twice / "sinks" / "mlflow.json").read_text())["id"]
    assert mlflow_points(twice / "mlflow", run, "reward/mean") == FIRST_KEPT
    result = mlflow_client(twice / "mlflow").get_run(run)
    assert result.info.status == "FINISHED" and result.data.params["algorithm.group_size"] == "2"
    assert "reward/text" not in result.data.metrics
    (folder,) = (twice / "mlflow").glob(f"*/{run}/artifacts/samples")
    assert [path.name for path in sorted(folder.iterdir())] == [f"step-{step:06d}.json" for step in (1, 2, 3, 4)]
    table = json.loads((folder / "step-000002.json").read_text())
    assert dict(zip(table["columns"], table["data"][1], strict=True)) == sample_row(2, 5)
