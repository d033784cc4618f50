"""How long a rank may stand in one place, by a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe

# Below trainer.collective_timeout_s: the end of a collective names nobody.
FIRST_STEP_SHARE, STEP_SHARE = 0.8, 0.5


@dataclass(frozen=True)
class Limits:
    """Seconds; the names are those of `WatchdogSection`."""

    first_step_s: float
    step_s: float
    files_s: float
    stacks_s: float

    @classmethod
    def of(cls, recipe: Recipe) -> Limits:
        section, trainer = recipe.watchdog, recipe.trainer
        # Others wait for a rank that compiles, in a later step too where the first had no work for a function.
        least = (trainer.compile_timeout_s + trainer.collective_timeout_s) / 2 if trainer.compile else 0.0
        first, step = section.first_step_s, section.step_s
        if first is None:
            first = max(FIRST_STEP_SHARE * trainer.collective_timeout_s, least)
        if step is None:
            step = min(first, max(STEP_SHARE * trainer.collective_timeout_s, least))
        return cls(first, step, section.files_s, section.stacks_s)
