"""Functions of a user's own module that a recipe names as `module:function`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from megarl.recipe.violation import RecipeError, Violation

Function = TypeVar("Function", bound=Callable[..., Any])
_MARK = "__megarl__"


def policy_loss(function: Function) -> Function:
    """Mark a policy loss: f(tokens: PolicyTokens, **options) -> (loss [tokens], clipped [tokens] bool).

    In the recipe: `policy_loss: {kind: function, target: "my_losses:mine", options: {...}}`.
    """
    return _mark(function, "policy_loss")


def advantage(function: Function) -> Function:
    """Mark an advantage: f(rewards [n], groups [n] ids, valid [n] bool) -> advantages [n], of whole sequences.

    Rewards that are not valid are 0, and their advantages count nowhere. In the recipe: `advantage: "my_advantages:mine"`.
    """
    return _mark(function, "advantage")


def load_marked(key: str, target: str, mark: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function that `target` names, which takes one or more tensors and `options`.

    Raises RecipeError where it cannot be imported, has not been decorated, or does not take the options.
    """
    module, _, name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module raises
        rule = f"{type(error).__name__}: {error}"
        raise RecipeError([Violation(key, target, rule, "a module that imports, on PYTHONPATH of every rank")]) from error
    if getattr(function, _MARK, None) != mark:
        raise RecipeError([Violation(key, target, "is not decorated", f"@megarl.algorithm.{mark} above it")])
    known = inspect.signature(function).parameters
    unknown = sorted(options.keys() - known.keys())
    if unknown and not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
        raise RecipeError([Violation(key, target, f"takes no {', '.join(unknown)}", ", ".join(known))])
    return function


def _mark(function: Function, mark: str) -> Function:
    setattr(function, _MARK, mark)
    return function
