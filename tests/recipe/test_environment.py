"""Rules of episodes and of evaluations: what turns and observations can come to fits whatever it has to, and what cannot be
measured is said before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.recipe import Recipe, load_recipe
from tests.recipe_cases import edited, refusals, write

CAPS = (("phases.actor_logprob.micro_batch.max_tokens", 128), ("phases.actor_update.micro_batch.max_tokens", 128))
NO_REWARD: tuple[str, Any] = ("reward", [])
TURNS = "environment.max_turns 3 x rollout.max_new_tokens 32 + 2 x environment.max_observation_tokens 10"


def episodes(**changes: Any) -> tuple[str, Any]:
    return "environment", {"target": "statistics:mean", "max_turns": 2, "max_observation_tokens": 10} | changes


def agent(**changes: Any) -> tuple[str, Any]:
    given = {"kind": "agent", "target": "statistics:mean", "max_turns": 3, "max_episode_tokens": 60} | changes
    return "environment", {key: value for key, value in given.items() if value is not ...}


def evaluation(**changes: Any) -> tuple[str, Any]:
    return "evaluation", {"prompts": {"kind": "reasoning_gym", "task": "chain_sum", "size": 8, "seed": 2}} | changes


def loaded(folder: Path, *edits: tuple[str, Any]) -> Recipe:
    return load_recipe(write(folder, edited(*CAPS, *edits)))


def test_a_sequence_has_room_for_all_turns_and_the_observations_between(folder: Path) -> None:
    recipe = loaded(folder, episodes(), NO_REWARD)
    assert (recipe.max_completion_tokens, recipe.max_own_tokens, recipe.max_sequence_tokens) == (74, 64, 106)
    assert recipe.environment is not None
    short = recipe.model_copy(
        update={"environment": recipe.environment.model_copy(update={"max_turns": 4, "max_episode_tokens": 50})}
    )
    assert (short.max_completion_tokens, short.max_own_tokens, short.max_sequence_tokens) == (50, 50, 82)
    single = recipe.model_copy(update={"environment": None})
    assert (single.max_completion_tokens, single.max_own_tokens, single.max_sequence_tokens) == (32, 32, 64)


def test_the_segments_of_an_agent_have_room_for_their_tokens(folder: Path) -> None:
    recipe = loaded(folder, agent(max_segments=2), NO_REWARD)
    assert (recipe.max_completion_tokens, recipe.max_own_tokens, recipe.max_sequence_tokens) == (60, 96, 92)
    assert recipe.num_sequences == 2 * recipe.num_rollouts and recipe.completion_key == "environment.max_episode_tokens"


@pytest.mark.parametrize(("edits", "key", "texts"), [
    ([agent(kind="agnt"), NO_REWARD], "environment.kind", ["must be one of class, agent, command agent"]),
    ([agent(target=...), NO_REWARD], "environment.target", ["required"]),
    ([agent(max_episode_tokens=...), NO_REWARD], "environment.max_episode_tokens", ["required"]),
    ([agent(kind="command"), NO_REWARD], "environment.run", ["required"]),
    ([agent(kind="command", run=""), NO_REWARD], "environment.run", ["at least 1 character"]),
    ([agent(max_observation_tokens=3), NO_REWARD], "environment.max_observation_tokens", ["unknown key"]),
    ([agent(max_episode_tokens=20), NO_REWARD], "environment.max_episode_tokens",
     ["no room for one turn", " 32", "or rollout.max_new_tokens: 20"]),
    ([agent(max_episode_tokens=400), NO_REWARD], "environment.max_episode_tokens",
     ["with data.max_prompt_tokens 32 makes", " 224"]),
    ([agent(max_episode_tokens=400), NO_REWARD, ("rollout.max_new_tokens", 300)], "environment.max_episode_tokens",
     ["with data.max_prompt_tokens 32 makes", " 224, with rollout.max_new_tokens: 224"]),
    ([agent(idle_s=9.0, timeout_s=3.0), NO_REWARD], "environment.idle_s",
     ["must not exceed environment.timeout_s = 3", " 3"]),
    ([agent(target="nobody_has_it:run"), NO_REWARD], "environment.target", ["no module 'nobody_has_it'"]),
    # An agent sends its own messages; with a class, which may keep the data's prompt, both have an effect.
    ([agent(), NO_REWARD, ("data.system_prompt", "Be brief.")], "data.system_prompt",
     ["environment.kind: agent", "remove data.system_prompt"]),
    ([agent(), NO_REWARD, ("data.prompt_template", "Solve: {question}")], "data.prompt_template",
     ["environment.kind: agent", "remove data.prompt_template"]),
    ([episodes(idle_s=3.0)], "environment.idle_s", ["unknown key"]),
    ([episodes(max_turns=3)], "phases.actor_update.micro_batch.max_tokens",
     [f"data.max_prompt_tokens 32 + ({TURNS}) 116 = 148", " 148"]),
    ([episodes(max_turns=9, max_episode_tokens=99)], "phases.actor_update.micro_batch.max_tokens",
     ["data.max_prompt_tokens 32 + environment.max_episode_tokens 99 = 131", " 131"]),
    ([episodes(max_turns=9)], "environment.max_episode_tokens",
     ["= 368 with data.max_prompt_tokens 32 makes 400 tokens", " 224"]),
    ([episodes(), ("rollout.kv_cache_bytes", 65536)], "rollout.kv_cache_bytes", ["must hold one sequence of 106 tokens"]),
    ([episodes(timeout_s=600.0)], "environment.timeout_s", ["must be below rollout.timeout_s = 600", " 300"]),
    ([episodes(), ("rollout.timeout_s", 30)], "environment.timeout_s", ["must be below rollout.timeout_s = 30", " 15"]),
    ([episodes(), ("algorithm.overlong", {"buffer": 65})], "algorithm.overlong.buffer",
     ["turns of an episode may have = 64", " 64"]),
    ([episodes(max_episode_tokens=60), ("algorithm.overlong", {"buffer": 4})], "algorithm.overlong.buffer",
     ["max_episode_tokens = 60 counts observations, too", "environment.max_episode_tokens: null"]),
    ([NO_REWARD], "reward", ["must not be empty", "or an environment"]),
    ([evaluation(completions=2, pass_at=[1, 4])], "evaluation.pass_at", ["needs k completions"]),
    ([evaluation(completions=2, temperature=0.0)], "evaluation.temperature", ["the same"]),
    ([evaluation(temperature=0.005)], "evaluation.temperature", ["at least 0.01"]),
    ([evaluation(completions=64)], "evaluation.completions", ["16 sequences of a step"]),
    ([evaluation(), ("rollout.replay", "somewhere")], "evaluation", ["no engines"]),
    ([evaluation(), ("reward", [{"kind": "model"}]), ("reward_model", {"path": "tiny"}),
      ("phases.reward_model", {"micro_batch": {"sequences": 2}})], "evaluation", ["judge texts"]),
])  # fmt: skip
def test_what_does_not_fit_is_named_with_its_numbers(folder: Path, edits: Any, key: str, texts: list[str]) -> None:
    refused = refusals(*CAPS, *edits)
    assert all(text in refused[key] for text in texts), refused


def test_a_class_may_keep_the_prompt_of_the_data(folder: Path) -> None:
    loaded(folder, episodes(), NO_REWARD, ("data.system_prompt", "Be brief."), ("data.prompt_template", "Solve: {question}"))


def test_a_run_is_measured_before_the_first_step_and_after_the_last(folder: Path) -> None:
    recipe = loaded(folder, evaluation(every=2, completions=4, pass_at=[1, 4]))
    assert [recipe.evaluates_after(step) for step in range(4)] == [True, False, True, True]
    ends = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"every": 0})})  # type: ignore[union-attr]
    assert [ends.evaluates_after(step) for step in range(4)] == [True, False, False, True]
    assert not any(recipe.model_copy(update={"evaluation": None}).evaluates_after(step) for step in range(4))
