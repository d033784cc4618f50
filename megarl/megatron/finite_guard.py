"""What a step does about numbers that are not finite: `run.on_not_finite` ends the run, or leaves out what they would spoil.

Everything here is decided by numbers that all ranks have alike, so that all ranks stop, mask or go on together.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megarl.megatron.batch import Batch
from megarl.megatron.finite import NotFinite, describe_results, wrong_samples
from megarl.megatron.role import Engine, Update
from megarl.schedule import MiniBatch

logger = logging.getLogger(__name__)
ADVICE = (
    "go on from the last checkpoint with a lower learning rate, or take trainer.precision: bf16 or fp32; "
    "run.on_not_finite: skip leaves such updates and samples out"
)


class FiniteGuard:
    """The recipe's policy, and how often a step had need of it."""

    def __init__(self, policy: Literal["stop", "skip"], rank: int) -> None:
        self._skips, self._rank = policy == "skip", rank
        self._updates = self._samples = 0

    def take_figures(self) -> dict[str, float]:
        """Updates and samples left out since the last time."""
        figures: dict[str, float] = {"finite/skipped_updates": self._updates, "finite/masked_samples": self._samples}
        self._updates = self._samples = 0
        return figures

    def rewards(self, batch: Batch) -> None:
        """Rewards that are too large for fp32. Raises NotFinite, or masks them."""
        wrong = np.flatnonzero(batch.valid & ~np.isfinite(batch.rewards)).tolist()
        if wrong:
            first = wrong[0]
            self._leave_out(
                f"phase reward: the reward of sample {first} (group {batch.groups[first]}) is {batch.rewards[first]} on "
                f"rank 0 ({len(wrong)} of {len(batch.rewards)} samples are like this)",
                wrong,
                batch,
            )

    def results(self, engine: Engine, mini_batch: MiniBatch, name: str, found: list[Tensor], batch: Batch) -> list[Tensor]:
        """A forward phase's results `found`, by sample; 0 for samples that are left out from here on. Raises NotFinite where
        the recipe says stop, where weights are to blame, or where no sample is left. Collective."""
        wrong = wrong_samples(found)
        if wrong:
            said = describe_results(mini_batch, name, found, wrong, engine.place)
            with engine.present():
                self._refuse_weights(engine, said)
            self._leave_out(said, wrong, batch)
        return [torch.zeros_like(one) if sample in wrong else one for sample, one in enumerate(found)]

    def update(self, engine: Engine, number: int, mini_batch: MiniBatch, update: Update) -> None:
        """An update of mini-batch `number`, perhaps refused. Raises NotFinite where the recipe says stop, or weights are to
        blame. Collective; weights are present, as for `weights`."""
        if update.refused is None:
            return
        said = f"phase {mini_batch.phase}, mini-batch {number}: {update.refused}"
        self._refuse_weights(engine, said)
        self._stop_or_say(f"{said}; no update was taken of it")
        self._updates += 1

    def weights(self, engine: Engine, phase: str) -> None:
        """Behind the updates of a phase. Raises NotFinite for weights that are not finite: no later step mends them, so they
        are neither published nor saved. Collective."""
        broken = engine.broken_weights()
        if broken is not None:
            raise NotFinite(f"phase {phase}: its updates left weights that are not finite ({broken}); {ADVICE}")

    def _leave_out(self, said: str, wrong: Sequence[int], batch: Batch) -> None:
        if not set(np.flatnonzero(batch.valid).tolist()) - set(wrong):
            raise NotFinite(f"{said}, and no other sample counts; {ADVICE}")
        self._stop_or_say(f"{said}; masked")
        mask(batch, wrong)
        self._samples += len(wrong)

    def _refuse_weights(self, engine: Engine, said: str) -> None:
        broken = engine.broken_weights()
        if broken is not None:
            raise NotFinite(f"{said}: the {engine.role}'s weights are broken ({broken}); {ADVICE}")

    def _stop_or_say(self, said: str) -> None:
        if not self._skips:
            raise NotFinite(f"{said}; {ADVICE}")
        if self._rank == 0:
            logger.warning("%s", said)


def mask(batch: Batch, samples: Sequence[int]) -> None:
    """Samples that count for nothing from here on. Their places stay, as the plan has them, with dummy tokens: what made
    their results no numbers would make gradients of a whole micro-batch none."""
    for number in samples:
        batch.valid[number] = False
        batch.masked.add(number)
        for field in batch.fields.values():
            field[number] = torch.zeros_like(field[number])
        sample = batch.samples.get(number)
        if sample is not None:
            none = np.zeros_like(sample.completion.token_ids)
            completion = replace(sample.completion, token_ids=none, logprobs=np.zeros_like(sample.completion.logprobs))
            batch.samples[number] = replace(sample, prompt_ids=np.zeros_like(sample.prompt_ids), completion=completion)
