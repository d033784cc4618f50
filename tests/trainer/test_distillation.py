"""A random student reaches its teacher's reward from at most a third of the completions that GRPO takes for it, and within
ten minutes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import fmean

import pytest
import yaml

from tests.learning_cases import LAST, RECIPES, rewards_of
from tests.runs import megarl, train_on_ranks
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

pytestmark = [pytest.mark.learning, pytest.mark.nightly, pytest.mark.timeout(1800)]
SHARE, FEWER, WITHIN_S = 0.9, 3, 600


def run(folder: Path, kind: str, name: str, model: Path, teacher: Path | None = None) -> tuple[list[float], int]:
    """Of a shipped recipe's run with other models: the reward of each step, and completions of a step."""
    recipe = yaml.safe_load((RECIPES / f"{kind}.yaml").read_text())
    recipe["run"] |= {"name": name, "dir": str(folder)}
    recipe["model"]["path"] = str(model)
    if teacher is not None:
        recipe["teachers"]["sums"]["path"] = str(teacher)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(recipe))
    train_on_ranks(file, deadline_s=WITHIN_S)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return rewards_of(lines), recipe["phases"]["rollout"]["prompts"] * recipe["algorithm"]["group_size"]


def samples_until(rewards: list[float], per_step: int, goal: float) -> int:
    """Completions of the steps until the mean reward of LAST steps is at least `goal`; of all if it never is."""
    ends = range(LAST, len(rewards) + 1)
    return per_step * next((end for end in ends if fmean(rewards[end - LAST : end]) >= goal), len(rewards))


def test_a_student_takes_a_third_of_the_samples_of_grpo(tmp_path: Path) -> None:
    models = [save_tiny_model(tmp_path / f"model-{seed}", seed=seed, layers=2, head_dim=32) for seed in (0, 7)]
    for model in models:
        save_tiny_tokenizer(model)
    goal = SHARE * fmean(run(tmp_path, "grpo", "teacher", models[0])[0][-LAST:])
    teacher = tmp_path / "exported"
    megarl("export", str(tmp_path / "teacher"), str(teacher))
    begun = time.perf_counter()
    distilled = run(tmp_path, "distill", "distilled", models[1], teacher)
    spent_s = time.perf_counter() - begun
    scratch = run(tmp_path, "grpo", "scratch", models[1])
    print("distilled:", *(f"{reward:.2f}" for reward in distilled[0][::4]))
    print("GRPO:", *(f"{reward:.2f}" for reward in scratch[0][::8]))
    assert fmean(distilled[0][-LAST:]) >= goal and spent_s <= WITHIN_S
    assert FEWER * samples_until(*distilled, goal) <= samples_until(*scratch, goal)
