"""Functions and classes of a user's own module that a recipe names as `module:name`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from megarl.recipe.violation import RecipeError, Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


Marked = TypeVar("Marked", bound=Callable[..., Any])


_MARK = "__megarl__"


def mark(target: Marked, decorator: str) -> Marked:
    """Mark a function or class as decorated by `decorator`, given by its full name."""
    setattr(target, _MARK, decorator)
    return target


def load_target(key: str, target: str) -> Callable[..., Any]:
    """The function or class that `target` names. Raises RecipeError where it cannot be imported."""
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
    except Exception as error:  # whatever the user's module raises
        rule = f"{type(error).__name__}: {error}"
        raise RecipeError([Violation(key, target, rule, "a module that imports, on PYTHONPATH of every rank")]) from error


def load_marked(key: str, target: str, decorator: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function or class that `target` names, which takes `options` by name.

    Raises RecipeError where it cannot be imported, has not been decorated, or does not take the options.
    """
    function = load_target(key, target)
    if getattr(function, _MARK, None) != decorator:
        raise RecipeError([Violation(key, target, "is not decorated", f"@{decorator} above it")])
    known = inspect.signature(function).parameters
    unknown = sorted(options.keys() - known.keys())
    if unknown and not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        way_out = ", ".join(known) or "no options"
        raise RecipeError([Violation(key, target, f"takes no {', '.join(unknown)}", way_out)])
    return function


def modules_exist(recipe: Recipe) -> Violations:
    """User modules that do not exist. Only the outermost package is looked up, and nothing of it runs."""
    targets = {f"reward.{at}.target": part.target for at, part in enumerate(recipe.reward) if part.kind == "function"}
    if recipe.algorithm.policy_loss.kind == "function":
        targets["algorithm.policy_loss.target"] = recipe.algorithm.policy_loss.target
    if ":" in recipe.algorithm.advantage:
        targets["algorithm.advantage"] = recipe.algorithm.advantage
    if recipe.environment is not None and recipe.environment.kind != "command":
        targets["environment.target"] = recipe.environment.target
    for key, target in targets.items():
        outermost = target.split(":")[0].split(".")[0]
        # From the working directory, as `python -m megarl` finds it.
        if importlib.machinery.PathFinder.find_spec(outermost, [os.getcwd(), *sys.path]) is None:
            rule = f"no module {outermost!r} in the working directory or the environment"
            yield Violation(key, target, rule, "the module's directory on PYTHONPATH")
