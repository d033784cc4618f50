"""Small runs in which a policy that knows nothing has to learn: the CPU's recipe of each algorithm that matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megarl.telemetry.metrics_file import mean_reward

RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "cpu"
LAST = 5  # steps whose mean reward says what was learned
GOAL, CHANCE = 0.9, 0.15
ALGORITHMS = {
    "GRPO": "grpo", "Dr. GRPO": "dr_grpo", "RLOO": "rloo", "REINFORCE++": "reinforce_plus_plus", "GSPO": "gspo",
    "CISPO": "cispo", "DAPO": "dapo", "PPO": "ppo",
}  # fmt: skip


def rewards_of(lines: list[dict[str, Any]]) -> list[float]:
    """The mean reward of what was sampled in each step."""
    return [mean_reward(line) for line in lines]


def learning_recipe(folder: Path, algorithm: str, seed: int, max_staleness: int = 0) -> tuple[str, Path]:
    """The name of a run in this folder and its recipe: the shipped one of an algorithm, or of a file's name, under another
    seed, and with stale tokens."""
    recipe = yaml.safe_load((RECIPES / f"{ALGORITHMS.get(algorithm, algorithm)}.yaml").read_text())
    name = f"{recipe['run']['name']}-{max_staleness}-{seed}"
    recipe["run"] |= {"name": name, "seed": seed, "dir": str(folder)}
    if max_staleness:
        recipe["rollout"]["max_staleness"] = max_staleness
        recipe["weight_sync"] = {"in_flight": "keep"}
        recipe["algorithm"]["mismatch"] = {"correction": "truncate"}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return name, file
