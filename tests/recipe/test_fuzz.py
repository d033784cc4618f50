"""Whatever stands in a recipe, the answer is a recipe or violations, never another exception."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.planner.check import phase_table
from megarl.recipe import RecipeError, parse_recipe
from megarl.recipe.yaml_text import apply_overrides
from tests.recipe_cases import PPO, make_folder

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.integers(0, 40) | st.floats() | st.text(max_size=8)
words = st.sampled_from(
    ["grpo", "gae", "reward", "loss", "jsonl", "exact", "function", "sequences", "max_tokens", "kind", "path"]
)
anything = st.recursive(
    scalars | words,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(words | st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


def paths(data: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items: list[tuple[Any, Any]] = []
    if isinstance(data, dict):
        items = list(data.items())
    elif isinstance(data, list):
        items = list(enumerate(data))
    return [found for key, value in items for found in [(*above, key), *paths(value, (*above, key))]]


dotted_keys = st.sampled_from([".".join(map(str, path)) for path in paths(PPO)])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(paths(PPO)), anything, st.sampled_from(["set", "remove", "add"])), max_size=4))
def test_a_damaged_recipe_is_a_recipe_or_violations(damage: list[tuple[tuple[Any, ...], Any, str]]) -> None:
    data: Any = copy.deepcopy(PPO)
    for path, value, how in damage:
        here = data
        for part in path[:-1]:
            try:
                here = here[part]
            except (KeyError, IndexError, TypeError):
                here = None
        if how == "remove" and isinstance(here, dict):
            here.pop(path[-1], None)
        elif how == "add" and isinstance(here, dict):
            here[str(value)] = value
        elif isinstance(here, dict) or (isinstance(here, list) and path[-1] in range(len(here))):
            here[path[-1]] = value
    try:
        recipe = parse_recipe(data)
    except RecipeError as error:
        assert error.violations
        assert all(str(violation) for violation in error.violations)
    else:
        assert phase_table(recipe)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.text(max_size=12) | st.builds("{}={}".format, dotted_keys, st.text(max_size=8)), max_size=3))
def test_any_override_is_applied_or_a_violation(overrides: list[str]) -> None:
    data = copy.deepcopy(PPO)
    if apply_overrides(data, overrides):
        return
    try:
        parse_recipe(data)
    except RecipeError as error:
        assert error.violations
