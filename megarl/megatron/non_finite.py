"""Checks for NaN and infinite values before an optimizer steps or a checkpoint is written.

`run.on_not_finite` decides whether the run stops or the update or samples are skipped. Every decision is made from values
that all ranks share, so that all ranks stop, mask or go on together.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from megarl.megatron.batch import Batch
from megarl.megatron.parallel import gather_to_all, on_any_rank
from megarl.schedule import MiniBatch

if TYPE_CHECKING:
    from megarl.megatron.role import Role, Update

logger = logging.getLogger(__name__)
MAX_NAMES = 3  # tensors of a rank that a message names
ADVICE = "resume from the last checkpoint with a lower learning rate, or use trainer.precision: bf16 or fp32"
SKIP_ADVICE = "run.on_not_finite: skip leaves such updates and samples out"


class NotFinite(ValueError):
    """A reward, result, loss, gradient or weight is NaN or infinite; the message names phase, rank and remedy."""


class GradientNotFinite(Exception):
    """Raised inside an optimizer step, on all ranks, before it changes anything."""


def name_ranks(problem: str) -> str | None:
    """Join the ranks' problems as "rank 0: ...; rank 2: ..."; None if no rank has one. Collective."""
    if not on_any_rank(bool(problem)):  # after every update, where gathering texts from many ranks would take long
        return None
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(gather_to_all(problem)) if text)


def non_finite_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """Name the tensors that hold NaN or inf; "" if none does. Finite tensors are read once."""
    pairs = list(named)
    if not pairs:
        return ""
    # Sums in fp32, since 16-bit sums would overflow, and on one device: torch's AdamW keeps step counts on the host.
    device = pairs[-1][1].device
    sums = torch.stack([tensor.detach().sum(dtype=torch.float32).to(device) for _, tensor in pairs])
    suspects = torch.nonzero(~torch.isfinite(sums)).flatten().tolist()
    names = [pairs[index][0] for index in suspects if not torch.isfinite(pairs[index][1]).all()]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def non_finite_loss(losses: Sequence[tuple[tuple[int, ...], Tensor]]) -> str:
    """Name the samples of the first micro-batch whose loss is NaN or inf; "" if all losses are finite.

    `losses` are (samples, loss) of this rank's micro-batches, in the order in which they ran; empty before the last stage.
    """
    if not losses or torch.isfinite(torch.stack([loss for _, loss in losses])).all():
        return ""
    samples, loss = next((samples, loss) for samples, loss in losses if not torch.isfinite(loss))
    return f"the loss of samples {', '.join(map(str, samples))} is {float(loss)}"


def non_finite_samples(results: Sequence[Tensor]) -> list[int]:
    """Return the samples with a NaN or infinite result; `results` by sample, fp32 [own tokens] or [1]."""
    # Finite sums have finite terms; an overflowing sum needs a second look.
    if torch.isfinite(torch.stack([result.sum() for result in results])).all():
        return []
    return [sample for sample, result in enumerate(results) if not torch.isfinite(result).all()]


def refuse_non_finite_norm(optimizer: Any) -> None:
    """Make this optimizer raise GradientNotFinite, before it clips and steps, if the gradient norm is not finite.

    Under fp16 megatron-core (0.16 and 0.19) has skipped an overflow and lowered the loss scale before it asks for the norm.
    """
    norm_of = optimizer.get_grad_norm

    def finite_norm() -> Any:
        norm = norm_of()
        if not torch.isfinite(torch.as_tensor(norm)):
            raise GradientNotFinite
        return norm

    optimizer.get_grad_norm = finite_norm


class BackwardWatch:
    """Records on the device whether gradients of activations are finite, to name the samples of the first that is not.

    Weight gradients are sums over micro-batches and ranks and cannot tell.
    """

    def __init__(self, models: Sequence[Any]) -> None:
        self.samples: tuple[int, ...] = ()  # of the current micro-batch
        self._seen: list[tuple[tuple[int, ...], Tensor]] = []
        for model in models:
            if model.pre_process:
                model.embedding.register_forward_hook(lambda module, inputs, output: self.watch(output))

    def start(self) -> None:
        """Begin an update."""
        self._seen.clear()

    def watch(self, activation: Tensor) -> None:
        """Check the activation's gradient when the backward pass makes it."""
        samples = self.samples
        if activation.requires_grad:
            activation.register_hook(lambda gradient: self._seen.append((samples, torch.isfinite(gradient).all())))

    def first_samples(self) -> str:
        """Name the samples of this rank's first micro-batch with a gradient that is not finite; "" if there is none."""
        return next((f"samples {', '.join(map(str, samples))}" for samples, finite in self._seen if not finite), "")


class FiniteGuard:
    """Applies `run.on_not_finite`, and counts what a step has skipped. An evaluation has no policy: it stops."""

    def __init__(self, policy: Literal["stop", "skip"] | None, rank: int) -> None:
        self._policy, self._rank = policy, rank
        self._updates = self._samples = 0

    def take_metrics(self) -> dict[str, float]:
        """Return how many updates and samples were skipped since the last call."""
        metrics: dict[str, float] = {"finite/skipped_updates": self._updates, "finite/masked_samples": self._samples}
        self._updates = self._samples = 0
        return metrics

    def rewards(self, batch: Batch) -> Batch:
        """Mask samples whose reward is not finite in fp32, or raise NotFinite."""
        wrong = np.flatnonzero(batch.valid & ~np.isfinite(batch.rewards)).tolist()
        if not wrong:
            return batch
        first = wrong[0]
        value = f"the reward of sample {first} (group {batch.groups[first]}) is {batch.rewards[first]} on rank 0"
        return self._mask(f"phase reward: {value} ({len(wrong)} of {len(batch.rewards)} samples)", wrong, batch)

    def results(
        self, role: Role, mini_batch: MiniBatch, name: str, results: list[Tensor], batch: Batch
    ) -> tuple[list[Tensor], Batch]:
        """Check a forward phase's `results`, by sample; samples that are masked here get 0.

        Raises NotFinite if the policy is to stop, a weight is broken, or no sample is left. Collective.
        """
        wrong = non_finite_samples(results)
        if not wrong:
            return results, batch
        first = wrong[0]
        token = int(torch.nonzero(~torch.isfinite(results[first]))[0])
        data_rank, number = next(
            (data_rank, number)
            for data_rank, micro_batches in enumerate(mini_batch.micro_batches)
            for number, micro_batch in enumerate(micro_batches)
            if first in micro_batch.samples
        )
        problem = (
            f"phase {mini_batch.phase}: {name} of sample {first} are {float(results[first][token])} at completion token "
            f"{token} (micro-batch {number} of data-parallel rank {data_rank}, rank {role.place.source_of(data_rank)}; "
            f"{len(wrong)} of {len(results)} samples)"
        )
        with role.present():
            self._refuse_weights(role, problem)
        batch = self._mask(problem, wrong, batch)
        return [torch.zeros_like(result) if sample in wrong else result for sample, result in enumerate(results)], batch

    def update(self, role: Role, number: int, mini_batch: MiniBatch, update: Update) -> None:
        """Count a refused update of mini-batch `number`. Raises NotFinite if the policy is to stop or a weight is broken.
        Collective; call this with the weights present."""
        if update.refused is None:
            return
        problem = f"phase {mini_batch.phase}, mini-batch {number}: {update.refused}"
        self._refuse_weights(role, problem)
        self._stop_or_warn(f"{problem}; the update was left out")
        self._updates += 1

    def weights(self, role: Role, phase: str) -> None:
        """Check the weights after a phase's updates. Raises NotFinite: no later step can repair them. Collective; call this
        with the weights present."""
        self._refuse_weights(role, f"phase {phase}, after its updates")

    def _refuse_weights(self, role: Role, problem: str) -> None:
        tensors = role.broken_weights()
        if tensors is not None:
            raise NotFinite(f"{problem}: the {role.role}'s weights are broken ({tensors}); {ADVICE}")

    def _mask(self, problem: str, samples: Sequence[int], batch: Batch) -> Batch:
        left = batch.without(samples)
        if not left.valid.any():
            raise NotFinite(f"{problem}, and no other sample is valid; {ADVICE}")
        self._stop_or_warn(f"{problem}; masked")
        self._samples += len(samples)
        return left

    def _stop_or_warn(self, problem: str) -> None:
        if self._policy != "skip":
            raise NotFinite(f"{problem}; {ADVICE}" + (f"; {SKIP_ADVICE}" if self._policy == "stop" else ""))
        if self._rank == 0:
            logger.warning("%s", problem)
