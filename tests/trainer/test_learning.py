"""Each algorithm raises a tiny policy's reward from chance to 0.9, under three seeds, each run within five minutes."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from tests.learning_cases import ALGORITHMS, CHANCE, GOAL, LAST, learning_recipe, rewards_of
from tests.runs import train_on_ranks

pytestmark = [pytest.mark.learning, pytest.mark.nightly, pytest.mark.timeout(300)]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_reward_rises_from_chance(tmp_path: Path, algorithm: str, seed: int) -> None:
    name, recipe = learning_recipe(tmp_path, algorithm, seed)
    train_on_ranks(recipe)
    rewards = rewards_of([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()])
    print(f"{algorithm}, seed {seed}:", *(f"{reward:.2f}" for reward in rewards[::5]))
    assert rewards[0] < CHANCE and fmean(rewards[-LAST:]) >= GOAL, rewards
