"""Advantages, losses and corrections in whole runs: no layout changes their numbers, and a resume keeps their state."""

from pathlib import Path
from typing import Any

import pytest

from tests.runs import fake_rollouts, figures, tiny_recipe, tiny_run, train_on_ranks

STEPS = 3
LOSSES = ("actor/loss", "actor/policy_loss", "actor/grad_norm", "actor/clip_fraction")
TWO_UPDATES: dict[str, Any] = {
    "phases__actor_update": {"mini_batch": 8, "micro_batch": {"max_tokens": 64}, "epochs": 2},
    "phases__actor_logprob": {"micro_batch": {"max_tokens": 48}},
}
REFERENCE: dict[str, Any] = {"phases__reference_logprob": {"micro_batch": {"sequences": 4}}}
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gspo": (
        TWO_UPDATES | REFERENCE | {
            "algorithm__advantage": "rloo",
            "algorithm__policy_loss": {"kind": "gspo", "low": 0.01, "high": 0.02},
            "algorithm__aggregation": "sequence_mean",
            "algorithm__kl": {"place": "loss", "coefficient": 0.05, "estimator": "k3", "adaptive": {"target": 1e-4}},
            "algorithm__mismatch": {"correction": "truncate", "level": "sequence", "cap": 1.5},
        },
        ("actor/kl", "actor/kl_coefficient", "mismatch/weight_mean", "mismatch/weight_max", "mismatch/beyond_cap_share"),
    ),
    "cispo": (
        TWO_UPDATES | REFERENCE | {
            "algorithm__advantage": "reinforce_plus_plus",
            "algorithm__policy_loss": {"kind": "cispo", "low": 0.05, "high": 0.05},
            "algorithm__kl": {"place": "reward", "coefficient": 0.05, "estimator": "k1"},
            "algorithm__mismatch": {"correction": "mask", "level": "token", "cap": 1.05},
        },
        ("actor/kl", "mismatch/weight_mean", "mismatch/beyond_cap_share"),
    ),
    "gmpo": (
        TWO_UPDATES | {
            "algorithm__advantage": "dr_grpo",
            "algorithm__policy_loss": {"kind": "gmpo", "low": 0.05, "high": 0.05},
            "algorithm__aggregation": "fixed_length",
            "algorithm__overlong": {"mask": True, "buffer": 6, "penalty": 0.5},
        },
        ("reward/overlong_penalty_mean", "reward/overlong_masked"),
    ),
    "function": (
        TWO_UPDATES | {
            "algorithm__advantage": "tests.own_algorithms:centred",
            "algorithm__policy_loss": {
                "kind": "function", "target": "tests.own_algorithms:bounded", "options": {"bound": 0.1},
            },
            "algorithm__aggregation": "sequence_sum",
        },
        (),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("algorithms")
    tiny_run(path)
    fake_rollouts(path, STEPS)
    return path


def recipe(folder: Path, name: str, ranks: int, changes: dict[str, Any], tensor: int = 1, steps: int = STEPS) -> Path:
    changes = {"rollout__replay": str(folder / "rollouts")} | changes
    return tiny_recipe(folder, name, False, ranks, tensor, 1, steps, **changes)


@pytest.mark.layout
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_numbers_of_one(folder: Path, name: str) -> None:
    changes, more = CASES[name]
    train_on_ranks(recipe(folder, f"{name}-1", 1, changes))
    train_on_ranks(recipe(folder, f"{name}-2", 2, changes, tensor=1 if name == "cispo" else 2))
    one, two = figures(folder, f"{name}-1"), figures(folder, f"{name}-2")
    assert len(one) == len(two) == STEPS
    for alone, together in zip(one, two, strict=True):
        for key in (*LOSSES, *more):
            assert together[key] == pytest.approx(alone[key], rel=2e-3, abs=1e-5), (key, alone["step"])
        assert alone["actor/grad_norm"] > 0
    assert any(line["actor/clip_fraction"] > 0 for line in one), "bounds this close are reached"


def test_a_resume_goes_on_with_the_kl_coefficient(folder: Path) -> None:
    changes = CASES["gspo"][0] | {"run__checkpoint_every": 1}
    train_on_ranks(recipe(folder, "whole", 1, changes))
    train_on_ranks(recipe(folder, "cut", 1, changes, steps=1))
    train_on_ranks(recipe(folder, "cut", 1, changes), resume=True)
    whole, cut = ([line["actor/kl_coefficient"] for line in figures(folder, name)] for name in ("whole", "cut"))
    assert cut == whole and len(set(whole)) == STEPS and whole[0] == 0.05
