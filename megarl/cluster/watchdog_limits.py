"""How long a rank may stand in one place, by a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.recipe import Recipe


@dataclass(frozen=True)
class Limits:
    """Seconds; the names are those of `WatchdogSection`."""

    first_step_s: float
    step_s: float
    files_s: float
    stacks_s: float

    @classmethod
    def of(cls, recipe: Recipe) -> Limits:
        return cls(*recipe.standing_s, recipe.watchdog.files_s, recipe.watchdog.stacks_s)
