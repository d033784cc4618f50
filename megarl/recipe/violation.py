"""What is wrong with a recipe: one violation per fault, all of them at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Violation:
    """One fault: the dotted key, the value found there, the rule it breaks, the nearest legal value or key."""

    key: str
    value: Any
    rule: str
    nearest: str = ""

    def __str__(self) -> str:
        shown = repr(self.value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        way_out = f"; nearest: {self.nearest}" if self.nearest else ""
        return f"{self.key} = {shown}: {self.rule}{way_out}"


class RecipeError(ValueError):
    """A recipe cannot run; `violations` holds every fault found."""

    def __init__(self, violations: list[Violation]) -> None:
        self.violations = violations
        super().__init__("\n".join(str(violation) for violation in violations))


class _Missing:
    """Stands for the value of a key that is not there."""

    def __repr__(self) -> str:
        return "(missing)"


MISSING = _Missing()
