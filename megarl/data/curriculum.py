"""Which prompts are worth their completions now: those that are passed sometimes, neither never nor always."""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.recipe.data_section import CurriculumSection


class Curriculum:
    """The last pass rates of the rows of one source.

    A row outside of the bounds is passed over in `revisit` epochs and taken in the next one, so that its rate can change;
    no row is passed over for ever, and there is always a next one.
    """

    def __init__(self, section: CurriculumSection) -> None:
        self._section = section
        self.rates: dict[int, float] = {}
        self._passed_over: dict[int, int] = {}  # how often since it was last taken

    def passes_over(self, row: int) -> bool:
        """Whether the row's turn is left out; counts that it is."""
        if row not in self.rates or self._in_bounds(self.rates[row]):
            return False
        times = self._passed_over.get(row, 0)
        self._passed_over[row] = (times + 1) % (self._section.revisit + 1)
        return times < self._section.revisit

    def learn(self, row: int, rewards: np.ndarray) -> None:
        """The rewards of a group of completions to the row's prompt, float32; without any they say nothing."""
        if len(rewards):
            # In the rewards' own precision: 0.9 in float32 is below 0.9 in float64.
            self.rates[row] = float((rewards >= np.float32(self._section.pass_reward)).mean())

    @property
    def num_in_bounds(self) -> int:
        """Rows with a rate in the bounds."""
        return sum(map(self._in_bounds, self.rates.values()))

    def state(self) -> dict[str, Any]:
        """All that `restore` needs, as plain values."""
        return {"rates": dict(self.rates), "passed_over": dict(self._passed_over)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.rates, self._passed_over = dict(state["rates"]), dict(state["passed_over"])

    def _in_bounds(self, rate: float) -> bool:
        return self._section.low <= rate <= self._section.high
