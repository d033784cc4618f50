"""Rows of data in place of rollouts: the stream of a supervised run, and the loss on its held-out rows.

A row becomes one sequence, or two for a pair, the chosen one first. From there on a sequence is a sample like any other:
its own tokens are those that are trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megarl.data.prompts import PromptStream
from megarl.data.sample import Prompt, Sample
from megarl.megatron.non_finite import NotFinite
from megarl.megatron.parallel import broadcast_from_first
from megarl.planner.lengths import QUANTILES
from megarl.recipe.recipe import Recipe
from megarl.reward.workers import RewardResult
from megarl.rollout.evaluation import HeldOut
from megarl.rollout.groups import GroupFacts, GroupResult, RolloutBatch, RolloutExecuted
from megarl.rollout.taken import KnownBatches, Resync, Taken
from megarl.telemetry.run_writer import Measured


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

    def __init__(self, recipe: Recipe, rows: PromptStream) -> None:
        super().__init__(rows)
        self._per_step = recipe.phases.rollout.prompts
        self._batch: RolloutBatch | None = None

    def begin(self, step: int) -> None:
        """Take the rows of the next step."""
        self._batch = batch_of_rows(self._prompts.take(self._per_step))

    def wait_sampled(self, resync: Resync) -> None:
        """Return at once: nothing is sampled."""

    def take(self) -> Taken:
        """Return the sequences of the step, none of them masked."""
        assert self._batch is not None, "begin comes first"
        count = len(self._batch)
        return Taken(self._batch, RewardResult(np.zeros(count, np.float32), np.ones(count, bool), {}, {}, 0, ()), None, {})


def _batches(held_out: HeldOut) -> Iterator[tuple[RolloutBatch, np.ndarray]]:
    """Yield the rows in batches of a step's size with a mask of the sequences that count: the last batch is filled up with
    rows of the first."""
    size, every = held_out.recipe.phases.rollout.prompts, held_out.prompts
    for start in range(0, len(every), size):
        rows = every[start : start + size]
        batch = batch_of_rows([*rows, *(every[number % len(every)] for number in range(size - len(rows)))])
        yield batch, np.arange(len(batch)) < len(rows) * batch.executed.group_size


# Returns the mean metrics of a batch's sequences that count, and over how many tokens or pairs.
Measure = Callable[[RolloutBatch, np.ndarray], tuple[dict[str, float], float]]


def held_out_loss(held_out: HeldOut | None, measure: Measure, leaves: Callable[[], bool]) -> Measured | None:
    """Measure every batch of held-out rows, which rank 0 has; returns the loss there. Returns None everywhere if the run
    `leaves`, which all ranks ask before each batch. Raises NotFinite if a mean is NaN or infinite. Collective."""
    batches, sums, total = iter(()) if held_out is None else _batches(held_out), dict[str, float](), 0.0
    while (batch := broadcast_from_first(next(batches, None))) is not None:
        if leaves():
            return None
        means, weight = measure(*batch)
        for name, value in means.items():
            if not math.isfinite(value):
                raise NotFinite(
                    f"phase evaluation: {name} of held-out rows is {value}: the weights are broken; go on from an earlier "
                    "checkpoint"
                )
        sums = {name: sums.get(name, 0.0) + weight * value for name, value in means.items()}
        total += weight
    if held_out is None:
        return None
    means = {name: value / total for name, value in sums.items()}
    summary = f"{', '.join(f'{name} {mean:.4f}' for name, mean in means.items())} on {len(held_out.prompts)} held-out rows"
    return Measured({f"{held_out.area}/{name}": mean for name, mean in means.items()} | held_out.counts, summary)
