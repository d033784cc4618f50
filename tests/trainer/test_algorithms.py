"""Advantages, losses and corrections in whole runs: no layout changes their numbers, and a resume keeps their state."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stored
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megarl.recipe.phases_section import ENGINE_PHASES, PHASES
from megarl.telemetry.disk import read_lines
from tests.planner_cases import document_of
from tests.runs import copy_until, fake_rollouts, metrics_of, replayed_recipe, train_on_ranks

STEPS, MORE_STEPS = 3, 4
LOSSES = ("actor/loss", "actor/policy_loss", "actor/grad_norm", "actor/clip_fraction")
TWO_UPDATES: dict[str, Any] = {
    "phases__actor_update": {"mini_batch": 8, "micro_batch": {"max_tokens": 64}, "epochs": 2},
    "phases__actor_logprob": {"micro_batch": {"max_tokens": 48}},
}
REFERENCE: dict[str, Any] = {"phases__reference_logprob": {"micro_batch": {"sequences": 4}}}
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gspo": (TWO_UPDATES | REFERENCE | {
        "algorithm__advantage": "rloo", "algorithm__policy_loss": {"kind": "gspo", "low": 0.01, "high": 0.02},
        "algorithm__aggregation": "sequence_mean",
        "algorithm__kl": {"place": "loss", "coefficient": 0.05, "estimator": "k3", "adaptive": {"target": 1e-4}},
        "algorithm__mismatch": {"correction": "truncate", "level": "sequence", "cap": 1.5},
    }, ("actor/kl", "actor/kl_coefficient", "mismatch/weight_mean", "mismatch/weight_max", "mismatch/beyond_cap_share")),
    "cispo": (TWO_UPDATES | REFERENCE | {
        "algorithm__advantage": "reinforce_plus_plus",
        "algorithm__policy_loss": {"kind": "cispo", "low": 0.05, "high": 0.05},
        "algorithm__kl": {"place": "reward", "coefficient": 0.05, "estimator": "k1"},
        "algorithm__mismatch": {"correction": "mask", "level": "token", "cap": 1.05},
    }, ("actor/kl", "mismatch/weight_mean", "mismatch/beyond_cap_share")),
    "gmpo": (TWO_UPDATES | {
        "algorithm__advantage": "dr_grpo", "algorithm__policy_loss": {"kind": "gmpo", "low": 0.05, "high": 0.05},
        "algorithm__aggregation": "fixed_length", "algorithm__overlong": {"mask": True, "buffer": 6, "penalty": 0.5},
    }, ("reward/overlong_penalty_mean", "reward/overlong_masked")),
    "remax": (TWO_UPDATES | REFERENCE | {
        "algorithm__advantage": "remax", "algorithm__policy_loss": {"kind": "clip", "low": 0.05, "high": 0.05},
        "algorithm__kl": {"place": "loss", "coefficient": 0.05, "estimator": "k2"},
    }, ("actor/kl", "reward/greedy_mean", "rollout/greedy_tokens", "tokens/useful")),
    "function": (TWO_UPDATES | {
        "algorithm__advantage": "tests.own_algorithms:centred", "algorithm__aggregation": "sequence_sum",
        "algorithm__policy_loss": {"kind": "function", "target": "tests.own_algorithms:bounded", "options": {"bound": 0.1}},
    }, ()),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def greedy_rollouts(folder: Path) -> None:
    fake_rollouts(folder, MORE_STEPS, group_size=1, into=folder / "rollouts" / "greedy")


def recipe(
    folder: Path, name: str, ranks: int, changes: dict[str, Any], tensor: int = 1, steps: int = STEPS, ppo: bool = False
) -> Path:
    return replayed_recipe(folder, name, ppo, ranks, tensor, 1, steps, **changes)


def trained(folder: Path, name: str, ranks: int, changes: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """The figures of a run, which the tests of this file share."""
    if not (folder / "runs" / name).exists():
        train_on_ranks(recipe(folder, name, ranks, changes, **more))
    return metrics_of(folder, name)


# In CI one with clipping and corrections of sequences, and one with greedy completions and clipping of tokens.
@pytest.mark.layout
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("gspo", "remax") else pytest.mark.nightly) for name in CASES]
)
def test_two_ranks_give_the_numbers_of_one(folder: Path, name: str) -> None:
    changes, more = CASES[name]
    one_rank = trained(folder, f"{name}-1", 1, changes)
    two_ranks = trained(folder, f"{name}-2", 2, changes, tensor=1 if name == "cispo" else 2)
    assert len(one_rank) == len(two_ranks) == STEPS
    for alone, together in zip(one_rank, two_ranks, strict=True):
        for key in (*LOSSES, *more):
            assert together[key] == pytest.approx(alone[key], rel=2e-3, abs=1e-5), (key, alone["step"])
        assert alone["actor/grad_norm"] > 0
    assert any(line["actor/clip_fraction"] > 0 for line in one_rank), "bounds this close are reached"


def test_fixed_length_divides_by_the_longest_completion_there_may_be(folder: Path) -> None:
    """That is rollout.max_new_tokens, 12 in a tiny recipe, whatever came. The ratio of the only update is 1."""
    changes = {"algorithm__aggregation": "fixed_length", "telemetry__samples_per_step": 16}
    (line,) = trained(folder, "fixed_length", 1, changes, steps=1)
    rows = read_lines(folder / "runs" / "fixed_length" / "samples" / "step-000001.jsonl")
    assert len(rows) == 16
    loss = -sum(row["advantage"] * row["completion_tokens"] for row in rows) / 16 / 12
    assert line["actor/policy_loss"] == pytest.approx(loss, rel=1e-3) and abs(loss) > 1e-4


LR, LOWEST, UPDATES = 1e-3, 0.1, 4  # updates of each role in a step: of two mini-batches, twice
CRITIC_WARMUP, REFRESH = 1, 2
MOVING: dict[str, Any] = {
    "algorithm__early_stop": {"target_kl": 0.012},
    "algorithm__kl__adaptive": {"target": 1e-4},
    "critic__warmup_steps": CRITIC_WARMUP,
    "critic__optimizer": {"lr": LR, "decay": "linear", "warmup_steps": 2},
    "phases__critic_update": {"mini_batch": 8, "micro_batch": {"sequences": 2}, "epochs": 2},
    "actor__optimizer": {"lr": LR, "decay": "cosine", "warmup_steps": 1, "min_lr_share": LOWEST},
    "reference": {"refresh_every": REFRESH, "memory": {"offload": "all"}},
    "run__checkpoint_every": 1,
}  # fmt: skip


def weights(folder: Path, step: int, role: str) -> dict[str, torch.Tensor]:
    """A role's weights in a checkpoint, by their names without the role's."""
    directory = folder / "runs" / "moving-1" / "checkpoints" / f"step-{step:06d}" / role
    known = stored.FileSystemReader(directory).read_metadata().state_dict_metadata
    tensors = {
        name: metadata
        for name, metadata in known.items()
        if isinstance(metadata, TensorStorageMetadata) and name.startswith(f"{role}.")
    }
    loaded = {name: torch.empty(metadata.size, dtype=metadata.properties.dtype) for name, metadata in tensors.items()}
    stored.load(loaded, checkpoint_id=directory, no_dist=True)
    return {name.removeprefix(f"{role}."): weight for name, weight in loaded.items()}


def scheduled(update: int, updates: int, warmup: int, lowest: float, fall: Any) -> float:
    """The learning rate of an update, counted from 1: it rises to LR, and reaches `lowest` behind the last one."""
    if update <= warmup:
        return LR * update / warmup
    return LR * (lowest + (1 - lowest) * fall((update - warmup) / (updates + 1 - warmup)))


@pytest.mark.layout
def test_roles_move_as_the_recipe_says_and_after_a_resume(folder: Path) -> None:
    lines = trained(folder, "moving-1", 1, MOVING, steps=MORE_STEPS, ppo=True)
    copy_until(folder, "moving-1", MORE_STEPS - 1, "moving-resumed")
    train_on_ranks(recipe(folder, "moving-resumed", 1, MOVING, steps=MORE_STEPS, ppo=True), resume=True)
    assert metrics_of(folder, "moving-resumed") == lines
    assert len(lines) == MORE_STEPS
    stopped = 0
    for line in lines:
        step = line["step"]
        assert line["critic/warmup"] == int(step <= CRITIC_WARMUP)
        assert line["sync/version"] == max(0, step - CRITIC_WARMUP)
        critic = scheduled(UPDATES * step, UPDATES * MORE_STEPS, 2 * UPDATES, 0.0, lambda x: 1 - x)
        assert line["critic/learning_rate"] == pytest.approx(critic, rel=1e-9)
        if step <= CRITIC_WARMUP:
            assert not [key for key in line if "actor_update" in key or key.startswith("actor/")]
            continue
        skipped = line["actor/early_stopped_updates"]
        ran = line["schedule/actor_update/updates"]
        assert ran + skipped == UPDATES
        assert line["schedule/actor_update/planned_tokens"] > line["schedule/actor_update/tokens"] or not skipped
        assert line["actor/moved_kl"] == pytest.approx(line["actor/drift"], rel=1e-5), "k3 of the old policy against the new"
        number = UPDATES * (step - 1 - CRITIC_WARMUP) + ran  # as if none had been skipped
        total = UPDATES * (MORE_STEPS - CRITIC_WARMUP)
        actor = scheduled(number, total, UPDATES, LOWEST, lambda x: (1 + math.cos(math.pi * x)) / 2)
        assert line["actor/learning_rate"] == pytest.approx(actor, rel=1e-9)
        assert line["reference/of_step"] == step // REFRESH * REFRESH
        stopped += skipped > 0
    coefficients = [line["actor/kl_coefficient"] for line in lines[CRITIC_WARMUP:]]
    assert coefficients[0] == 0.05 and len(set(coefficients)) == MORE_STEPS - CRITIC_WARMUP
    early_stops = [(line.get("actor/early_stopped_updates"), line.get("actor/moved_kl")) for line in lines]
    assert 0 < stopped < MORE_STEPS - CRITIC_WARMUP, early_stops
    for step in range(1, MORE_STEPS + 1):
        reference, source = weights(folder, step, "reference"), weights(folder, max(1, step // REFRESH * REFRESH), "actor")
        assert reference.keys() == source.keys() and len(source) > 10
        assert all(torch.equal(source[name], weight) for name, weight in reference.items())
    assert not all(torch.equal(weight, reference[name]) for name, weight in weights(folder, 3, "actor").items())


IN_LOSS: dict[str, Any] = {
    "critic__warmup_steps": CRITIC_WARMUP,
    "algorithm__kl": {"place": "loss", "coefficient": 0.05, "estimator": "k1"},
}


@pytest.mark.layout
@pytest.mark.parametrize(
    ("name", "changes", "steps", "read_by_advantages"),
    [("warm-loss", IN_LOSS, 2, set()), ("moving-1", MOVING, MORE_STEPS, {"actor_logprob", "reference_logprob"})],
)
def test_while_the_critic_warms_up_the_planned_phases_run_and_no_other(
    folder: Path, name: str, changes: dict[str, Any], steps: int, read_by_advantages: set[str]
) -> None:
    """Log-probabilities only where advantages read them: with KL in the reward, as `moving-1` has it."""
    trained(folder, name, 1, changes, steps=steps, ppo=True)
    plan = document_of(folder / f"{name}.yaml")
    assert set(plan["warmup_phases"]) & set(ENGINE_PHASES) == {"critic_value", "critic_update"} | read_by_advantages
    for line in read_lines(folder / "runs" / name / "metrics.jsonl"):
        planned = plan["warmup_phases" if line["step"] <= CRITIC_WARMUP else "running_phases"]
        assert {phase for phase in PHASES if f"time/{phase}" in line} == set(planned), "phases that ran"
        executed = {phase for phase in ENGINE_PHASES if f"schedule/{phase}/sequences" in line}
        assert executed == set(planned) & set(ENGINE_PHASES), "plans that were executed"


@pytest.mark.nightly
@pytest.mark.layout
def test_roles_move_alike_on_two_ranks(folder: Path) -> None:
    alone = trained(folder, "moving-1", 1, MOVING, steps=MORE_STEPS, ppo=True)
    together = trained(folder, "moving-2", 2, MOVING, tensor=2, steps=MORE_STEPS, ppo=True)
    for line, other in zip(alone, together, strict=True):
        assert other.keys() == line.keys()
        of_actor = (*LOSSES[:3], "actor/kl", "actor/moved_kl", "actor/early_stopped_updates")
        compared = ("critic/loss", "critic/grad_norm", *of_actor)
        for key in compared if line["step"] > CRITIC_WARMUP else compared[:2]:
            assert other[key] == pytest.approx(line[key], rel=2e-3, abs=1e-5), (key, line["step"])
