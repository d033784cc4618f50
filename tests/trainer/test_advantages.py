"""What a step makes of its rewards before the update, against numbers worked out by hand: terms and masks of the recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithm.estimate import greedy_baselines
from megarl.megatron.batch import Batch
from megarl.recipe import load_recipe
from megarl.trainer import Trainer
from tests.runs import tiny_recipe


def pipeline(folder: Path, ppo: bool = False, **changes: Any) -> Trainer:
    """One that has a recipe and no engines."""
    recipe = load_recipe(tiny_recipe(folder, "recipe", ppo, 1, 1, 1, 1, **changes))
    return Trainer(recipe, 0, SimpleNamespace(roles={}, weights=None), None)  # type: ignore[arg-type]


def batch(rewards: list[float], lengths: list[int], truncated: list[bool] | None = None, **fields: Any) -> Batch:
    """Two groups, one half each."""
    half = len(rewards) // 2
    return Batch(
        prompt_lengths=np.full(len(rewards), 3), completion_lengths=np.array(lengths), groups=np.repeat([4, 2], half),
        rewards=np.array(rewards, np.float32), valid=np.ones(len(rewards), bool),
        truncated=None if truncated is None else np.array(truncated), fields=fields,
    )  # fmt: skip


def advantages(trainer: Trainer, of: Batch) -> tuple[list[list[float]], Batch, dict[str, Any]]:
    of, metrics = trainer._advantages(of)
    return [sample_advantages.tolist() for sample_advantages in of.fields["advantages"]], of, metrics


@pytest.mark.parametrize("masks", [True, False])
def test_long_completions_lose_reward_and_those_at_the_limit_may_be_masked(folder: Path, masks: bool) -> None:
    """Equation 13 of DAPO with a buffer of 4 of a tiny recipe's 12 tokens: 0 at 8, a quarter of 0.5 at 9, a half at 10."""
    overlong = {"mask": masks, "buffer": 4, "penalty": 0.5}
    trainer = pipeline(folder, algorithm__advantage="dr_grpo", algorithm__overlong=overlong)
    of = batch([1.0, 1.0, 0.0, 1.0, 0.5, 0.5], [8, 10, 12, 9, 1, 2], [False, False, True, False, False, False])
    token_advantages, of, metrics = advantages(trainer, of)
    # Rewards 1, 0.75 and -0.5: mean 0.875 with the mask, else 5 / 12. Rewards 0.875, 0.5, 0.5: mean 0.625.
    first_group = [0.125, -0.125, 0.0] if masks else [7 / 12, 1 / 3, -11 / 12]
    assert [row[0] for row in token_advantages] == pytest.approx([*first_group, 0.25, -0.125, -0.125], abs=1e-6)
    assert [len(row) for row in token_advantages] == [8, 10, 12, 9, 1, 2]
    assert of.valid.tolist() == [True, True, not masks, True, True, True]
    assert metrics.get("reward/overlong_masked") == (1 if masks else None)
    assert metrics["reward/overlong_penalty_mean"] == pytest.approx(-(0.25 + 0.5 + 0.125) / 6)


@pytest.mark.parametrize("scored", [[True] * 4, [True, False, False, False]])
def test_a_step_of_which_the_mask_leaves_nothing_ends_the_run(folder: Path, scored: list[bool]) -> None:
    """All that could be scored were cut off, one of the others was not."""
    trainer = pipeline(folder, algorithm__advantage="dr_grpo", algorithm__overlong={"mask": True})
    of = batch([1.0, 1.0, 0.0, 0.0], [12] * 4, [True] * 4 if all(scored) else [True, True, True, False])
    of = replace(of, valid=np.array(scored))
    message = (
        rf"no completion is left .* all {sum(scored)} valid ones reached rollout.max_new_tokens = 12, and .*overlong.mask"
    )
    with pytest.raises(ValueError, match=message):
        trainer._advantages(of)
    of = replace(of, truncated=np.array([True, True, False, True]), valid=np.ones(4, bool))
    of, _ = trainer._advantages(of)
    assert of.valid.tolist() == [False, False, True, False]


def test_kl_of_ppo_reaches_each_token_and_the_critic_is_judged(folder: Path) -> None:
    """Discount 0.99, smoothing 0.9 and a coefficient of 0.05, as the tiny recipe of PPO has them."""
    trainer = pipeline(folder, ppo=True, algorithm__gae={"discount": 0.99, "smoothing": 0.9, "whiten": False})
    logprobs, reference = ([torch.tensor(row) for row in rows] for rows in (([-1.0, -2.0], [-1.0]), ([-3.0, -1.0], [-1.0])))
    values = [torch.tensor([0.2, 0.4]), torch.tensor([0.1])]
    of = batch([1.0, 0.0], [2, 1], logprobs=logprobs, reference_logprobs=reference, values=values)
    token_advantages, of, metrics = advantages(trainer, of)
    last = 1.0 + 0.05 - 0.4
    first = -0.1 + 0.99 * 0.4 - 0.2 + 0.99 * 0.9 * last
    assert [value for row in token_advantages for value in row] == pytest.approx([first, last, -0.1], abs=1e-6)
    returns = torch.tensor([first + 0.2, last + 0.4, 0.0], dtype=torch.float64)
    assert torch.cat(list(of.fields["returns"])).tolist() == pytest.approx(returns.tolist(), abs=1e-6)
    assert metrics["critic/value_mean"] == pytest.approx(0.7 / 3)
    missed = returns - torch.tensor([0.2, 0.4, 0.1], dtype=torch.float64)
    explained = 1 - missed.var(correction=0) / returns.var(correction=0)
    assert metrics["critic/explained_variance"] == pytest.approx(float(explained), abs=1e-6)
    # Without a reward the second counts for neither figure, whatever its values are.
    of.valid[1] = False
    _, _, metrics = advantages(trainer, of)
    assert metrics["critic/value_mean"] == pytest.approx(0.6 / 2)
    explained = 1 - missed[:2].var(correction=0) / returns[:2].var(correction=0)
    assert metrics["critic/explained_variance"] == pytest.approx(float(explained), abs=1e-6)


def test_each_group_is_compared_with_its_own_greedy_completion(folder: Path) -> None:
    """And is masked where that one could not be scored."""
    trainer = pipeline(
        folder,
        algorithm__advantage="remax",
        algorithm__group_size=3,
        phases__actor_update={"mini_batch": 12, "micro_batch": {"max_tokens": 64}},
    )
    of = batch([1.0, 0.0, 0.5, 1.0, 0.0, 0.5], [1] * 6)
    scored = np.array([True, True])
    baselines, valid = greedy_baselines(np.array([0.25, 0.75]), scored, of.valid)
    token_advantages, _, _ = advantages(trainer, replace(of, baselines=baselines, valid=valid))
    assert [row[0] for row in token_advantages] == pytest.approx([0.75, -0.25, 0.25, 0.25, -0.75, -0.25])
    baselines, valid = greedy_baselines(np.array([np.nan, 0.75]), np.array([False, True]), of.valid)
    assert valid.tolist() == [False] * 3 + [True] * 3 and np.isfinite(baselines).all()
    with pytest.raises(ValueError, match="no prompt has both a completion and a greedy completion"):
        greedy_baselines(np.array([0.25, 0.75]), np.array([True, False]), valid)
