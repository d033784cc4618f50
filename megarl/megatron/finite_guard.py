"""What a step does about NaN and infinity: `run.on_not_finite` stops the run, or skips what they would spoil.

Everything here is decided by numbers that all ranks have alike, so that all ranks stop, mask or go on together.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
    """The policy of `run.on_not_finite`, and how often a step needed it."""

    def __init__(self, policy: Literal["stop", "skip"], rank: int) -> None:
        self._skips, self._rank = policy == "skip", rank
        self._updates = self._samples = 0

    def take_metrics(self) -> dict[str, float]:
        """Return how many updates and samples were skipped since the last call."""
        metrics: dict[str, float] = {"finite/skipped_updates": self._updates, "finite/masked_samples": self._samples}
        self._updates = self._samples = 0
        return metrics

    def rewards(self, batch: Batch) -> Batch:
        """Mask samples whose reward is too large for fp32. Raises NotFinite if the recipe says stop."""
        wrong = np.flatnonzero(batch.valid & ~np.isfinite(batch.rewards)).tolist()
        if not wrong:
            return batch
        first = wrong[0]
        message = (
            f"phase reward: the reward of sample {first} (group {batch.groups[first]}) is {batch.rewards[first]} on "
            f"rank 0 ({len(wrong)} of {len(batch.rewards)} samples are like this)"
        )
        return self._mask(message, wrong, batch)

    def results(
        self, engine: Engine, mini_batch: MiniBatch, name: str, results: list[Tensor], batch: Batch
    ) -> tuple[list[Tensor], Batch]:
        """Mask samples for which a forward phase computed NaN; return its results, 0 for these, and the batch.

        Raises NotFinite if the recipe says stop, if the weights are to blame, or if no sample is left. Collective.
        """
        wrong = wrong_samples(results)
        if not wrong:
            return results, batch
        message = describe_results(mini_batch, name, results, wrong, engine.place)
        with engine.present():
            self._refuse_weights(engine, message)
        batch = self._mask(message, wrong, batch)
        return [torch.zeros_like(result) if sample in wrong else result for sample, result in enumerate(results)], batch

    def update(self, engine: Engine, number: int, mini_batch: MiniBatch, update: Update) -> None:
        """Count an update of mini-batch `number` that was refused.

        Raises NotFinite if the recipe says stop, or if the weights are to blame. Collective; weights are present.
        """
        if update.refused is None:
            return
        message = f"phase {mini_batch.phase}, mini-batch {number}: {update.refused}"
        self._refuse_weights(engine, message)
        self._stop_or_warn(f"{message}; no update was taken of it")
        self._updates += 1

    def weights(self, engine: Engine, phase: str) -> None:
        """Raise NotFinite if the updates of a phase left weights that are not finite.

        No later step mends them, so they are neither published nor saved. Collective; weights are present.
        """
        broken = engine.broken_weights()
        if broken is not None:
            raise NotFinite(f"phase {phase}: its updates left weights that are not finite ({broken}); {ADVICE}")

    def _mask(self, message: str, wrong: Sequence[int], batch: Batch) -> Batch:
        if not set(np.flatnonzero(batch.valid).tolist()) - set(wrong):
            raise NotFinite(f"{message}, and no other sample counts; {ADVICE}")
        self._stop_or_warn(f"{message}; masked")
        self._samples += len(wrong)
        return batch.without(wrong)

    def _refuse_weights(self, engine: Engine, message: str) -> None:
        broken = engine.broken_weights()
        if broken is not None:
            raise NotFinite(f"{message}: the {engine.role}'s weights are broken ({broken}); {ADVICE}")

    def _stop_or_warn(self, message: str) -> None:
        if not self._skips:
            raise NotFinite(f"{message}; {ADVICE}")
        if self._rank == 0:
            logger.warning("%s", message)
