"""Checkpoint mode: the boxes of a stream, put together to whole checkpoint tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from megarl.weight_sync.read import Box


def whole_tensors(boxes: Iterable[Box], sizes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint tensors put together of boxes in any order, whose parameters are checkpoint names, each once complete.

    `sizes` are (rows, columns) of the tensors. Every tensor has memory of its own, as `rollout.checkpoint_loader` asks. A
    tensor that is not filled at the end is not given.
    """
    filled: dict[str, torch.Tensor] = {}
    missing: dict[str, int] = {}
    for box in boxes:
        name, (rows, columns) = box.parameter, box.content.shape
        if name not in filled:
            filled[name] = torch.empty(sizes[name], dtype=box.content.dtype, device=box.content.device)
            missing[name] = filled[name].numel()
        filled[name][box.row : box.row + rows, box.col : box.col + columns] = box.content
        missing[name] -= rows * columns
        if not missing[name]:
            tensor = filled.pop(name)
            yield name, tensor[:, 0] if tensor.shape[1] == 1 else tensor
