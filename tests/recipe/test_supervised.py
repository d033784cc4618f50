"""A supervised recipe: what may be left out, what is refused, and that the resolved recipe reads back as the same one."""

from typing import Any

import pytest
import yaml

from megarl.recipe import RecipeError, load_recipe
from megarl.recipe.load import parse_recipe, recipe_yaml
from tests.supervised_cases import supervised_recipe, supervised_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("supervised")
    supervised_run(path)
    return path


def evaluation(folder, **more):
    source = {"kind": "jsonl", "path": str(folder / "held_out.jsonl"), "prompt_field": "messages"}
    return {"prompts": source} | more


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward_model"])
def test_a_recipe_leaves_out_what_describes_rollouts_and_reads_back(folder, kind):
    recipe = load_recipe(supervised_recipe(folder, kind, kind))
    assert recipe.max_sequence_tokens == 48 and recipe.num_sequences == 8 and not recipe.has_engines
    assert "rollout" not in recipe.running_phases and "weight_sync" not in recipe.running_phases
    assert ("reference" in recipe.roles) == (kind == "dpo")
    assert parse_recipe(yaml.safe_load(recipe_yaml(recipe))) == recipe


BROKEN: dict[str, dict[str, Any]] = {
    "data.max_tokens": {"data__max_tokens": None},
    "data.max_prompt_tokens": {"data__max_prompt_tokens": 8},
    "rollout.engines": {"rollout": {"engines": 2}},
    "rollout.temperature": {"rollout": {"temperature": 0.7}},
    "reward": {"reward": [{"kind": "last_number"}]},
    "environment": {"environment": {"target": "megarl.rollout.calculator:Calculator", "max_turns": 2,
                                    "max_observation_tokens": 8}},
    "critic": {"critic": {"optimizer": {"lr": 1e-3}}},
    "algorithm.kl": {"algorithm": {"kl": {"place": "loss", "coefficient": 0.1, "estimator": "k3"}}},
    "algorithm.advantage": {"algorithm": {"advantage": "grpo"}},
    "algorithm.dpo": {"algorithm": {"dpo": {}}},
    "weight_sync.transport": {"weight_sync": {"transport": "group"}},
    "phases.reward.sequences": {"phases__reward": {"sequences": 4}},
    "phases.rollout.prompts": {"phases__rollout": {"prompts": 16}},
    "phases.actor_update.epochs": {"phases__actor_update__epochs": 2},
    "phases.actor_update.micro_batch.max_tokens": {"phases__actor_update__micro_batch": {"max_tokens": 40}},
    "phases.actor_logprob": {"phases__actor_logprob": {"micro_batch": {"sequences": 1}}},
    "data.prompts.rejected_field": {"data__prompts__rejected_field": "rejected"},
    "data.prompts.answer_field": {"data__prompt_format": "text"},
    "data.prompt_format": {"data__prompt_format": "token_ids"},
    "run.dump_rollouts": {"run__dump_rollouts": True},
    "reference": {"reference": {}},
}  # fmt: skip


@pytest.mark.parametrize("key", BROKEN)
def test_what_a_supervised_run_cannot_read_is_refused(folder, key):
    with pytest.raises(RecipeError) as error:
        load_recipe(supervised_recipe(folder, "broken", **BROKEN[key]))
    assert key in [violation.key for violation in error.value.violations]
    assert all(violation.nearest for violation in error.value.violations)


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "data.prompts.rejected_field": ("dpo", {"data__prompts__rejected_field": None}),
    "phases.actor_update.mini_batch": ("dpo", {"phases__actor_update__mini_batch": 7}),
    "phases.actor_logprob.start": ("dpo", {"phases__actor_logprob__start": "early"}),
    "evaluation.pass_reward": ("sft", {"evaluation": {"pass_reward": 2.0}}),
}


@pytest.mark.parametrize("key", OTHERS)
def test_pairs_and_evaluations_are_whole(folder, key):
    kind, changes = OTHERS[key]
    changes = {name: evaluation(folder, **value) if name == "evaluation" else value for name, value in changes.items()}
    with pytest.raises(RecipeError) as error:
        load_recipe(supervised_recipe(folder, "broken", kind, **changes))
    assert key in [violation.key for violation in error.value.violations]


def test_a_run_with_rollouts_refuses_what_only_supervised_runs_have(folder):
    from tests.runs import tiny_recipe

    changes = {"data__max_tokens": 16, "data__prompts__answer_field": None, "algorithm__advantage": "dpo"}
    with pytest.raises(RecipeError) as error:
        load_recipe(tiny_recipe(folder, "rl", False, 1, 1, 1, 2, **changes))
    keys = {violation.key for violation in error.value.violations}
    assert {"data.max_tokens", "data.prompts.answer_field", "algorithm.advantage"} <= keys
