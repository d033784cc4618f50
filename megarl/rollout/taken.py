"""What a step takes from its stream, and the streams without engines, which know each step's batch beforehand.

In a supervised run a row of data becomes one sequence, or two for a pair, the chosen one first. From there on a sequence is
a sample like any other: its own tokens are those that are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from megarl.algorithm.estimate import greedy_baselines
from megarl.data.prompts import PromptStream
from megarl.data.sample import Prompt, Sample
from megarl.planner.lengths import QUANTILES
from megarl.recipe.recipe import Recipe
from megarl.reward.workers import RewardResult
from megarl.rollout.groups import GroupFacts, GroupResult, RolloutBatch, RolloutExecuted, refuse_overlong
from megarl.schedule import PlanMismatch

Resync = Callable[[Sequence[int]], None]


@dataclass(frozen=True)
class Taken:
    """What a step trains on, and metrics of the groups that it passed over."""

    rollouts: RolloutBatch
    rewards: RewardResult
    greedy_rewards: RewardResult | None
    metrics: dict[str, float]
    teachers: dict[int, str] = field(default_factory=dict)  # the teacher of each group by its id

    def baselines(self, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
        """Return the baseline of each rollout from its prompt's greedy completion, which rollouts still count, and metrics;
        all [rollouts], as `valid`. For rollouts with greedy completions."""
        greedy, rewards = self.rollouts.greedy, self.greedy_rewards
        assert greedy is not None and rewards is not None, "what was sampled was scored"
        scored = rewards.valid & np.isfinite(rewards.rewards)
        return *greedy_baselines(rewards.rewards, scored, valid), {
            "rollout/greedy_tokens": int(greedy.own_lengths.sum()),
            "reward/greedy_mean": float(rewards.rewards[scored].mean()),
            "reward/num_greedy_masked": int((~scored).sum()),
            "reward/busy_s": self.rewards.busy_s + rewards.busy_s,
        }

    def check(self, recipe: Recipe) -> None:
        """Compare what engines and reward workers ran with the plan. Raises PlanMismatch, and ValueError for sequences that
        are too long or if no completion could be scored."""
        if recipe.run.is_supervised:
            return  # rows that are too long were left out, and nothing ran
        section, rollouts, rewards = recipe.phases.rollout, self.rollouts, self.rewards
        planned = (section.prompts, recipe.num_rollouts, section.max_concurrent)
        ran = (rollouts.executed.prompts, len(rollouts.last_segments), rollouts.executed.max_concurrent)
        if ran != planned:
            raise PlanMismatch(f"phase rollout: planned (prompts, rollouts, max_concurrent) {planned}, executed {ran}")
        refuse_overlong(rollouts, recipe)
        if recipe.algorithm.advantage == "remax":
            num_greedy = 0 if rollouts.greedy is None else len(rollouts.greedy.last_segments)
            if rollouts.greedy is None or num_greedy != section.prompts:
                raise PlanMismatch(f"phase rollout: planned {section.prompts} greedy completions, executed {num_greedy}")
            refuse_overlong(rollouts.greedy, recipe)
        task, tasks = recipe.phases.reward.sequences, rewards.task_sequences
        # All tasks of a round are full but the last one, unless a task found no tokens and its groups came once more.
        if recipe.rollout.max_staleness == 0 and "rollout/num_sampled_again" not in self.metrics:
            rounds = int(self.metrics.get("rollout/rounds", 1))
            num = sum(tasks) // rounds
            full = rounds * [min(task, num - first) for first in range(0, num, task)]
            if list(tasks) != sorted(full, reverse=True):
                raise PlanMismatch(f"phase reward: planned tasks of {tuple(full)} sequences, executed {tasks}")
        elif max(tasks, default=0) > task:
            raise PlanMismatch(f"phase reward: planned tasks of at most {task} sequences, executed {tasks}")
        if not rewards.valid.any():
            sample, reason = next(iter(rewards.failures.items()))
            raise ValueError(f"no completion could be scored; sample {sample}: {reason}")


class KnownBatches:
    """The members of `RolloutStream` where there are no engines: nothing is sampled, paused or under way."""

    def __init__(self, recipe: Recipe, prompts: PromptStream) -> None:
        self._recipe, self._prompts = recipe, prompts

    def next_part(self, num_groups: int, resync: Resync) -> NoReturn:
        """Refuse: a recipe without engines starts no phase early."""
        raise AssertionError("checking the recipe refuses `start: early` without engines")

    def sample(self, prompts: Sequence[Any], sampling: Any, resync: Resync | None = None, answers: bool = False) -> NoReturn:
        """Refuse: a recipe without engines has no evaluation that samples."""
        raise AssertionError("checking the recipe refuses an evaluation of rollouts without engines")

    def pause(self) -> None:
        """Return at once: no engine changes its weights."""

    def resume(self, version: int, engines: Sequence[int] | None) -> None:
        """Return at once: no engine has changed its weights."""

    def follow(self, reports: Sequence[Any]) -> None:
        """Return at once: no engine reports."""

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {"prompts": self._prompts.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._prompts.restore(state["prompts"])

    def prompt_metrics(self) -> dict[str, float]:
        """Return the metrics `data/...`."""
        return self._prompts.metrics()


# Rows of data in place of rollouts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataPayload:
    """The samples of a batch themselves; rank 0 sends them to every rank."""

    samples: tuple[Sample, ...]

    def fetch(self, sample_ids: Iterable[int]) -> dict[int, Sample]:
        return {sample: self.samples[sample] for sample in sample_ids}


def batch_of_rows(prompts: Sequence[Prompt]) -> RolloutBatch:
    """Return the sequences of some rows, in their order."""
    groups = [GroupResult.of_examples(prompt) for prompt in prompts]
    samples = tuple(group.sample(number) for group in groups for number in range(len(group.lengths)))
    executed = RolloutExecuted(len(groups), len(groups[0].lengths), 0)
    batch = RolloutBatch.of([GroupFacts.of(group) for group in groups], DataPayload(samples), executed, {})
    metrics: dict[str, float] = {
        "tokens/prompt": int(batch.prompt_lengths.sum()),
        "tokens/completion": int(batch.completion_lengths.sum()),
        "tokens/trained": int(batch.own_lengths.sum()),
        **{f"data/length_p{q:02d}": float(np.percentile(batch.lengths, q)) for q in QUANTILES},
    }
    return replace(batch, metrics=metrics)


class DatasetStream(KnownBatches):
    """Answers as `RolloutStream` does, from rows of data."""

    _taken: Taken | None = None

    def begin(self, step: int) -> None:
        """Take the rows of the next step."""
        batch = batch_of_rows(self._prompts.take(self._recipe.phases.rollout.prompts))
        rewards = RewardResult(np.zeros(len(batch), np.float32), np.ones(len(batch), bool), {}, {}, 0, ())
        self._taken = Taken(batch, rewards, None, {})

    def wait_sampled(self, resync: Resync) -> None:
        """Return at once: nothing is sampled."""

    def take(self) -> Taken:
        """Return the sequences of the step, none of them masked."""
        assert self._taken is not None, "begin comes first"
        return self._taken
