"""Rules on the form in which weights travel to the engines; `rules.py` runs them with its own."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.recipe.recipe import Recipe
from megarl.recipe.violation import Violation

Violations = Iterator[Violation]


def delta(recipe: Recipe) -> Violations:
    """Differences have a length of their own, and cost more than a fast transport takes for the whole."""
    section = recipe.weight_sync
    if section.wire == "delta" and section.transport != "gloo":
        rule = f"differences travel as messages, and weight_sync.transport is {section.transport}, which is faster than them"
        yield Violation("weight_sync.wire", section.wire, rule, "full, or weight_sync.transport: gloo")
