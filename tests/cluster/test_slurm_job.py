"""`megarl launch`: find the job that fits a recipe, and fill in the settings of the shipped sbatch file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megarl.cli import app
from megarl.cluster.slurm_job import CHECKOUT, SlurmJob, fill, fit_job
from megarl.planner.placement import NodesNeeded, PlacementError
from megarl.recipe import Recipe, load_recipe
from megarl.telemetry.run_directory import RunDirectory

RECIPE = "recipes/ppo-tiny.yaml"  # 4 trainer ranks and an engine of one worker


def recipe(*overrides: str) -> Recipe:
    return load_recipe(RECIPE, list(overrides))


@pytest.mark.parametrize(
    ("overrides", "devices", "ranks", "file", "needed"),
    [
        ([], 8, None, "one_node", NodesNeeded(1, 0, 4)),
        ([], 2, None, "colocated", NodesNeeded(2, 0, 2)),
        (["rollout.engines=2"], 0, 2, "colocated", NodesNeeded(2, 0, 2)),
        # On CPUs engines share cores with other processes, so any number of engines fits.
        (["rollout.engines=9"], 0, 4, "one_node", NodesNeeded(1, 0, 4)),
        (["rollout.placement=separate"], 8, None, "one_node", NodesNeeded(1, 0, 4)),
        (["rollout.placement=separate", "rollout.engines=5"], 4, None, "separate", NodesNeeded(1, 2, 4)),
        (["rollout.placement=separate", "rollout.engines=5"], 4, 2, "separate", NodesNeeded(2, 2, 2)),
        (["rollout.engines=4"], 4, 1, "colocated", NodesNeeded(4, 0, 1)),
    ],
)
def test_the_smallest_job_that_fits(
    overrides: list[str], devices: int, ranks: int | None, file: str, needed: NodesNeeded
) -> None:
    job = fit_job(recipe(*overrides), devices, ranks, None)
    assert (job.file.stem, job.needed) == (file, needed)


@pytest.mark.parametrize(
    ("overrides", "devices", "ranks", "nodes", "words"),
    [
        ([], 2, None, 1, ["trainer.ranks = 4, 2 on a node: 2 nodes", "2 nodes in all", "--nodes = 1 is fewer"]),
        (["rollout.placement=separate"], 4, None, 1, ["rollout.engines = 1 of 1 worker each: 1 more", "--nodes = 1"]),
        ([], 0, None, None, ["--devices-per-node = 0", "--ranks-per-node"]),
        (["rollout.engines=9"], 2, 2, None, ["rollout.engines = 9", "room for 4"]),
        (["device={memory_gib: 8, kind: cpu}"], 8, None, None, ["--devices-per-node = 8", "device.kind = cpu"]),
    ],
)
def test_a_job_that_does_not_fit_is_refused_with_the_arithmetic(
    overrides: list[str], devices: int, ranks: int | None, nodes: int | None, words: list[str]
) -> None:
    with pytest.raises(PlacementError) as caught:
        fit_job(recipe(*overrides), devices, ranks, nodes)
    assert all(text in str(caught.value) for text in words), caught.value


def job(*overrides: str, devices: int = 2) -> SlurmJob:
    return fit_job(recipe(*overrides), devices, None, None)


def test_the_file_differs_from_the_shipped_file_only_in_its_settings() -> None:
    item = job()
    text = fill(item, {"partition": "gpu-x", "time": "1-00:00:00"}, {"CONTAINER": "pyxis:/a b"}, [RECIPE, "run.name=it's"])
    shipped = item.file.read_text().splitlines()
    added = [line for line in text.splitlines() if line not in shipped]
    assert [line.split("  #")[0].rstrip() for line in added] == [
        "#SBATCH --partition=gpu-x",
        "#SBATCH --time=1-00:00:00",
        "#SBATCH --gpus-per-node=2",
        "RANKS_PER_NODE=2",
        "TRAINER_NODES=2",
        "CONTAINER='pyxis:/a b'",
        f"MEGARL_DIR={CHECKOUT}",
        """set -- recipes/ppo-tiny.yaml 'run.name=it'"'"'s'""",
    ]
    assert len(text.splitlines()) == len(shipped) + 1


def test_every_shipped_file_can_be_filled() -> None:
    kinds = [job(devices=8), job(), job("rollout.placement=separate", devices=4)]
    assert {item.file.stem for item in kinds} == {file.stem for file in (CHECKOUT / "launch/slurm").glob("*.sbatch")}
    for item in kinds:
        options = {"job-name": "a", "partition": "b", "account": "c", "time": "1:00"}
        text = fill(item, options, {}, [RECIPE])
        assert all(f"\n#SBATCH --{name}={value}\n" in text for name, value in options.items())


def test_another_directory_than_the_checkout_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    item = job()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}: call megarl launch there"):
        fill(item, {}, {}, [RECIPE])


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKOUT)


def megarl_launch(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["launch", *arguments])


def test_the_command_prints_the_file_or_submits_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [RECIPE, "run.steps=7", "--slurm", "--devices-per-node", "0", "--ranks-per-node", "2"]
    printed = megarl_launch(*options)
    assert printed.exit_code == 0 and "set -- recipes/ppo-tiny.yaml run.steps=7\n" in printed.stdout
    assert "2 nodes in all" in printed.stderr and "colocated.sbatch" in printed.stderr
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ncat >{tmp_path}/submitted\nexit 3\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    submitted = megarl_launch(*options, "--submit")
    assert submitted.exit_code == 3 and (tmp_path / "submitted").read_text() == printed.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--devices-per-node", "8"], "--slurm"),
        (["--slurm", "--devices-per-node", "2", "--nodes", "1"], "--nodes = 1"),
    ],
)
def test_the_command_refuses(options: list[str], words: str) -> None:
    done = megarl_launch(RECIPE, *options)
    assert done.exit_code == 2 and words in done.stderr and done.stdout == ""


def test_the_run_directory_of_another_recipe_is_refused_before_the_job_waits(tmp_path: Path) -> None:
    """The start itself would refuse the directory too, hours later."""
    overrides = [f"run.dir={tmp_path}", "run.name=taken"]
    earlier = recipe(*overrides, "run.seed=7")
    RunDirectory.of(earlier).prepare(earlier, None)
    for changes, status in (([], 2), (["run.seed=7"], 0), (["run.name=free"], 0)):
        done = megarl_launch(RECIPE, *overrides, *changes, "--slurm")
        assert done.exit_code == status, done.stderr
        assert status == 0 or f"{tmp_path}/taken is the run directory of another recipe: run.seed was 7" in done.stderr
