"""The recipes for clusters are legal, are placed on their nodes, and fit their devices; models are a config.json alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.cluster_cases import MODELS
from tests.planner_cases import document_of

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes" / "cluster").glob("*.yaml"))
CPU_RECIPES = sorted([*(ROOT / "recipes").glob("*.yaml"), *(ROOT / "recipes" / "cpu").glob("*.yaml")])
GPUS_OF_A_NODE = 8


@pytest.mark.parametrize("file", [pytest.param(file, id=file.stem) for file in RECIPES])
def test_a_recipe_for_a_cluster_fits_it(file: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load(file.read_text())
    named = re.search(r"-(\d+)gpus$", file.stem)
    assert named is not None and int(named[1]) == recipe["trainer"]["ranks"]
    overrides = []
    for section in ("model", "critic"):
        if "path" in recipe.get(section, {}):
            directory = tmp_path / section
            directory.mkdir()
            (directory / "config.json").write_text(json.dumps(MODELS[recipe[section]["path"]]))
            overrides.append(f"{section}.path={directory}")
    found = document_of(file, overrides, devices_per_node=GPUS_OF_A_NODE)
    assert found["device"]["fits"] is True, found["device"]
    assert found["placement"]["trainer_nodes"] == recipe["trainer"]["ranks"] // GPUS_OF_A_NODE, found["placement"]


@pytest.mark.parametrize("file", [pytest.param(file, id=file.stem) for file in CPU_RECIPES])
def test_a_recipe_for_cpus_fits_a_laptop(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the models that set-up makes: 8 GiB for each trainer rank and for each engine."""
    monkeypatch.chdir(ROOT)
    found = document_of(file, ["device={memory_gib: 8, kind: cpu}"])
    assert found["device"]["fits"] is True, found["device"]


def test_there_is_one_for_each_algorithm_and_size_that_matters() -> None:
    assert {file.stem for file in RECIPES} == {
        "dapo-qwen2.5-32b-32gpus",
        "grpo-deepseek-v3-256gpus",
        "grpo-qwen2.5-7b-8gpus",
        "gspo-qwen3-30b-a3b-32gpus",
        "ppo-llama2-70b-critic-13b-16gpus",
    }
    algorithms = {"grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gspo", "cispo", "dapo", "ppo"}
    assert {file.stem for file in CPU_RECIPES if file.parent.name == "cpu"} == algorithms
