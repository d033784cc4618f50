"""`watchdog`: how long a rank may stand still before the run is ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.recipe.section import Seconds, Section
from megarl.recipe.violation import Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


# Shares of trainer.collective_timeout_s: a collective that times out names no rank.
FIRST_STEP_SHARE, STEP_SHARE = 0.8, 0.5


class WatchdogSection(Section):
    first_step_s: Seconds | None = None
    """How long a rank may stay in one phase or span in its first step, which compiles and allocates; below
    `trainer.collective_timeout_s`. null: 0.8 of that."""
    step_s: Seconds | None = None
    """The same in all later steps. null: half of `trainer.collective_timeout_s`, or `first_step_s` where that is less."""
    files_s: Seconds = 1800.0
    """The same in phases that read or write model files: `start`, `load_checkpoint` and `checkpoint`."""
    stacks_s: Seconds = 5.0
    """Time for the processes of a hanging run to write their stacks before they are killed."""


def watchdog_rules(recipe: Recipe) -> Violations:
    """The watchdog must fire before a collective times out, which names no rank, and not while a rank compiles."""
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
