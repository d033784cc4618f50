"""What is wrong with a recipe: one violation per fault, all of them at once, with the nearest legal value."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megarl.schedule.schedule import nearest_legal


def shown(value: Any) -> str:
    """Return a value as errors show it: on one line, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class Violation:
    """One fault: the dotted key, its value, the rule that it breaks, and the nearest legal value or key."""

    key: str
    value: Any
    rule: str
    nearest: str = ""

    @property
    def shown_value(self) -> str:
        """The value on one line, cut where it is long."""
        return shown(self.value)

    def __str__(self) -> str:
        way_out = f"; nearest: {self.nearest}" if self.nearest else ""
        return f"{self.key} = {self.shown_value}: {self.rule}{way_out}"


class RecipeError(ValueError):
    """A recipe cannot run; `violations` holds every fault."""

    def __init__(self, violations: list[Violation]) -> None:
        self.violations = violations
        super().__init__("\n".join(str(violation) for violation in violations))


class _Marker(Enum):
    """Shown where there is no value."""

    MISSING = "(missing)"
    GIVEN = "(given)"

    def __repr__(self) -> str:
        return self.value


MISSING, GIVEN = _Marker
# Legal numbers are searched this far from a wrong one; sizes in a recipe may be huge.
SEARCH = 10_000


def closest_text(value: Any, options: Iterable[Any]) -> str:
    """The option that looks most like the value; the first where none does."""
    options = [str(option) for option in options]
    return (difflib.get_close_matches(str(value).lower(), options, 1, 0.4) or options[:1] or [""])[0]


def closest_number(value: int, legal: Callable[[int], bool], high: int) -> str:
    """The legal number in 1 ... `high` nearest to the value, the smaller of two; '' where none is near."""
    start = min(max(value, 1), high)
    candidates = range(max(1, start - SEARCH), min(high, start + SEARCH) + 1)
    return nearest_legal(filter(legal, candidates), value)


Violations = Iterator[Violation]
