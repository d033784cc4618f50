"""The losses of the two updates, per micro-batch, with weights from the whole mini-batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.algorithm.loss import kl, loss_weights, value_loss
from megarl.algorithm.policy import PolicyTokens, load_policy_loss, log_ratio, mismatch_weights
from megarl.megatron.batch import Batch, PackedMicroBatch
from megarl.platform import current as platform
from megarl.recipe.algorithm_section import AlgorithmSection
from megarl.schedule import MiniBatch

Sums = dict[str, Tensor]


def token_weights(batch: Batch, mini_batch: MiniBatch, aggregation: str, longest: int | None = None) -> dict[int, float]:
    """Return the weight of each sequence's tokens in the loss, which is its rollout's. Denominators are over the whole
    mini-batch, so that the loss does not depend on the micro-batches. `longest` is the most own tokens of a rollout, for
    `fixed_length`."""
    order = list(mini_batch.samples)
    _, place = np.unique(batch.rollouts[order], return_inverse=True)
    lengths, valid = (torch.from_numpy(np.bincount(place, of[order])) for of in (batch.own_lengths, batch.valid))
    weights = loss_weights(lengths, valid > 0, aggregation, longest)[place]
    return dict(zip(order, weights.tolist(), strict=True))


@dataclass
class MicroBatchObjective(ABC):
    """A loss of micro-batches: `weights` are those of each sequence's tokens (`token_weights`)."""

    settings: AlgorithmSection
    batch: Batch
    weights: dict[int, float]

    def columns(
        self, micro: PackedMicroBatch, names: Sequence[str], device: torch.device, *more: np.ndarray
    ) -> list[Tensor]:
        """Move what the host knows of a micro-batch to the device in one transfer, [own tokens] each: the weight
        of each token in the loss, whether it counts, `more`, and the named fields of the batch.

        Sequences without gradient do not count in metrics, so that KL and early stop follow what is trained on.
        """
        batch, samples = self.batch, list(micro.samples)
        per_sequence = np.array([[self.weights[sample] for sample in samples], batch.valid[samples]], np.float32)
        weight, counted = np.repeat(per_sequence, micro.own_lengths, axis=1)
        return platform.upload([weight, counted, *more, *(batch.gather(name, samples).numpy() for name in names)], device)

    @abstractmethod
    def __call__(self, micro: PackedMicroBatch, outputs: dict[str, Tensor]) -> tuple[Tensor, Sums]:
        """Return the micro-batch's part of the loss, and sums for the metrics."""


@dataclass
class PolicyObjective(MicroBatchObjective):
    """Policy loss, entropy bonus, and the KL term and the divergence from teachers if the recipe puts them in the loss."""

    def __post_init__(self) -> None:
        self._loss = load_policy_loss(self.settings.policy_loss)

    def __call__(self, micro: PackedMicroBatch, outputs: dict[str, Tensor]) -> tuple[Tensor, Sums]:
        logprobs, entropy = outputs["logprobs"], outputs["entropy"]  # [own tokens]
        lengths, order = _by_rollout(self.batch.rollouts[list(micro.samples)], micro.own_lengths)
        possible = ("advantages", "logprobs", "reference_logprobs", "teacher_logprobs")
        names = [name for name in possible if name in self.batch.fields]
        sampled = [self.batch.samples[sample].completion for sample in micro.samples]
        known = {"rollout": np.concatenate([completion.logprobs[completion.own] for completion in sampled])}
        if self.batch.max_staleness:
            versions = np.concatenate([completion.versions[completion.own] for completion in sampled])
            known["staleness"] = self.batch.version - versions
        moves = [] if order is None else [order]
        weight, counted, *columns = self.columns(micro, names, logprobs.device, *known.values(), *moves)
        if order is not None:
            place = columns.pop(len(known))
            weight, counted, logprobs, entropy, *columns = (
                of[place] for of in (weight, counted, logprobs, entropy, *columns)
            )
        fields = dict(zip([*known, *names], columns, strict=True))
        rollout = fields["rollout"]
        # With one update per batch there is no actor_logprob phase; its results would equal these.
        old = fields.get("logprobs", logprobs.detach())
        advantages, teacher, distillation = fields["advantages"], fields.get("teacher_logprobs"), self.settings.distillation
        if distillation is not None and distillation.place == "advantage":
            advantages = advantages - distillation.coefficient * (old - fields["teacher_logprobs"])
        # Where all advantages are 0 the head needs no backward pass of the policy loss.
        policy = logprobs if self.settings.has_policy_loss else logprobs.detach()
        tokens = PolicyTokens(policy, old, advantages, lengths)
        losses, clipped = self._loss(tokens)
        difference = (old - rollout).abs().nan_to_num() * counted  # NaN: a token of the data, which no engine sampled
        correction: Sums = {}
        corrected = torch.zeros_like(counted)
        if (mismatch := self.settings.mismatch) is not None:
            ratio, uncorrected = mismatch_weights(old, rollout, lengths, mismatch)
            losses = ratio * losses
            correction = {"mismatch_weight_sum": (ratio * counted).sum(), "mismatch_weight_max": (ratio * counted).max()}
            correction["mismatch_beyond_sum"] = ((uncorrected > mismatch.cap) * counted).sum()
            if mismatch.floor or self.batch.max_staleness:
                corrected = (ratio != uncorrected) * counted
                correction["mismatch_corrected_sum"] = corrected.sum()
                correction["mismatch_weight_square_sum"] = (ratio.square() * counted).sum()
        if (most := self.batch.max_staleness) > 0:
            of_tokens = {"tokens": counted, "logprob": difference, "corrected": corrected}
            correction |= staleness_sums(fields["staleness"], counted, most, of_tokens)
        loss = (weight * losses).sum()
        sums = {"policy_loss": loss.detach()}
        if self.settings.entropy_coefficient:
            loss = loss - self.settings.entropy_coefficient * (weight * entropy).sum()
        if "reference_logprobs" in fields and self.settings.kl is not None:
            divergence = kl(logprobs, fields["reference_logprobs"], self.settings.kl.estimator)
            if self.settings.kl.place == "loss":
                loss = loss + self.settings.kl.coefficient * (weight * divergence).sum()
            sums["kl_sum"] = (divergence.detach() * counted).sum()
        if distillation is not None:
            if teacher is not None:
                divergence = kl(logprobs, teacher, "k2" if distillation.place == "loss" else "k1")
            else:
                divergence = outputs["divergence"] if order is None else outputs["divergence"][place]
            if distillation.place == "loss":
                loss = loss + distillation.coefficient * (weight * divergence).sum()
            sums["teacher_kl_sum"] = (divergence.detach() * counted).sum()
        if (stop := self.settings.early_stop) is not None:
            moved = kl(old, logprobs.detach(), stop.estimator)  # the old policy sampled the tokens
            sums["moved_kl_sum"] = (moved * counted).sum()
        # Before the first update the weights are those of `old`: any drift comes from different micro-batches (shapes,
        # kernels, order of sums).
        ratio_drift = log_ratio(tokens).detach().expm1().abs() * counted
        sums |= {
            "loss": loss.detach(),
            "entropy_sum": (entropy.detach() * counted).sum(),
            "clipped_sum": (clipped * counted).sum(),
            "drift_sum": (kl(old, logprobs.detach(), "k3") * counted).sum(),
            "ratio_drift_sum": ratio_drift.sum(),
            "ratio_drift_max": ratio_drift.max(),
            "tokens": counted.sum(),
        }
        if self.batch.sampled and (self.settings.has_policy_loss or "logprobs" in fields):  # else `old` is not what sampled
            correction |= {"mismatch_sum": difference.sum(), "mismatch_max": difference.max()}
        return loss, sums | correction


def _by_rollout(rollouts: np.ndarray, own_lengths: Sequence[int]) -> tuple[tuple[int, ...], np.ndarray | None]:
    """Return the own tokens of each rollout of a micro-batch, and the order of the tokens in which the segments of a rollout
    follow each other, None where they do. `rollouts` and `own_lengths` are [sequences]."""
    firsts = np.flatnonzero(np.diff(rollouts, prepend=-1))
    if len(firsts) == len(set(rollouts.tolist())):
        return tuple(np.add.reduceat(own_lengths, firsts).tolist()), None
    of_tokens = np.repeat(rollouts, own_lengths)  # shared prompts have put the sequences into another order
    return tuple(np.unique(of_tokens, return_counts=True)[1].tolist()), np.argsort(of_tokens, kind="stable")


def staleness_sums(staleness: Tensor, counted: Tensor, most: int, columns: dict[str, Tensor]) -> Sums:
    """Return the sum and maximum of the tokens' staleness, and the sums of `columns` over the tokens of each staleness.

    `staleness` [tokens] in weight versions, from 0 to `most`; `counted` and the columns [tokens] are 0 where a token does
    not count.
    """
    sums = {"staleness_sum": (staleness * counted).sum(), "staleness_max": (staleness * counted).max()}
    of_staleness = staleness[:, None] == torch.arange(most + 1, device=staleness.device)  # [tokens, most + 1]
    for name, column in columns.items():
        parts = (of_staleness * column[:, None]).sum(0).unbind()
        sums |= {f"staleness/{number}/{name}": part for number, part in enumerate(parts)}
    return sums


class ValueObjective(MicroBatchObjective):
    """Clipped value loss (half the squared error)."""

    def __call__(self, micro: PackedMicroBatch, outputs: dict[str, Tensor]) -> tuple[Tensor, Sums]:
        values = outputs["values"]  # [own tokens]
        weight, counted, old, returns = self.columns(micro, ("values", "returns"), values.device)
        assert self.settings.value_loss is not None
        losses, clipped = value_loss(values, old, returns, self.settings.value_loss.clip)
        loss = (weight * losses).sum()
        return loss, {"loss": loss.detach(), "clipped_sum": (clipped * counted).sum(), "tokens": counted.sum()}


class ScoreObjective(MicroBatchObjective):
    """Move each sequence's score by its weight in the batch's loss: the gradient of the loss of pairs."""

    def __call__(self, micro: PackedMicroBatch, outputs: dict[str, Tensor]) -> tuple[Tensor, Sums]:
        scores = outputs["scores"]  # [sequences]
        weight, counted, advantages = self.columns(micro, ("advantages",), scores.device)
        loss = -(weight * advantages * scores).sum()
        return loss, {"loss": loss.detach(), "clipped_sum": torch.zeros_like(loss), "tokens": counted.sum()}


# By the role that is updated.
OBJECTIVES: dict[str, type[MicroBatchObjective]] = {
    "actor": PolicyObjective,
    "critic": ValueObjective,
    "reward_model": ScoreObjective,
}
