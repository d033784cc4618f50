"""Rules on the watchdog's deadlines; `rules.py` runs them with its own."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.recipe.recipe import Recipe
from megarl.recipe.violation import Violation
from megarl.recipe.watchdog_section import STEP_SHARE

Violations = Iterator[Violation]


def deadlines(recipe: Recipe) -> Violations:
    """A rank that hangs is to be named before a deadline that names nobody passes, and not while another one holds."""
    section, trainer, (first_step_s, _) = recipe.watchdog, recipe.trainer, recipe.standing_s
    for key, seconds in (("first_step_s", section.first_step_s), ("step_s", section.step_s)):
        if seconds is None:
            continue
        if seconds >= trainer.collective_timeout_s:
            rule = f"must be below trainer.collective_timeout_s = {trainer.collective_timeout_s:g}, whose end names no rank"
            yield Violation(f"watchdog.{key}", seconds, rule, f"{STEP_SHARE * trainer.collective_timeout_s:g}")
    if section.step_s is not None and section.step_s > first_step_s:
        rule = f"must not pass watchdog.first_step_s = {first_step_s:g}: a first step takes longer than the others"
        yield Violation("watchdog.step_s", section.step_s, rule, f"{first_step_s:g}")
