"""Decorators of a user's own advantages and policy losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megarl.recipe.own_code import mark

Function = TypeVar("Function", bound=Callable[..., Any])
POLICY_LOSS, ADVANTAGE = "megarl.algorithm.policy_loss", "megarl.algorithm.advantage"


def policy_loss(function: Function) -> Function:
    """Mark a policy loss: f(tokens: PolicyTokens, **options) -> (loss [tokens], clipped [tokens] bool).

    In the recipe: `policy_loss: {kind: function, target: "my_losses:mine", options: {...}}`.
    """
    return mark(function, POLICY_LOSS)


def advantage(function: Function) -> Function:
    """Mark an advantage: f(rewards [n], groups [n] ids, valid [n] bool) -> advantages [n], of whole sequences.

    Rewards that are not valid are 0, and their advantages count nowhere. In the recipe: `advantage: "my_advantages:mine"`.
    """
    return mark(function, ADVANTAGE)
