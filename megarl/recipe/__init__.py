"""The recipe: what a run is, read from YAML and proved before a device is touched. Imports no torch."""

from megarl.recipe.load import load_recipe, parse_recipe, recipe_yaml
from megarl.recipe.phases_section import ENGINE_PHASES, FORWARD_PHASES, ROLE_OF, UPDATE_PHASES
from megarl.recipe.recipe import Recipe
from megarl.recipe.violation import RecipeError, Violation

__all__ = [
    "ENGINE_PHASES",
    "FORWARD_PHASES",
    "ROLE_OF",
    "UPDATE_PHASES",
    "Recipe",
    "RecipeError",
    "Violation",
    "load_recipe",
    "parse_recipe",
    "recipe_yaml",
]
