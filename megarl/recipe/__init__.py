"""The recipe: what a run is, read from YAML and proved before a device is touched. Imports no torch."""

from megarl.recipe.load import load_recipe, parse_recipe, recipe_yaml
from megarl.recipe.phases_section import ENGINE_PHASES, FORWARD_PHASES, UPDATE_PHASES, kind_of, role_of
from megarl.recipe.recipe import Recipe
from megarl.recipe.violation import RecipeError, Violation

__all__ = [
    "ENGINE_PHASES",
    "FORWARD_PHASES",
    "UPDATE_PHASES",
    "Recipe",
    "RecipeError",
    "Violation",
    "kind_of",
    "load_recipe",
    "parse_recipe",
    "recipe_yaml",
    "role_of",
]
