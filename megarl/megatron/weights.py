"""Load a rank's Megatron shards from a Hugging Face directory, reading only its boxes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megarl.models import ModelShape
from megarl.models.layout import Box
from megarl.models.stored_weights import SCORE, check_weights, stored_tensors


def load_shards(
    directory: str | Path,
    shape: ModelShape,
    boxes: Iterable[Box],
    shards: Mapping[str, Tensor],
    critic: bool = False,
) -> None:
    """Fill this rank's parameters.

    Padding rows become zero; the caller fills parameters that no box covers (a value head). Raises ValueError for a
    checkpoint that does not fit `shape`, before reading any tensor.
    """
    stored = check_weights(directory, shape, critic)
    by_file: dict[Path, list[Box]] = defaultdict(list)
    for box in boxes:
        by_file[stored[box.name].file].append(box)
    with torch.no_grad():
        for parameter in shards.values():
            parameter.zero_()
        for file, in_file in by_file.items():
            with safe_open(file, "pt") as handle:
                for box in in_file:
                    source, rows = handle.get_slice(box.name), slice(box.row0, box.row1)
                    is_vector = len(source.get_shape()) == 1
                    # No name for the content, so that one tensor is held at a time.
                    view_of(shards[box.parameter], box).copy_(
                        source[rows].unsqueeze(1) if is_vector else source[rows, box.col0 : box.col1]
                    )


def view_of(parameter: Tensor, box: Box) -> Tensor:
    """Return the view [rows, columns] of a local parameter that a box names; a vector is a column."""
    matrix = parameter.detach()
    matrix = matrix.unsqueeze(1) if matrix.dim() == 1 else matrix
    rows, columns = box.row1 - box.row0, box.col1 - box.col0
    return matrix[box.local_row : box.local_row + rows, box.local_col : box.local_col + columns]


def has_score_head(directory: str | Path) -> bool:
    """Return whether a checkpoint is a sequence classifier's."""
    return SCORE in stored_tensors(directory)


def load_score_head(weight: Tensor, directory: str | Path) -> None:
    """Fill a reward model's head [1, hidden]. Raises ValueError for a checkpoint without one or with several labels."""
    stored = stored_tensors(directory).get(SCORE)
    if stored is None:
        raise ValueError(f"{directory}: the checkpoint has no tensor {SCORE!r}; a reward model is a sequence classifier")
    if stored.shape != tuple(weight.shape):
        actual, expected = (" x ".join(map(str, shape)) for shape in (stored.shape, weight.shape))
        raise ValueError(f"{stored.file}: {SCORE} is {actual}, expected {expected}: one label")
    with torch.no_grad(), safe_open(stored.file, "pt") as handle:
        weight.copy_(handle.get_tensor(SCORE))
