"""Rules of episodes: their turns fit their tokens, and their deadlines that of a rollout."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.recipe.recipe import Recipe
from megarl.recipe.violation import Violation

Violations = Iterator[Violation]


def tokens(recipe: Recipe) -> Violations:
    """A limit of the whole episode has room for one turn, and is below what its turns and observations can come to."""
    section, turn = recipe.environment, recipe.rollout.max_new_tokens
    if section is None or section.max_episode_tokens is None:
        return
    key, limit = "environment.max_episode_tokens", section.max_episode_tokens
    if limit < turn:
        yield Violation(key, limit, f"has no room for one turn of rollout.max_new_tokens = {turn}", str(turn))
    most = section.most_tokens(turn)
    if limit > most:
        rule = f"is never reached: {section.max_turns} turns and the observations between them have {most} tokens at most"
        yield Violation(key, limit, rule, f"{most}, or null")


def deadline(recipe: Recipe) -> Violations:
    """A rollout waits for its environments, turn behind turn."""
    section, limit = recipe.environment, recipe.rollout.timeout_s
    if section is None:
        return
    times = section.max_turns + 1
    if times * section.timeout_s >= limit:
        rule = (
            f"a reset and environment.max_turns = {section.max_turns} steps may take {times * section.timeout_s:g} s, which "
            f"must be below rollout.timeout_s = {limit:g}, the deadline of all turns of a step"
        )
        yield Violation("environment.timeout_s", section.timeout_s, rule, f"{limit / (times + 1):g}")
