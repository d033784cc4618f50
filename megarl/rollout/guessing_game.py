"""An example of a game: the policy guesses a number, and is told whether it is higher or lower."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from megarl.reward.verifiers import numbers
from megarl.rollout.environment import Environment, Messages, Observation, Turn, environment


@environment
class GuessingGame(Environment):
    """A number from `low` to `high`, drawn by the seed. The first number in a turn is the guess; the right one ends the game
    with 1, less `turn_cost` for each turn before, and 0 at least. The row is not looked at."""

    def __init__(self, low: int = 1, high: int = 100, turn_cost: float = 0.1) -> None:
        if low > high:
            raise ValueError(f"environment.options: low = {low} is above high = {high}")
        self._low, self._high, self._cost = low, high, turn_cost
        self._turns = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages | None:
        """The rules."""
        self._number = random.Random(seed).randint(self._low, self._high)
        return f"I think of a whole number from {self._low} to {self._high}. Guess it; say one number."

    def step(self, turn: Turn) -> Observation:
        """Whether the number is higher or lower."""
        found = numbers(turn.text)
        self._turns += 1
        if not found:
            return Observation("Say one number.")
        if found[0] == self._number:
            return Observation(reward=max(0.0, 1.0 - self._cost * (self._turns - 1)), done=True)
        return Observation("Higher." if found[0] < self._number else "Lower.")
