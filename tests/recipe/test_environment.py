"""Rules of episodes: all that turns and observations can come to fits whatever it has to, and is said before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.recipe import Recipe, RecipeError
from tests.recipe_cases import load_edited

EPISODES = {"target": "statistics:mean", "max_turns": 2, "max_observation_tokens": 10}
CAPS = (("phases.actor_logprob.micro_batch.max_tokens", 128), ("phases.actor_update.micro_batch.max_tokens", 128))


def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *edits: tuple[str, Any], **changes: Any) -> Recipe:
    return load_edited(tmp_path, monkeypatch, *CAPS, ("environment", EPISODES | changes), *edits)


def test_a_sequence_has_room_for_all_turns_and_the_observations_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = loaded(tmp_path, monkeypatch, ("reward", []))
    assert (recipe.max_completion_tokens, recipe.max_own_tokens, recipe.max_sequence_tokens) == (74, 64, 106)
    assert recipe.environment is not None
    short = recipe.model_copy(
        update={"environment": recipe.environment.model_copy(update={"max_turns": 4, "max_episode_tokens": 50})}
    )
    assert (short.max_completion_tokens, short.max_own_tokens, short.max_sequence_tokens) == (50, 50, 82)
    single = recipe.model_copy(update={"environment": None})
    assert (single.max_completion_tokens, single.max_own_tokens, single.max_sequence_tokens) == (32, 32, 64)


AGENT = {"kind": "agent", "target": "statistics:mean", "max_turns": 3, "max_episode_tokens": 60}


def test_the_segments_of_an_agent_have_room_for_their_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edits = [*CAPS, ("reward", [])]
    recipe = load_edited(tmp_path, monkeypatch, *edits, ("environment", AGENT | {"max_segments": 2}))
    assert (recipe.max_completion_tokens, recipe.max_own_tokens, recipe.max_sequence_tokens) == (60, 96, 92)
    assert recipe.num_sequences == 2 * recipe.num_rollouts and recipe.completion_key == "environment.max_episode_tokens"


@pytest.mark.parametrize(("environment", "key", "rule", "way_out"), [
    (AGENT | {"kind": "agnt"}, "environment.kind", "must be one of class, agent, command", "agent"),
    ({"kind": "agent", "max_turns": 3, "max_episode_tokens": 60}, "environment.target", "required", ""),
    ({"kind": "agent", "target": "statistics:mean", "max_turns": 3}, "environment.max_episode_tokens", "required", ""),
    (AGENT | {"kind": "command"}, "environment.run", "required", ""),
    (AGENT | {"kind": "command", "run": ""}, "environment.run", "at least 1 character", ""),
    (AGENT | {"max_observation_tokens": 3}, "environment.max_observation_tokens", "unknown key", ""),
    (EPISODES | {"idle_s": 3.0}, "environment.idle_s", "unknown key", ""),
    (AGENT | {"max_episode_tokens": 20}, "environment.max_episode_tokens", "no room for one turn of rollout", "32"),
    (AGENT | {"max_episode_tokens": 400}, "environment.max_episode_tokens", "with data.max_prompt_tokens 32 makes", "224"),
    (AGENT | {"idle_s": 9.0, "timeout_s": 3.0}, "environment.idle_s", "must not exceed environment.timeout_s = 3", "3"),
    (AGENT | {"target": "nobody_has_it:run"}, "environment.target", "no module 'nobody_has_it'", ""),
])  # fmt: skip
def test_what_an_agent_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: Any, key: str, rule: str, way_out: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        load_edited(tmp_path, monkeypatch, *CAPS, ("reward", []), ("environment", environment))
    found = [one for one in raised.value.violations if one.key == key and rule in one.rule]
    assert found and way_out in found[0].nearest, raised.value


@pytest.mark.parametrize(("name", "value"), [("system_prompt", "Be brief."), ("prompt_template", "Solve: {question}")])
def test_what_only_the_data_s_prompt_would_show_is_refused_with_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """They send their own messages; with a class, which may keep the data's prompt, both have an effect."""
    edit = (f"data.{name}", value)
    (tmp_path / "class").mkdir()
    loaded(tmp_path / "class", monkeypatch, ("reward", []), edit)
    with pytest.raises(RecipeError) as raised:
        load_edited(tmp_path, monkeypatch, *CAPS, ("reward", []), ("environment", AGENT), edit)
    (found,) = [one for one in raised.value.violations if one.key == f"data.{name}"]
    assert found.value == value and "environment.kind: agent" in found.rule and f"remove data.{name}" in found.nearest


TURNS = "environment.max_turns 3 x rollout.max_new_tokens 32 + 2 x environment.max_observation_tokens 10"


@pytest.mark.parametrize(("edits", "changes", "key", "rule", "way_out"), [
    ((), {"max_turns": 3}, "phases.actor_update.micro_batch.max_tokens",
     f"data.max_prompt_tokens 32 + ({TURNS}) 116 = 148", "148"),
    ((), {"max_turns": 9, "max_episode_tokens": 99}, "phases.actor_update.micro_batch.max_tokens",
     "data.max_prompt_tokens 32 + environment.max_episode_tokens 99 = 131", "131"),
    ((), {"max_turns": 9}, "environment.max_episode_tokens", "= 368 with data.max_prompt_tokens 32 makes 400 tokens", "224"),
    ((("rollout.kv_cache_bytes", 65536),), {}, "rollout.kv_cache_bytes", "must hold one sequence of 106 tokens", ""),
    ((), {"timeout_s": 600.0}, "environment.timeout_s", "must be below rollout.timeout_s = 600", "300"),
    ((("rollout.timeout_s", 30),), {}, "environment.timeout_s", "must be below rollout.timeout_s = 30", "15"),
    ((("algorithm.overlong", {"buffer": 65}),), {}, "algorithm.overlong.buffer", "turns of an episode may have = 64", "64"),
    ((("algorithm.overlong", {"buffer": 4}),), {"max_episode_tokens": 60}, "algorithm.overlong.buffer",
     "max_episode_tokens = 60 counts observations, too", "environment.max_episode_tokens: null"),
    ((("environment", None), ("reward", [])), {}, "reward", "must not be empty", "or an environment"),
])  # fmt: skip
def test_what_does_not_fit_is_named_with_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edits: Any, changes: Any, key: str, rule: str, way_out: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        loaded(tmp_path, monkeypatch, *edits, **changes)
    found = [one for one in raised.value.violations if one.key == key and rule in one.rule]
    assert found and way_out in found[0].nearest, raised.value
