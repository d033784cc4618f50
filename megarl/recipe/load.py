"""From a YAML file and overrides to a recipe, or to every violation at once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from megarl.recipe.model_section import Fetch
from megarl.recipe.recipe import Recipe
from megarl.recipe.rules import cross_violations
from megarl.recipe.sizes import resolve_caps, size_engines, with_least_caps
from megarl.recipe.structure import read_sections
from megarl.recipe.violation import RecipeError, Violation
from megarl.recipe.yaml_text import apply_overrides, dump_yaml, read_yaml


def load_recipe(path: str | Path, overrides: list[str] | tuple[str, ...] = (), fetch: Fetch | None = None) -> Recipe:
    """Read and prove a recipe; `overrides` are `dotted.key=value` with YAML values, later ones win.

    `fetch` gets models that are hub names and neither on disk nor in the hub cache; without it such a model is a
    violation. Raises RecipeError with every violation found.
    """
    return _resolved(_read(path, overrides, fetch), fetch)


def load_unfitted(path: str | Path, overrides: list[str] | tuple[str, ...] = (), fetch: Fetch | None = None) -> Recipe:
    """The same whether or not it fits the device: every `max_tokens: auto` is the smallest legal cap.

    For a search of a layout that fits, never for a run. Raises RecipeError with every other violation.
    """
    return with_least_caps(size_engines(_read(path, overrides, fetch), fetch)[0])


def parse_recipe(data: dict[str, Any], fetch: Fetch | None = None) -> Recipe:
    """The same for plain data that did not come from a file."""
    return _resolved(_prove(copy.deepcopy(data), [], fetch), fetch)


def recipe_yaml(recipe: Recipe) -> str:
    """The resolved recipe, every default written out; `load_recipe` reads it back to an equal recipe."""
    return dump_yaml(recipe.model_dump(mode="json"))


def _read(path: str | Path, overrides: list[str] | tuple[str, ...], fetch: Fetch | None) -> Recipe:
    data, violations = read_yaml(path)
    violations += apply_overrides({} if data is None else data, list(overrides))
    if data is None:
        raise RecipeError(violations)
    return _prove(data, violations, fetch)


def _prove(data: dict[str, Any], violations: list[Violation], fetch: Fetch | None) -> Recipe:
    """Check the structure first: rules across sections need a recipe whose every field is legal."""
    recipe, structural = read_sections(data)
    if recipe is None or violations:
        raise RecipeError([*violations, *structural])
    if found := cross_violations(recipe, fetch):
        raise RecipeError(found)
    return recipe


def _resolved(recipe: Recipe, fetch: Fetch | None) -> Recipe:
    """Only a legal recipe has layouts and models to measure."""
    sized, found = size_engines(recipe, fetch)
    resolved, more = resolve_caps(sized, fetch)
    if found or more:
        raise RecipeError([*found, *more])
    return resolved
