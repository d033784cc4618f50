"""The recipes for clusters are legal, are placed on their nodes, and fit their devices; models are a config.json alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from megarl.planner.placement import PlacementError, find_placement
from megarl.recipe import load_recipe
from megarl.recipe.load import NOT_RUN
from tests.cluster_cases import MODELS
from tests.planner_cases import document_of

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes" / "cluster").glob("*.yaml"))
CPU_RECIPES = sorted([*(ROOT / "recipes").glob("*.yaml"), *(ROOT / "recipes" / "cpu").glob("*.yaml")])
GPUS_OF_A_NODE = 8


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub cache of somebody who has fetched the models' config.json and nothing else."""
    for name, config in MODELS.items():
        model = tmp_path / f"models--{name.replace('/', '--')}"
        (model / "refs").mkdir(parents=True)
        (model / "refs" / "main").write_text("abc")
        (model / "snapshots" / "abc").mkdir(parents=True)
        (model / "snapshots" / "abc" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("hub_cache")
@pytest.mark.parametrize("file", [pytest.param(file, id=file.stem) for file in RECIPES])
def test_a_recipe_for_a_cluster_fits_it(file: Path) -> None:
    """Planned on a machine that has the config.json of each model alone."""
    recipe = yaml.safe_load(file.read_text())
    named = re.search(r"-(\d+)gpus$", file.stem)
    assert named is not None and int(named[1]) == recipe["trainer"]["ranks"]
    found = document_of(file, devices_per_node=GPUS_OF_A_NODE)
    assert found["device"]["fits"] is True, found["device"]
    assert 0 < found["device"]["engine_share"] <= found["device"]["safe_memory_utilization"]
    assert found["placement"]["trainer_nodes"] == recipe["trainer"]["ranks"] // GPUS_OF_A_NODE, found["placement"]
    assert f"not checked: weights and tokenizer of model.path = {recipe['model']['path']}" in found["not_checked"]
    assert sum(NOT_RUN in line for line in found["not_checked"]) == 1
    # fp32 gradients of bf16 weights, and no second copy of them.
    worst = found["device"]["worst_memory"]["actor_update"]
    assert 1.9 < worst["gradients"] / worst["weights"] < 2.2
    host = found["placement"]["host_memory"]["total"]
    assert 0 < host < recipe["device"]["host_memory_gib"] * 2**30
    with pytest.raises(PlacementError, match=r"device.host_memory_gib = 100: a node takes up to .* GiB .*or a larger host"):
        find_placement(load_recipe(file, ["device.host_memory_gib=100"]), GPUS_OF_A_NODE, None)
    imbalance = {phase: plan["imbalance"] for phase, plan in found["phases"].items()}
    assert max(imbalance.values()) <= 1.01, imbalance


@pytest.mark.parametrize("file", [pytest.param(file, id=file.stem) for file in CPU_RECIPES])
def test_a_recipe_for_cpus_fits_a_laptop(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the models that set-up makes: 8 GiB for each trainer rank and for each engine."""
    monkeypatch.chdir(ROOT)
    # The policy that a teacher is exported from stands for it.
    teachers = yaml.safe_load(file.read_text()).get("teachers", {})
    changes = [f"teachers.{name}.path=models/tiny-qwen3" for name in teachers]
    found = document_of(file, ["device={memory_gib: 8, kind: cpu}", *changes])
    assert found["device"]["fits"] is True, found["device"]


def test_there_is_one_for_each_algorithm_and_size_that_matters() -> None:
    assert {file.stem for file in RECIPES} == {
        "dapo-qwen2.5-32b-32gpus",
        "distill-qwen3-8b-16gpus",
        "distill-qwen3-8b-moe-teacher-8gpus",
        "grpo-deepseek-v3-256gpus",
        "grpo-qwen2.5-7b-8gpus",
        "gspo-qwen3-30b-a3b-32gpus",
        "ppo-llama2-70b-critic-13b-16gpus",
    }
    algorithms = {"grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gspo", "cispo", "dapo", "ppo"}
    others = {"sft", "dpo", "reward_model", "distill", "gkd", "served_teacher", "two_teachers", "warmup"}
    assert {file.stem for file in CPU_RECIPES if file.parent.name == "cpu"} == algorithms | others
