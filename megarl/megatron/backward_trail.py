"""In which micro-batch's backward pass gradients ceased to be finite. Gradients of weights are summed over micro-batches and
ranks, and no longer say whose they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.megatron.exchange import gather_to_all
from megarl.megatron.parallel import Place
from megarl.schedule import MiniBatch


class BackwardTrail:
    """Whether the gradients of activations were finite where they pass from one chunk of the model to another: chunk `k`'s
    output, over all stages, is border `k + 1`, and the first one's embedding border 0.

    Looks on while they are made, on the device; nobody waits for what it saw before `describe` is asked.
    """

    def __init__(self, models: Sequence[Any], place: Place) -> None:
        self._place = place
        self._seen: list[tuple[tuple[int, ...], int, Tensor]] = []
        self._samples: tuple[int, ...] = ()  # of the micro-batch that runs forward
        for model in models:
            if model.pre_process:
                model.embedding.register_forward_hook(lambda module, inputs, output: self._watch(output, 0))

    def start(self) -> None:
        """An update begins."""
        self._seen.clear()

    def enter(self, samples: tuple[int, ...]) -> None:
        """The micro-batch of these samples runs forward through a chunk."""
        self._samples = samples

    def leave(self, chunk: int, output: Tensor) -> None:
        """With this `output`, of this rank's chunk of that number."""
        self._watch(output, chunk * self._place.layout.pipeline + self._place.pipeline_rank + 1)

    def _watch(self, tensor: Tensor, border: int) -> None:
        if not tensor.requires_grad:
            return
        samples = self._samples

        def look(gradient: Tensor) -> None:
            self._seen.append((samples, border, torch.isfinite(gradient).all()))

        tensor.register_hook(look)

    def describe(self, mini_batch: MiniBatch) -> str | None:
        """Of each data-parallel rank the first such micro-batch of the mini-batch, its samples, and where its gradient came
        from; the same words on every rank. None where no border saw any. Collective."""
        place = self._place
        last = place.layout.pipeline * place.layout.virtual_pipeline
        own = [(border, samples) for samples, border, finite in self._seen if not finite]
        # By data-parallel rank (-border, micro-batch, rank): a backward pass goes down the borders.
        found: dict[int, list[tuple[int, int, int]]] = {}
        for data_rank, rank, seen in gather_to_all((place.data_rank, place.rank, own)):
            numbers = {micro.samples: number for number, micro in enumerate(mini_batch.micro_batches[data_rank])}
            found.setdefault(data_rank, []).extend((-border, numbers[samples], rank) for border, samples in seen)
        said = []
        for data_rank, (border, number, rank) in sorted((one, min(all_seen)) for one, all_seen in found.items() if all_seen):
            samples = ", ".join(map(str, mini_batch.micro_batches[data_rank][number].samples))
            stage = -border % place.layout.pipeline
            origin = "the loss" if -border == last else f"the backward pass of pipeline stage {stage}"
            said.append(
                f"since micro-batch {number} (samples {samples}) of data-parallel rank {data_rank}, where "
                f"rank {rank} got one from {origin}"
            )
        return "; ".join(said) or None
