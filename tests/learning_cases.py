"""Small runs in which a policy that knows nothing has to learn: one for each algorithm that matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.runs import tiny_recipe, tiny_run

STEPS = 120
LAST = 5  # steps whose mean reward says what was learned
GOAL, CHANCE = 0.9, 0.15
TWO_UPDATES = {"mini_batch": 64, "micro_batch": {"max_tokens": 2048}}
# Advantages that no deviation is divided out of are a tenth of the others.
SMALL = {"algorithm__entropy_coefficient": 0.01}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "GRPO": {"algorithm__advantage": "grpo"},
    "Dr. GRPO": {"algorithm__advantage": "dr_grpo", "algorithm__aggregation": "fixed_length"} | SMALL,
    "RLOO": {"algorithm__advantage": "rloo"} | SMALL,
    "REINFORCE++": {"algorithm__advantage": "reinforce_plus_plus"},
    "GSPO": {
        "algorithm__advantage": "grpo",
        "algorithm__policy_loss": {"kind": "gspo", "low": 0.2, "high": 0.28},
        "algorithm__aggregation": "sequence_mean",
    },
    "CISPO": {"algorithm__advantage": "grpo", "algorithm__policy_loss": {"kind": "cispo"}},
    "DAPO": {
        "algorithm__advantage": "grpo",
        "algorithm__policy_loss": {"kind": "clip", "low": 0.2, "high": 0.28},
        "algorithm__dynamic_sampling": {"max_rounds": 3},
        "algorithm__overlong": {"buffer": 2, "penalty": 0.01},
    },
    "PPO": {
        "algorithm__advantage": "gae",
        "algorithm__gae": {"discount": 1.0, "smoothing": 0.95},
        "algorithm__value_loss": {"clip": 0.2},
        "critic": {"optimizer": {"lr": 1e-2}},
        "phases__critic_value": {"micro_batch": {"max_tokens": 2048}},
        "phases__critic_update": TWO_UPDATES,
    },
}


def write_data(folder: Path) -> None:
    """A random model of two layers, and a hundred sums."""
    tiny_run(folder, layers=2)
    rows = [{"question": f"{a}+{b}", "answer": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rewards_of(lines: list[dict[str, Any]]) -> list[float]:
    """The mean reward of all that was sampled in each step: dynamic sampling trains on the groups that differ alone."""
    return [line.get("reward/sampled_mean", line["reward/mean"]) for line in lines]


def learning_recipe(folder: Path, algorithm: str, seed: int) -> tuple[str, Path]:
    """The name of a run and its recipe: one rank, one engine, 128 completions of 8 tokens a step in two updates."""
    name = f"{''.join(letter for letter in algorithm.lower() if letter.isalnum())}-{seed}"
    changes = {
        "run__seed": seed,
        "reward": [{"kind": "function", "target": "tests.rewards:parity"}],
        "algorithm__group_size": 8,
        # Without one a policy soon says odd digits to all questions, and no group differs any more.
        "algorithm__entropy_coefficient": 0.03,
        "rollout__max_new_tokens": 8,
        "phases__rollout": {"prompts": 16, "max_concurrent": 128},
        "phases__actor_logprob": {"micro_batch": {"max_tokens": 2048}},
        "phases__actor_update": TWO_UPDATES,
        "actor__optimizer": {"lr": 5e-3},
        "trainer__collective_timeout_s": 300,
    } | ALGORITHMS[algorithm]
    return name, tiny_recipe(folder, name, False, 1, 1, 1, STEPS, **changes)
