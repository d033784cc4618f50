"""An example of a game: the policy guesses a number, and learns whether it is higher or lower."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from megarl.reward.verifiers import numbers
from megarl.rollout.environment import Environment, Messages, Observation, Turn, environment


@environment
class GuessingGame(Environment):
    """Draws a number from `low` to `high` with the seed. The first number in a turn is the guess; the right guess ends the
    game with reward 1 minus `turn_cost` for each earlier turn, at least 0. The row is ignored."""

    def __init__(self, low: int = 1, high: int = 100, turn_cost: float = 0.1) -> None:
        if low > high:
            raise ValueError(f"environment.options: low = {low} is above high = {high}")
        self._low, self._high, self._cost = low, high, turn_cost
        self._turns = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages | None:
        """Return the rules."""
        self._number = random.Random(seed).randint(self._low, self._high)
        return f"I think of a whole number from {self._low} to {self._high}. Guess it; say one number."

    def step(self, turn: Turn) -> Observation:
        """Return whether the number is higher or lower."""
        guesses = numbers(turn.text)
        self._turns += 1
        if not guesses:
            return Observation("Say one number.")
        if guesses[0] == self._number:
            return Observation(reward=max(0.0, 1.0 - self._cost * (self._turns - 1)), done=True)
        return Observation("Higher." if guesses[0] < self._number else "Lower.")
