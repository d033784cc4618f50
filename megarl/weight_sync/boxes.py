"""Describe the shards of a model on either side as boxes: rectangles of checkpoint tensors, kept as columns of numbers.

A model of 384 experts has hundreds of thousands of boxes, but its layers repeat few kinds of weights. So the boxes of one
weight are built once, and numpy repeats them for the other layers. `megarl check` walks the same tables without numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property

import numpy as np

from megarl.models import ModelShape, Weight
from megarl.models import megatron_weights as megatron
from megarl.models import vllm_weights as vllm
from megarl.models.layout import Box, Layout, RolloutLayout
from megarl.models.quantised_blocks import block_bytes


@dataclass(frozen=True, eq=False)
class Boxes:
    """Boxes in their order, as int64 columns [boxes]; `name` and `parameter` index the two tables of strings."""

    names: tuple[str, ...]
    parameters: tuple[str, ...]
    name: np.ndarray
    row0: np.ndarray
    row1: np.ndarray
    col0: np.ndarray
    col1: np.ndarray
    rank: np.ndarray
    parameter: np.ndarray
    local_row: np.ndarray
    local_col: np.ndarray

    def __len__(self) -> int:
        return len(self.name)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Return the elements of each box, int64 [boxes]."""
        return (self.row1 - self.row0) * (self.col1 - self.col0)

    def box(self, number: int) -> Box:
        """Return the box at a position."""
        row = [int(getattr(self, field.name)[number]) for field in fields(self)[2:]]
        return Box._make([self.names[row[0]], *row[1:6], self.parameters[row[6]], *row[7:]])

    @classmethod
    def of(cls, boxes: Iterable[Box]) -> Boxes:
        """Convert boxes to columns."""
        names, parameters = dict[str, int](), dict[str, int]()
        rows = [
            (names.setdefault(b.name, len(names)), *b[1:6], parameters.setdefault(b.parameter, len(parameters)), *b[7:])
            for b in boxes
        ]
        return cls(tuple(names), tuple(parameters), *np.array(rows, dtype=np.int64).reshape(-1, 9).T.copy())


def stack(repeats: Sequence[tuple[Boxes, str, str, int]]) -> Boxes:
    """Join boxes, rank by rank; the boxes of a rank keep the order of `repeats`.

    Each repeat has boxes, prefixes for the names of their tensors and of their parameters, and a number that is added to
    their ranks.
    """
    names: dict[str, int] = {}
    parameters: dict[str, int] = {}

    def numbers(strings: tuple[str, ...], prefix: str, table: dict[str, int]) -> np.ndarray:
        return np.array([table.setdefault(prefix + string, len(table)) for string in strings], dtype=np.int64)

    columns: list[list[np.ndarray]] = []
    for boxes, name_prefix, parameter_prefix, first_rank in repeats:
        name = numbers(boxes.names, name_prefix, names)[boxes.name]
        parameter = numbers(boxes.parameters, parameter_prefix, parameters)[boxes.parameter]
        corners = [boxes.row0, boxes.row1, boxes.col0, boxes.col1]
        columns.append([name, *corners, boxes.rank + first_rank, parameter, boxes.local_row, boxes.local_col])
    joined = [np.concatenate(column) for column in zip(*columns, strict=True)]
    order = np.argsort(joined[5], kind="stable")
    return Boxes(tuple(names), tuple(parameters), *(column[order] for column in joined))


def megatron_columns(shape: ModelShape, layout: Layout, keep: Callable[[Weight], bool] = lambda weight: True) -> Boxes:
    """Return the boxes of `megatron_boxes` for a language model, for the weights that `keep` accepts."""
    first_stage = [
        layout.rank(t, 0, d, c) for d in range(layout.data) for c in range(layout.context) for t in range(layout.tensor)
    ]
    boxes_of = cache(
        lambda weight: Boxes.of(box for rank in first_stage for box in megatron.weight_boxes(layout, rank, "", "", weight))
    )
    return stack(
        [
            (boxes_of(weight), name_prefix, megatron.chunk_prefix(layout, chunk) + prefix, layout.rank(0, stage))
            for stage in range(layout.pipeline)
            for chunk in range(layout.virtual_pipeline)
            for name_prefix, prefix, weight in megatron.chunk_weights(shape, layout, stage, chunk, critic=False)
            if keep(weight)
        ]
    )


def vllm_columns(shape: ModelShape, rollout: RolloutLayout, keep: Callable[[Weight], bool] = lambda weight: True) -> Boxes:
    """Return the boxes of `vllm_boxes` for the weights that `keep` accepts. Raises ValueError as `vllm_boxes`."""
    vllm.check_layout(shape, rollout)
    first_stage = [rollout.worker(t, 0, d) for d in range(rollout.data) for t in range(rollout.tensor)]
    boxes_of = cache(lambda weight: Boxes.of(box for w in first_stage for box in vllm.weight_boxes("", weight, rollout, w)))
    return stack(
        [
            (boxes_of(weight), prefix, prefix, rollout.worker(0, stage))
            for stage in range(rollout.pipeline)
            for prefix, weight in vllm.stage_weights(shape, rollout, stage)
            if keep(weight)
        ]
    )


def shard_bytes(shape: ModelShape, rollout: RolloutLayout, itemsize: int, quantised: Collection[str] = ()) -> int:
    """Return the bytes of all updated weights in all workers of an engine: the least that any plan must send for a version.

    `itemsize` is the bytes of an element, except for the tensors that are `quantised` to FP8 blocks. Raises ValueError as
    `vllm_columns`."""
    boxes = vllm_columns(shape, rollout, lambda weight: not weight.fixed)
    in_blocks = np.isin(boxes.name, [number for number, name in enumerate(boxes.names) if name in quantised])
    rows, cols = boxes.row1 - boxes.row0, boxes.col1 - boxes.col0
    return int(np.where(in_blocks, block_bytes(rows, cols), itemsize * rows * cols).sum())
