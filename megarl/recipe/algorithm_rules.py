"""Rules on advantages, losses and their corrections; `rules.py` runs them with its own."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.recipe.algorithm_sections import OF_GROUPS, OF_TOKENS
from megarl.recipe.recipe import Recipe
from megarl.recipe.violation import GIVEN, MISSING, Violation

Violations = Iterator[Violation]


def advantage(recipe: Recipe) -> Violations:
    """GAE needs a critic and its settings, which others do not read; a group has two members or more."""
    algorithm = recipe.algorithm
    if algorithm.advantage in OF_GROUPS and algorithm.group_size < 2:
        rule = f"{algorithm.advantage} compares at least two completions of a prompt"
        yield Violation("algorithm.group_size", algorithm.group_size, rule, "2")
    if algorithm.group is not None and algorithm.advantage != "grpo":
        rule = f"says how grpo compares, and algorithm.advantage is {algorithm.advantage}"
        yield Violation("algorithm.group", GIVEN, rule, "remove algorithm.group")
    if recipe.critic is not None and algorithm.advantage != "gae":
        yield _gae_only("critic", "a critic")
    if recipe.critic is None and algorithm.advantage == "gae":
        yield _with_gae("critic", "critic: {optimizer: {lr: 1.0e-5}}")


def gae_section(recipe: Recipe) -> Violations:
    if recipe.algorithm.gae is not None and recipe.algorithm.advantage != "gae":
        yield _gae_only("algorithm.gae", "gae settings")
    if recipe.algorithm.gae is None and recipe.algorithm.advantage == "gae":
        yield _with_gae("algorithm.gae", "gae: {discount: 1.0, smoothing: 0.95}")


def value_loss(recipe: Recipe) -> Violations:
    if recipe.algorithm.value_loss is not None and recipe.algorithm.advantage != "gae":
        yield _gae_only("algorithm.value_loss", "a value loss")
    if recipe.algorithm.value_loss is None and recipe.algorithm.advantage == "gae":
        yield _with_gae("algorithm.value_loss", "value_loss: {clip: 0.2}")


def _gae_only(key: str, what: str) -> Violation:
    return Violation(
        key,
        GIVEN,
        f"{what} needs algorithm.advantage: gae (PPO)",
        f"remove {key}, or algorithm.advantage: gae",
    )


def _with_gae(key: str, example: str) -> Violation:
    return Violation(key, MISSING, "required with algorithm.advantage: gae (PPO)", example)


def policy_loss(recipe: Recipe) -> Violations:
    """A geometric mean has one advantage a sequence."""
    algorithm = recipe.algorithm
    if algorithm.policy_loss.kind == "gmpo" and algorithm.advantage in OF_TOKENS:
        rule = f"has one advantage a sequence, and algorithm.advantage = {algorithm.advantage} gives each token its own"
        yield Violation("algorithm.policy_loss.kind", "gmpo", rule, "gspo, which takes those")


def adaptive_kl(recipe: Recipe) -> Violations:
    """A coefficient of 0 stays 0, whatever it is multiplied by."""
    kl = recipe.algorithm.kl
    if kl is not None and kl.adaptive is not None and kl.coefficient == 0:
        rule = "algorithm.kl.adaptive multiplies it, and 0 stays 0"
        yield Violation("algorithm.kl.coefficient", kl.coefficient, rule, "0.001")


def overlong(recipe: Recipe) -> Violations:
    """The penalty grows over a part of the completion."""
    section, longest = recipe.algorithm.overlong, recipe.rollout.max_new_tokens
    if section is None:
        return
    if section.buffer > longest:
        rule = f"must not exceed rollout.max_new_tokens = {longest}"
        yield Violation("algorithm.overlong.buffer", section.buffer, rule, str(longest))
    if not section.buffer and not section.mask:
        rule = "neither masks nor penalises anything"
        yield Violation("algorithm.overlong", GIVEN, rule, f"mask: true, or buffer: {max(1, longest // 4)}")
