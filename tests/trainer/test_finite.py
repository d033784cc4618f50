"""Whole runs with a number that is not finite: `run.on_not_finite` leaves it out, or ends the run while weights are good."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megarl.megatron.non_finite import FiniteGuard, NotFinite
from megarl.megatron.objective import PolicyObjective
from megarl.megatron.role import Role
from megarl.trainer import Trainer
from tests.engine_cases import random_batch
from tests.ranks import run_ranks
from tests.runs import _train, metrics_of, replayed_recipe
from tests.supervised_cases import supervised_recipe, supervised_run

STEPS = 2
GROUP_SIZE = 4


def train_with_faults(recipe: str) -> None:
    """The reference gives one of sample 5's log-probabilities as no number in the first step, and the first mini-batch of
    the second step has an infinite loss."""
    forward, step, objective, running = Role.forward, Trainer.step, PolicyObjective.__call__, [0]
    updates = 0

    def noted(pipeline: Any, number: int) -> Any:
        running[0] = number
        return step(pipeline, number)

    def broken(engine: Any, batch: Any, mini_batch: Any, adapted: bool = True) -> Any:
        results, executed = forward(engine, batch, mini_batch, adapted)
        if running[0] == 1 and engine.role == "reference" and "logprobs" in results:
            results["logprobs"][5][0] = math.nan
        return results, executed

    def infinite(instance: Any, micro: Any, outputs: Any) -> Any:
        nonlocal updates
        loss, sums = objective(instance, micro, outputs)
        if running[0] == 2 and updates == 0:
            updates += 1
            return loss + math.inf, sums
        return loss, sums

    with (
        mock.patch.object(Role, "forward", broken),
        mock.patch.object(Trainer, "step", noted),
        mock.patch.object(PolicyObjective, "__call__", infinite),
    ):
        _train(recipe, False)


def test_skip_masks_samples_leaves_out_updates_and_counts_both(folder: Path) -> None:
    changes = {"run__on_not_finite": "skip", "reward": [{"kind": "function", "target": "tests.rewards:too_large"}]}
    run_ranks(train_with_faults, 2, str(replayed_recipe(folder, "skip", True, 2, 1, 2, STEPS, **changes)))
    first, second = metrics_of(folder, "skip")
    assert (first["finite/masked_samples"], first["finite/skipped_updates"]) == (GROUP_SIZE + 1, 0)
    assert (second["finite/masked_samples"], second["finite/skipped_updates"]) == (0, 1)
    assert second["schedule/actor_update/updates"] == 4 and second["actor/skipped_updates"] == 0, "no loss scale's"
    for line in (first, second):
        assert None not in line.values(), f"a figure is not finite: {line}"
        assert line["schedule/reference_logprob/tokens"] == line["schedule/reference_logprob/planned_tokens"]


def train_with_a_broken_weight(recipe: str, before: str) -> str:
    """A weight of the last rank is no number before the second step, or before its checkpoint. What each rank says."""
    function = getattr(Trainer, before)

    def broken(pipeline: Any, number: int) -> Any:
        if number == 2 and pipeline.rank == 1:
            pipeline.parts.roles["actor"].models[-1].decoder.final_layernorm.weight.data[0] = math.nan
        return function(pipeline, number)

    with mock.patch.object(Trainer, before, broken), pytest.raises(NotFinite) as failure:
        _train(recipe, False)
    return str(failure.value)


@pytest.mark.parametrize("before", ["step", "state"])
def test_broken_weights_are_named_on_every_rank_and_never_saved(folder: Path, before: str) -> None:
    """With skip as well: no sample or update is to blame."""
    changes = {"run__checkpoint_every": 1, "run__on_not_finite": "skip"}
    recipe = replayed_recipe(folder, f"broken-{before}", True, 2, 1, 2, STEPS, **changes)
    first, second = run_ranks(train_with_a_broken_weight, 2, str(recipe), before)
    assert first == second and "(rank 1: decoder.final_layernorm.weight)" in first
    if before == "step":
        assert first.startswith("phase actor_logprob: logprobs of sample 0 are nan at completion token 0 (")
        assert "data-parallel rank 0, rank 1; 16 of 16 samples): the actor's weights are broken" in first
    else:
        assert first.startswith("checkpoint of step 2: the actor's weights or moments are not finite")
    saved = sorted(path.name for path in (folder / "runs" / f"broken-{before}" / "checkpoints").iterdir())
    assert [name for name in saved if not name.endswith(".partial")] == ["step-000001"]


def train_with_a_broken_row(recipe: str) -> str:
    """A log-probability of the third sequence is no number. What the run says."""
    forward = Role.forward

    def broken(engine: Any, batch: Any, mini_batch: Any, adapted: bool = True) -> Any:
        results, executed = forward(engine, batch, mini_batch, adapted)
        results["logprobs"][2][0] = math.nan
        return results, executed

    with mock.patch.object(Role, "forward", broken), pytest.raises(NotFinite) as failure:
        _train(recipe, False)
    return str(failure.value)


def test_no_held_out_row_is_left_out_of_a_loss(tmp_path: Path) -> None:
    """With skip as well: the mean over the other rows is another one."""
    supervised_run(tmp_path)
    source = {"kind": "jsonl", "path": str(tmp_path / "held_out.jsonl"), "prompt_field": "messages"}
    recipe = supervised_recipe(tmp_path, "held", run__on_not_finite="skip", evaluation={"prompts": source})
    (message,) = run_ranks(train_with_a_broken_row, 1, str(recipe))
    assert message.startswith("phase evaluation, actor_logprob: logprobs of sample 2 are nan at completion token 0 ("), (
        message
    )
    assert "run.on_not_finite" not in message, "no key leaves a held-out row out"


def test_rewards_end_the_run_or_are_masked_and_never_all_of_them() -> None:
    for policy, wrong, message in (
        ("stop", [1], r"phase reward: the reward of sample 1 \(group 1\) is inf on rank 0 \(1 of 2 samples\)"),
        ("skip", [0, 1], "no other sample is valid"),
    ):
        batch = random_batch(9, [(3, 3)] * 2)
        batch.rewards[wrong] = np.inf
        with pytest.raises(NotFinite, match=message):
            FiniteGuard(policy, 0).rewards(batch)  # type: ignore[arg-type]
    batch, guard = random_batch(9, [(3, 3)] * 2), FiniteGuard("skip", 0)
    batch.rewards[1] = np.inf
    batch = guard.rewards(batch)
    assert batch.valid.tolist() == [True, False]
    assert guard.take_metrics() == {"finite/skipped_updates": 0, "finite/masked_samples": 1}
    assert guard.take_metrics()["finite/masked_samples"] == 0, "of one step each"
