"""Load a rank's Megatron shards from a Hugging Face directory, reading only its boxes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megarl.models import ModelShape
from megarl.models.layout import Box, Layout
from megarl.models.megatron_weights import chunk_prefix
from megarl.models.stored_weights import SCORE, check_weights


def load_shards(
    directory: str | Path,
    shape: ModelShape,
    boxes: Iterable[Box],
    shards: Mapping[str, Tensor],
    critic: bool = False,
    score: bool = False,
) -> None:
    """Fill this rank's parameters.

    Padding rows become zero; the caller fills parameters that no box covers (a value head). Raises ValueError for a
    checkpoint that does not fit `shape`, or with `score` has no head of one label, before reading any tensor.
    """
    stored = check_weights(directory, shape, critic, score)
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


def score_box(shape: ModelShape, layout: Layout, rank: int) -> Box:
    """Return the box of a sequence classifier's head on a rank of the last stage."""
    parameter = chunk_prefix(layout, layout.virtual_pipeline - 1) + "output_layer.weight"
    return Box(SCORE, 0, 1, 0, shape.hidden, rank, parameter, 0, 0)
