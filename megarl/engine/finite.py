"""Results that are no finite numbers are refused before anything is learned from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.schedule import MiniBatch


def refuse_not_finite(mini_batch: MiniBatch, name: str, results: Sequence[torch.Tensor]) -> None:
    """Raise ValueError where a sequence's result is not finite: it names phase, sample, micro-batch and data-parallel rank.

    `results` are those of the whole batch by sample, fp32 [completion tokens] or [1]; `name` says what they are.
    """
    if torch.isfinite(torch.stack([one.sum() for one in results])).all():  # a sum is finite only where all terms are
        return
    wrong = [sample for sample, one in enumerate(results) if not torch.isfinite(one).all()]
    if not wrong:
        return
    sample = wrong[0]
    position = int(torch.nonzero(~torch.isfinite(results[sample]))[0])
    data_rank, micro_batch = next(
        (rank, number)
        for rank, micro_batches in enumerate(mini_batch.micro_batches)
        for number, micro in enumerate(micro_batches)
        if sample in micro.samples
    )
    raise ValueError(
        f"phase {mini_batch.phase}: {name} of sample {sample} are {float(results[sample][position])} at completion token "
        f"{position} (micro-batch {micro_batch} of data-parallel rank {data_rank}; {len(wrong)} of {len(results)} samples "
        "are like this): the model's weights are broken, or it overflows; go on from the last checkpoint with a lower "
        "learning rate, or take trainer.precision: bf16 or fp32"
    )
