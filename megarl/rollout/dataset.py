"""Rows of data in place of rollouts: the stream of a supervised run, and the loss on its held-out rows.

A row becomes one sequence, or two for a pair, the chosen one first. From there on a sequence is a sample like any other:
its own tokens are those that are trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.data.prompts import PromptStream
from megarl.data.sample import Prompt, Sample
from megarl.megatron.non_finite import NotFinite
from megarl.megatron.parallel import broadcast_from_first
from megarl.planner.lengths import QUANTILES
from megarl.recipe.evaluation_section import EvaluationSection
from megarl.recipe.recipe import Recipe
from megarl.reward.workers import RewardResult
from megarl.rollout.evaluation import HeldOutPrompts
from megarl.rollout.groups import RolloutBatch, RolloutExecuted
from megarl.rollout.taken import KnownBatches, Resync, Taken


@dataclass(frozen=True)
class DataPayload:
    """The samples of a batch themselves; rank 0 sends them to every rank."""

    samples: tuple[Sample, ...]

    def fetch(self, sample_ids: Iterable[int]) -> dict[int, Sample]:
        return {sample: self.samples[sample] for sample in sample_ids}


def batch_of_rows(prompts: Sequence[Prompt]) -> RolloutBatch:
    """Return the sequences of some rows, in their order."""
    samples = tuple(example.sample(prompt.index) for prompt in prompts for example in prompt.examples)
    own_lengths = np.array([int(sample.completion.own.sum()) for sample in samples])
    prompt_lengths = np.array([len(sample.prompt_ids) for sample in samples])
    lengths = np.array([len(sample.completion.token_ids) for sample in samples])
    prefixes: dict[bytes, int] = {}  # the sequences of a pair may have different prompts
    return RolloutBatch(
        payload=DataPayload(samples),
        groups=np.array([sample.group for sample in samples]),
        prompt_lengths=prompt_lengths,
        completion_lengths=lengths,
        finish_reasons=["stop"] * len(samples),
        first_version=np.zeros(len(samples), np.int64),
        last_version=np.zeros(len(samples), np.int64),
        executed=RolloutExecuted(len(prompts), len(samples) // len(prompts), 0),
        metrics={
            "tokens/prompt": int(prompt_lengths.sum()),
            "tokens/completion": int(lengths.sum()),
            "tokens/trained": int(own_lengths.sum()),
            **{f"data/length_p{q:02d}": float(np.percentile(prompt_lengths + lengths, q)) for q in QUANTILES},
        },
        own_lengths=own_lengths,
        prefixes=np.array([prefixes.setdefault(sample.prompt_ids.tobytes(), len(prefixes)) for sample in samples]),
    )


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


class HeldOutRows(HeldOutPrompts):
    """Held-out rows, in batches of a step's size."""

    def batches(self) -> Iterator[tuple[RolloutBatch, np.ndarray]]:
        """Yield each batch with a mask of the sequences that count: the last batch is filled up with rows of the first."""
        size = self.recipe.phases.rollout.prompts
        for start in range(0, len(self.prompts), size):
            rows = self.prompts[start : start + size]
            filled = [*rows, *(self.prompts[number % len(self.prompts)] for number in range(size - len(rows)))]
            batch = batch_of_rows(filled)
            yield batch, np.arange(len(batch)) < len(rows) * batch.executed.group_size


@dataclass
class HeldOutLoss:
    """The metrics of held-out rows, each a mean over `weight` tokens or pairs, summed batch by batch."""

    area: str
    counts: dict[str, float]  # `HeldOutPrompts.counts`
    weight: float = 0.0
    sums: dict[str, float] | None = None

    def add(self, means: dict[str, float], weight: float) -> None:
        """Add the means of one batch."""
        sums = self.sums or dict.fromkeys(means, 0.0)
        self.sums = {name: sums[name] + weight * value for name, value in means.items()}
        self.weight += weight

    def _means(self) -> dict[str, float]:
        return {name: total / max(self.weight, 1.0) for name, total in (self.sums or {}).items()}

    def metrics(self, section: EvaluationSection) -> dict[str, float]:
        """Return the metrics, with their area."""
        return {f"{self.area}/{name}": mean for name, mean in self._means().items()} | self.counts

    def summary(self, section: EvaluationSection) -> str:
        """Return one line for a person."""
        shown = [f"{name} {mean:.4f}" for name, mean in self._means().items()]
        return f"{', '.join(shown)} on {self.counts[f'{self.area}/num_prompts']} held-out rows"

    def table(self) -> str:
        """Return no lines: rows of data have no answers."""
        return ""


# Returns the mean metrics of a batch's sequences that count, and over how many tokens or pairs.
Measure = Callable[[RolloutBatch, np.ndarray], tuple[dict[str, float], float]]


def held_out_loss(rows: HeldOutRows | None, measure: Measure, leaves: Callable[[], bool]) -> HeldOutLoss | None:
    """Measure every batch of the rows, which rank 0 has; returns None if the run `leaves`, which all ranks ask before each
    batch. Raises NotFinite if a mean is NaN or infinite. Collective."""
    loss = HeldOutLoss(*broadcast_from_first(None if rows is None else (rows.area, rows.counts)))
    batches = iter(()) if rows is None else rows.batches()
    while (batch := broadcast_from_first(next(batches, None))) is not None:
        if leaves():
            return None
        means, weight = measure(*batch)
        broken = [name for name, value in means.items() if not math.isfinite(value)]
        if broken:
            raise NotFinite(
                f"phase evaluation: {broken[0]} of held-out rows is {means[broken[0]]}: the weights are broken; go on from "
                "an earlier checkpoint"
            )
        loss.add(means, weight)
    return loss
