"""How good was what the policy sampled in a step? One figure for everybody who shows or judges it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def mean_reward(figures: Mapping[str, Any]) -> Any:
    """The mean reward of all that a step sampled, as a line of metrics has it: a number, or None without one.

    Under `algorithm.dynamic_sampling` `reward/mean` is of groups that were chosen because their rewards differ, and can
    stand still while the policy learns; `reward/sampled_mean` is of all rounds.
    """
    return figures["reward/sampled_mean"] if "reward/sampled_mean" in figures else figures.get("reward/mean")
