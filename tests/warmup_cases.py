"""Recipes with supervised steps ahead of their rollouts, in the folder of `supervised_run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.runs import tiny_recipe
from tests.supervised_cases import LR, MINI_BATCH, STEPS

RL_STEPS = 3
SCHEDULE: dict[str, Any] = {"lr": LR, "warmup_steps": 1, "decay": "linear"}


def warm_recipe(folder: Path, name: str, ranks: int = 1, tensor: int = 1, **changes: Any) -> Path:
    """A run of STEPS supervised steps, those of `supervised_recipe`, and then of RL_STEPS steps with rollouts."""
    source = {"kind": "jsonl", "path": str(folder / "chats.jsonl"), "prompt_field": "messages"}
    supervised: dict[str, Any] = {
        "warmup__sft__steps": STEPS,
        "warmup__sft__data": {"prompts": source, "prompt_format": "messages", "max_tokens": 48},
        "warmup__sft__optimizer": dict(SCHEDULE),
        "warmup__sft__actor_update": {"mini_batch": MINI_BATCH, "micro_batch": {"max_tokens": 96}},
    }
    return rl_recipe(folder, name, STEPS + RL_STEPS, ranks, tensor, **supervised | changes)


def rl_recipe(folder: Path, name: str, steps: int, ranks: int = 1, tensor: int = 1, **changes: Any) -> Path:
    """A run with a reference, whose temperature, learning rate and schedule are of rollouts alone."""
    settings: dict[str, Any] = {
        "algorithm__kl": {"place": "loss", "coefficient": 0.05, "estimator": "k3"},
        "phases__reference_logprob": {"micro_batch": {"max_tokens": 64}},
        "actor__optimizer": {"lr": 1e-3, "decay": "cosine"},
        "rollout__temperature": 0.7,
    }
    return tiny_recipe(folder, name, False, ranks, tensor, 1, steps, **settings | changes)
