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


def test_every_algorithm_that_matters_has_one() -> None:
    assert {file.stem.split("-")[0] for file in RECIPES} >= {"grpo", "dapo", "gspo", "ppo"}
