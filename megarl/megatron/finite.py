"""Numbers that are not finite, found before anything is learned from them or saved: in which results, losses, gradients and
weights. What is to be done about them is the recipe's (`megarl/megatron/finite_guard.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.megatron.exchange import gather_to_all, on_any_rank
from megarl.megatron.parallel import Place
from megarl.schedule import MiniBatch

# So many names of a rank's tensors are said; the rest is counted.
MOST_NAMES = 3


class NotFinite(ValueError):
    """A result, loss, gradient or weight is no finite number; the message names phase, place and what to do."""


class GradientNotFinite(Exception):
    """Raised inside of an optimizer's step, on all ranks, before it changes anything."""


class MicroLoss(NamedTuple):
    """The loss of one micro-batch, and its sequences."""

    samples: tuple[int, ...]
    loss: Tensor


def wrong_samples(results: Sequence[Tensor]) -> list[int]:
    """Samples with a result that is not finite; `results` by sample, fp32 [own tokens] or [1]."""
    if torch.isfinite(torch.stack([one.sum() for one in results])).all():  # a sum is finite only where all terms are
        return []
    return [sample for sample, one in enumerate(results) if not torch.isfinite(one).all()]


def describe_results(mini_batch: MiniBatch, name: str, results: Sequence[Tensor], wrong: Sequence[int], place: Place) -> str:
    """The first of the `wrong` samples of a phase: its micro-batch, and the rank that made its results."""
    sample = wrong[0]
    position = int(torch.nonzero(~torch.isfinite(results[sample]))[0])
    data_rank, micro_batch = next(
        (rank, number)
        for rank, micro_batches in enumerate(mini_batch.micro_batches)
        for number, micro in enumerate(micro_batches)
        if sample in micro.samples
    )
    return (
        f"phase {mini_batch.phase}: {name} of sample {sample} are {float(results[sample][position])} at completion token "
        f"{position} (micro-batch {micro_batch} of data-parallel rank {data_rank}, rank {place.source_of(data_rank)}; "
        f"{len(wrong)} of {len(results)} samples are like this)"
    )


def describe_losses(losses: Sequence[MicroLoss], place: Place) -> str | None:
    """The first micro-batches whose loss is not finite, the same words on every rank; None where all are. Collective.

    `losses` are this rank's, in the order in which they ran; without any but on a last stage.
    """
    wrong = bool(losses) and not bool(torch.isfinite(torch.stack([one.loss for one in losses])).all())
    if not on_any_rank(wrong):
        return None
    found = None
    if wrong:
        number = next(number for number, one in enumerate(losses) if not torch.isfinite(one.loss))
        samples = ", ".join(map(str, losses[number].samples))
        found = (
            f"the loss of micro-batch {number} (samples {samples}) of data-parallel rank {place.data_rank}, "
            f"rank {place.rank}, is {float(losses[number].loss)}"
        )
    said: dict[int, str] = {}  # of the ranks that share samples one speaks, the source if it is one of them
    for data_rank, is_source, words in gather_to_all((place.data_rank, place.is_source, found)):
        if words is not None and (is_source or data_rank not in said):
            said[data_rank] = words
    return "; ".join(said.values())


def broken_tensors(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of tensors that hold a number that is not finite. Reads each once, where none does."""
    pairs = list(named)
    if not pairs:
        return []
    # fp32 also of 16-bit tensors: their own sums would overflow.
    # On one device: torch's own AdamW keeps its step counts on the host.
    device = pairs[-1][1].device
    sums = torch.stack([tensor.detach().sum(dtype=torch.float32).to(device) for _, tensor in pairs])
    suspects = torch.nonzero(~torch.isfinite(sums)).flatten().tolist()
    return [pairs[number][0] for number in suspects if not torch.isfinite(pairs[number][1]).all()]


def describe_tensors(own: Sequence[str]) -> str | None:
    """Which ranks hold which broken tensors, from each rank's own names; None where none does. Collective."""
    if not on_any_rank(bool(own)):
        return None
    said = []
    for rank, names in enumerate(gather_to_all(list(own))):
        if names:
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            said.append(f"rank {rank}: {', '.join(names[:MOST_NAMES])}{more}")
    return "; ".join(said)


def refuse_broken_norm(optimizer: Any) -> None:
    """From here on a step of this optimizer raises GradientNotFinite where the norm of all ranks' gradients is not finite.

    megatron-core (0.16 and 0.19) asks its `ChainedOptimizer` for the norm before it clips, and steps afterwards; under fp16
    it has refused gradients that overflowed before that, for its loss scale to come down.
    """
    norm: Callable[[], Any] = optimizer.get_grad_norm

    def finite_norm() -> Any:
        found = norm()
        if not torch.isfinite(torch.as_tensor(found)):
            raise GradientNotFinite
        return found

    optimizer.get_grad_norm = finite_norm
