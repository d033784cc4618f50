"""A supervised recipe: what may be left out, what is refused, and that the resolved recipe reads back as the same one. The
same rules under the keys of `warmup.sft`, and what follows for the steps of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megarl.cli import app
from megarl.planner.forecast import forecast, job_of
from megarl.planner.suggest import suggest
from megarl.recipe import RecipeError, load_recipe
from megarl.recipe.load import load_unfitted, parse_recipe, recipe_yaml
from tests.planner_cases import document_of
from tests.recipe_cases import faults_in
from tests.runs import tiny_recipe
from tests.supervised_cases import supervised_recipe, supervised_run
from tests.warmup_cases import rl_recipe, warm_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("supervised")
    supervised_run(path)
    return path


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward_model"])
def test_a_recipe_leaves_out_what_describes_rollouts_and_reads_back(folder, kind):
    recipe = load_recipe(supervised_recipe(folder, kind, kind))
    assert recipe.max_sequence_tokens == 48 and recipe.num_sequences == 8 and not recipe.has_engines
    assert "rollout" not in recipe.running_phases and "weight_sync" not in recipe.running_phases
    assert ("reference" in recipe.roles) == (kind == "dpo")
    assert parse_recipe(yaml.safe_load(recipe_yaml(recipe))) == recipe


HELD_OUT = {"kind": "reasoning_gym", "task": "chain_sum", "size": 2}
BROKEN: dict[str, dict[str, Any]] = {
    "data.max_tokens": {"data__max_tokens": None},
    "rollout.engines": {"rollout": {"engines": 2}},
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
    "data.prompts.rejected_field of pairs": {"kind": "dpo", "data__prompts__rejected_field": None},
    "data.prompts.answer_field": {"data__prompt_format": "text"},
    "data.prompt_format": {"data__prompt_format": "token_ids"},
    "run.dump_rollouts": {"run__dump_rollouts": True},
    "reference": {"reference": {}},
    "phases.actor_update.mini_batch of pairs": {"kind": "dpo", "phases__actor_update__mini_batch": 7},
    "phases.actor_logprob.start": {"kind": "dpo", "phases__actor_logprob__start": "early"},
    "evaluation.pass_reward": {"evaluation": {"prompts": HELD_OUT, "pass_reward": 2.0}},
}  # fmt: skip


@pytest.mark.parametrize("key", BROKEN)
def test_what_a_supervised_run_cannot_read_is_refused(folder, key):
    with pytest.raises(RecipeError) as error:
        load_recipe(supervised_recipe(folder, "broken", **BROKEN[key]))
    rules = [violation.rule for violation in error.value.violations if violation.key == key.removesuffix(" of pairs")]
    assert rules and ("of pairs" not in key or any("pairs" in rule for rule in rules))
    assert all(violation.nearest for violation in error.value.violations)


OF_ROLLOUTS: dict[str, dict[str, Any]] = {
    "rollout.max_staleness weight_sync.in_flight": {"rollout": {"max_staleness": 1}, "weight_sync": {"in_flight": "keep"}},
    "rollout.window": {"rollout": {"window": 1}},
    "phases.rollout.max_concurrent": {"phases__rollout": {"max_concurrent": 64}},
    "data.max_prompt_tokens": {"data__max_prompt_tokens": 5000},
    "rollout.max_new_tokens": {"rollout": {"max_new_tokens": 5000}},
}


@pytest.mark.parametrize("keys", OF_ROLLOUTS)
def test_keys_of_rollouts_are_to_be_removed_and_nothing_else_is_asked(folder: Path, keys: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe(supervised_recipe(folder, "broken", **OF_ROLLOUTS[keys]))
    ways_out = {violation.key: violation.nearest for violation in error.value.violations}
    assert ways_out == {key: f"remove {key}" for key in keys.split()}, error.value


def test_a_run_with_rollouts_refuses_what_only_supervised_runs_have(folder):
    changes = {"data__max_tokens": 16, "data__prompts__answer_field": None, "algorithm__advantage": "dpo"}
    refused = dict(faults_in(tiny_recipe(folder, "rl", False, 1, 1, 1, 2, **changes)))
    assert {"data.max_tokens", "data.prompts.answer_field", "algorithm.advantage"} <= refused.keys()


def test_a_recipe_reads_back_and_its_first_steps_are_a_supervised_run(folder: Path) -> None:
    recipe = load_recipe(warm_recipe(folder, "warm", evaluation=None))
    assert parse_recipe(yaml.safe_load(recipe_yaml(recipe))) == recipe
    supervised = recipe.supervised
    assert supervised is not None and supervised.run.is_supervised and supervised.run.steps == recipe.sft_steps == 3
    assert supervised.actor.optimizer.lr != recipe.actor.optimizer.lr and supervised.rollout.temperature == 1.0
    assert recipe.rollout_steps == 3 and recipe.reference_follows and not recipe.reference_is_base
    assert load_recipe(rl_recipe(folder, "rl", 3)).supervised is None


def test_an_evaluation_comes_also_after_the_last_supervised_step(folder: Path) -> None:
    prompts = {"kind": "jsonl", "path": str(folder / "pairs.jsonl"), "prompt_field": "question", "answer_field": "chosen"}
    recipe = load_recipe(warm_recipe(folder, "asked", evaluation={"prompts": prompts}))
    assert [step for step in range(7) if recipe.evaluates_after(step)] == [0, 3, 6]


SFT = "warmup__sft"
BROKEN_WARMUPS: dict[str, dict[str, Any]] = {
    "warmup.sft.steps": {f"{SFT}__steps": 7},
    "warmup.sft.data.max_tokens": {f"{SFT}__data__max_tokens": None},
    "warmup.sft.data.max_prompt_tokens": {f"{SFT}__data__max_prompt_tokens": 8},
    "warmup.sft.data.prompt_format": {f"{SFT}__data__prompt_format": "token_ids"},
    "warmup.sft.data.prompts.path": {f"{SFT}__data__prompts__path": "nowhere.jsonl"},
    "warmup.sft.data.prompts.answer_field": {f"{SFT}__data__prompt_format": "text"},
    "warmup.sft.data.curriculum": {f"{SFT}__data__curriculum": {"low": 0.1, "high": 0.9}},
    "warmup.sft.optimizer.warmup_steps": {f"{SFT}__optimizer__warmup_steps": 4},
    "warmup.sft.optimizer.lr": {f"{SFT}__optimizer__lr": 0.0},
    "warmup.sft.optimizer.beta1": {f"{SFT}__optimizer__beta1": 0.5},
    "warmup.sft.actor_update.epochs": {f"{SFT}__actor_update__epochs": 2},
    "warmup.sft.actor_update.micro_batch.max_tokens": {f"{SFT}__actor_update__micro_batch__max_tokens": 40},
    "warmup.sft.evaluation.completions": {f"{SFT}__evaluation": {"prompts": HELD_OUT, "completions": 2}},
    "warmup.sft.actor_update.mini_batch": {f"{SFT}__actor_update__mini_batch": 7, "trainer__ranks": 2},
    "reference.layout": {"reference": {"layout": {"tensor": 2}}, "trainer__ranks": 2},
    "actor.optimizer.warmup_steps": {"actor__optimizer__warmup_steps": 4},
}


@pytest.mark.parametrize("key", BROKEN_WARMUPS)
def test_an_error_names_the_key_of_the_warmup(folder: Path, key: str) -> None:
    assert dict(faults_in(warm_recipe(folder, "broken", **BROKEN_WARMUPS[key]))).keys() == {key}


def test_only_rollouts_are_preceded(folder: Path) -> None:
    assert "warmup" in dict(faults_in(warm_recipe(folder, "broken", run__kind="sft")))


def test_an_automatic_cap_is_the_largest_that_fits_as_a_supervised_run_has_it(folder: Path) -> None:
    """Nothing else than the actor is on the device: no engine, and no reference."""
    cap, key = "warmup.sft.actor_update.micro_batch.max_tokens", f"{SFT}__actor_update__micro_batch"
    changes: dict[str, Any] = {"device": {"memory_gib": 0.02, "kind": "cpu"}, "algorithm__kl": None,
                               "phases__reference_logprob": None, "rollout__replay": str(folder)}  # fmt: skip
    changes[key] = {"max_tokens": "auto"}
    recipe = load_recipe(warm_recipe(folder, "auto", **changes))
    assert recipe.warmup is not None
    alone = supervised_recipe(
        folder, "alone", device=changes["device"], phases__actor_update__micro_batch={"max_tokens": "auto"}
    )
    largest = recipe.warmup.sft.actor_update.micro_batch.max_tokens
    assert largest == load_recipe(alone).phases.actor_update.micro_batch.max_tokens
    assert load_unfitted(warm_recipe(folder, "auto", **changes)).warmup != recipe.warmup
    for broken in ({"device": None}, {"device": {"memory_gib": 1e-3, "kind": "cpu"}}):
        assert dict(faults_in(warm_recipe(folder, "auto", **changes | broken))).keys() == {cap}


def test_the_plan_counts_the_memory_of_the_supervised_steps(folder: Path) -> None:
    """Their micro-batches may be the largest ones of a run."""
    device = {"memory_gib": 1.0, "kind": "cpu"}
    small, large = (
        forecast(job_of(load_recipe(warm_recipe(folder, "planned", device=device,
                                                **{f"{SFT}__actor_update__micro_batch__max_tokens": cap}))))
        for cap in (48, 480)
    )  # fmt: skip
    assert small.fullest != "warmup.sft" == large.fullest
    assert large.device_peak > small.device_peak


def test_the_plan_gives_the_time_of_a_supervised_step_as_that_of_a_supervised_run(folder: Path) -> None:
    device = {"memory_gib": 1.0, "kind": "cpu", "tflops": 0.05}
    file = warm_recipe(folder, "timed", device=device)
    alone = document_of(supervised_recipe(folder, "alone", device=device))["phases"]["actor_update"]
    warmup = document_of(file)["supervised_update"]
    assert warmup["seconds"] == pytest.approx(alone["seconds"])
    shown = CliRunner().invoke(app, ["check", str(file), "--plan"]).output
    assert f" {warmup['seconds']:.3g}" in shown.partition("(warmup.sft)")[2]


def test_a_suggested_layout_divides_the_rows_of_a_warmup(folder: Path) -> None:
    """Two data-parallel ranks cannot share three rows, so the layout of two tensor ranks stays."""
    changes: dict[str, Any] = {"device": {"memory_gib": 8.0, "kind": "cpu"}, f"{SFT}__actor_update__mini_batch": 3}
    recipe = load_recipe(warm_recipe(folder, "three", ranks=2, tensor=2, **changes))
    keys = {suggestion.key: suggestion.value for suggestion in suggest(job_of(recipe))}
    assert keys.get("actor.layout.tensor", 2) == 2 or keys["actor.layout.pipeline"] == 2


@pytest.mark.parametrize("rows", [64, 63, 1])
def test_a_batch_that_ranks_cannot_share_has_a_way_out_that_works(folder, rows):
    for _ in range(3):
        changes = {"phases__actor_update__mini_batch": rows, "trainer__ranks": 3}
        try:
            load_recipe(supervised_recipe(folder, "shared", "dpo", **changes))
            break
        except RecipeError as error:
            (violation,) = error.violations
            assert violation.key == "phases.actor_update.mini_batch"
            rows = int(violation.nearest)
    assert rows % 6 == 0
