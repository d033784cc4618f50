"""A reward model is read by one part of the reward and has one label."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from megarl.recipe import load_recipe
from megarl.recipe.role_sections import MemorySection
from megarl.recipe.sizes import memory_roles
from tests.recipe_cases import CONFIG, edited, refusals, write

JUDGE = {**CONFIG, "architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
PHASE = ("phases.reward_model", {"micro_batch": {"max_tokens": 128}})
PART = ("reward", [{"kind": "last_number"}, {"kind": "model", "weight": 0.5}])
MODEL = ("reward_model", {"path": "judge", "layout": {"tensor": 2}})
NO_CRITIC = (("algorithm.gae", ...), ("algorithm.value_loss", ...), ("critic", ...), ("phases.critic_value", ...),
             ("phases.critic_update", ...))  # fmt: skip
SAMPLING: tuple[str, Any] = ("algorithm.dynamic_sampling", {})
RLOO, REMAX = ("algorithm.advantage", "rloo"), ("algorithm.advantage", "remax")


@pytest.fixture(autouse=True)
def judge(folder: Path) -> Path:
    """The config of a reward model that fits."""
    (folder / "judge").mkdir()
    config = folder / "judge" / "config.json"
    config.write_text(json.dumps(JUDGE))
    return config


def test_a_reward_model_that_fits_is_legal(folder):
    recipe = load_recipe(write(folder, edited(PHASE, PART, MODEL)))
    assert recipe.running_phases[:3] == ("rollout", "reward", "reward_model")
    assert recipe.layouts["reward_model"].tensor == 2
    assert [part.kind for part in recipe.verifiers] == ["last_number"]
    assert recipe.reward_model_weight == 0.5


def test_the_memory_section_of_the_actor_saves_nothing_of_a_reward_model(folder):
    """A reward model has none of its own: its weights stay on the device."""
    memory = ("actor.memory", {"offload": "all", "recompute": "full"})
    roles = memory_roles(load_recipe(write(folder, edited(PHASE, PART, MODEL, memory))))
    assert roles["actor"].memory == MemorySection(recompute="full", offload="all")
    assert roles["reward_model"].memory == MemorySection()


@pytest.mark.parametrize(
    "edits,key,text",
    [
        ((PART,), "reward_model", "required: reward.1 is of kind: model"),
        ((MODEL, PHASE), "reward_model", "no part of reward reads it"),
        ((MODEL, PART), "phases.reward_model", "required: it runs with a reward_model"),
        ((PHASE,), "phases.reward_model", "never runs: it runs with a reward_model"),
        ((MODEL, PHASE, ("reward", [{"kind": "model"}, {"kind": "model"}])), "reward.1.kind", "there is one reward model"),
        ((MODEL, PHASE, ("reward", [{"kind": "model", "weight": 0.0}])), "reward.0.weight", "for nothing"),
        ((MODEL, PHASE, PART, ("reward_model.path", "nowhere")), "reward_model.path", "not found"),
        ((MODEL, PHASE, PART, ("reward_model.layout.tensor", 8)), "reward_model.layout.tensor", "legal: 1, 2, 4"),
        ((MODEL, PHASE, PART, *NO_CRITIC, RLOO, SAMPLING), "algorithm.dynamic_sampling", "scores once"),
        ((MODEL, PHASE, PART, *NO_CRITIC, REMAX), "algorithm.advantage", "scores what is trained on"),
    ],
)
def test_what_does_not_go_together_is_named(edits, key, text):
    assert text in refusals(*copy.deepcopy(edits))[key]


@pytest.mark.parametrize(
    "changes,text",
    [
        ({"id2label": {"0": "a", "1": "b"}}, "has 2 labels"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "is a Qwen3ForCausalLM"),
    ],
)
def test_files_that_do_not_fit_are_named(judge, changes, text):
    judge.write_text(json.dumps(JUDGE | changes))
    assert text in refusals(MODEL, PHASE, PART)["reward_model.path"]
