"""The rounds of rollouts and rewards of a step: one, or as many as `algorithm.dynamic_sampling` needs.

Every rank has the same lengths and rewards, so that all ranks choose the same groups and start the same rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megarl.algorithm.advantage import choose_groups, informative_groups
from megarl.recipe import Recipe
from megarl.reward.workers import RewardResult
from megarl.rollout.groups import RolloutBatch, join_rollouts


class SampledRounds:
    """Collects the rounds of a step, each of `phases.rollout.prompts` groups, and chooses as many groups for the batch."""

    def __init__(self, recipe: Recipe) -> None:
        self._section, self._wanted = recipe.algorithm.dynamic_sampling, recipe.phases.rollout.prompts
        self._size = recipe.algorithm.group_size
        overlong = recipe.algorithm.overlong
        self._masks_truncated = overlong is not None and overlong.mask
        self._rollouts: list[RolloutBatch] = []
        self._scored: list[RewardResult] = []
        self._informative = torch.zeros(0, dtype=torch.bool)  # [groups of all rounds]

    @property
    def complete(self) -> bool:
        """Whether there are enough informative groups, or rounds."""
        if self._section is None:
            return len(self._rollouts) == 1
        return len(self._rollouts) == self._section.max_rounds or int(self._informative.sum()) >= self._wanted

    def add(self, rollouts: RolloutBatch, scored: RewardResult) -> None:
        """Add a round."""
        self._rollouts.append(rollouts)
        self._scored.append(scored)
        counted = scored.valid & np.isfinite(scored.rewards)
        if self._masks_truncated:
            counted &= np.array([reason != "length" for reason in rollouts.finish_reasons])
        members = (-1, self._size)
        informative = informative_groups(
            torch.from_numpy(scored.rewards).reshape(members), torch.from_numpy(counted).reshape(members)
        )
        self._informative = torch.cat([self._informative, informative])

    def chosen(self) -> tuple[RolloutBatch, RewardResult, dict[str, float]]:
        """Return the rollouts and rewards of the chosen groups in the order of their prompts, and metrics of the others."""
        if self._section is None:
            return self._rollouts[0], self._scored[0], {}
        groups = choose_groups(self._informative, self._wanted)
        samples = [group * self._size + member for group in groups for member in range(self._size)]
        rollouts = join_rollouts(self._rollouts, samples)
        rewards = np.concatenate([scored.rewards for scored in self._scored])
        valid = np.concatenate([scored.valid for scored in self._scored])
        informative = int(self._informative.sum())
        used = int(self._informative[groups].sum())
        tokens = sum(int(batch.own_lengths.sum()) for batch in self._rollouts)
        played = [batch.episodes for batch in self._rollouts if batch.episodes is not None]
        sampled: dict[str, float] = {}
        if played:
            failures, malformed = (
                np.concatenate([getattr(episodes, name) for episodes in played]) for name in ("failures", "malformed")
            )
            sampled = {
                "rollout/sampled_failed_share": float((failures != "").mean()),
                "rollout/sampled_malformed_calls": int(malformed.sum()),
            }
        return rollouts, _join_rewards(self._scored, samples), {
            "rollout/rounds": len(self._rollouts),
            "rollout/extra_prompts": (len(self._rollouts) - 1) * self._wanted,
            "rollout/uninformative_groups": len(self._informative) - informative,
            "rollout/surplus_groups": informative - used,
            "rollout/filler_groups": self._wanted - used,
            "rollout/discarded_tokens": tokens - int(rollouts.own_lengths.sum()),
            "reward/sampled_mean": float(rewards[valid].mean()),
            **sampled,
        }  # fmt: skip


def _join_rewards(parts: Sequence[RewardResult], samples: Sequence[int]) -> RewardResult:
    """Join the rewards of `samples`, numbered through all parts; counts and seconds cover everything that was scored."""
    place = {sample: number for number, sample in enumerate(samples)}
    failures: dict[int, str] = {}
    start = 0
    for part in parts:
        failures |= {place[start + at]: why for at, why in part.failures.items() if start + at in place}
        start += len(part.rewards)
    chosen, valid = list(samples), np.concatenate([part.valid for part in parts])
    return replace(
        parts[-1],
        rewards=np.concatenate([part.rewards for part in parts])[chosen],
        valid=valid[chosen],
        parts={name: np.concatenate([part.parts[name] for part in parts])[chosen] for name in parts[0].parts},
        failures=failures,
        num_masked_beside=int((~valid).sum() - (~valid[chosen]).sum()),
        num_timeouts=sum(part.num_timeouts for part in parts),
        task_sequences=tuple(size for part in parts for size in part.task_sequences),
        busy_s=sum(part.busy_s for part in parts),
        counts={name: sum(part.counts[name] for part in parts) for name in parts[0].counts},
    )
