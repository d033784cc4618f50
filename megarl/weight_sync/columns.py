"""Segments as columns of numbers: a model of 384 experts has hundreds of thousands of them.

The layers of a model repeat few kinds of weights. So a side describes what its ranks hold of one weight of one layer, as
segments, and `stack` repeats that for the other layers with numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megarl.models.layout import Segment


@dataclass(frozen=True, eq=False)
class Boxes:
    """Segments in their order, as int64 columns [boxes]; `name` and `parameter` index the two tables of strings."""

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
        """Elements of each box, int64 [boxes]."""
        return (self.row1 - self.row0) * (self.col1 - self.col0)

    def segment(self, box: int) -> Segment:
        return Segment(
            name=self.names[self.name[box]],
            row0=int(self.row0[box]),
            row1=int(self.row1[box]),
            col0=int(self.col0[box]),
            col1=int(self.col1[box]),
            rank=int(self.rank[box]),
            parameter=self.parameters[self.parameter[box]],
            local_row=int(self.local_row[box]),
            local_col=int(self.local_col[box]),
        )

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> Boxes:
        """The columns of segments."""
        names: dict[str, int] = {}
        parameters: dict[str, int] = {}
        rows = [
            (names.setdefault(s.name, len(names)), *s[1:6], parameters.setdefault(s.parameter, len(parameters)), *s[7:])
            for s in segments
        ]
        return cls(tuple(names), tuple(parameters), *np.array(rows, dtype=np.int64).reshape(-1, 9).T.copy())


class Repeat(NamedTuple):
    """Boxes again: on ranks `offset` higher, and with something before their names and their parameters' names."""

    boxes: Boxes
    name_prefix: str
    parameter_prefix: str
    offset: int


def stack(repeats: Sequence[Repeat]) -> Boxes:
    """All of the boxes, rank by rank; those of a rank in the order of `repeats`."""
    names: dict[str, int] = {}
    parameters: dict[str, int] = {}
    columns: list[list[np.ndarray]] = []
    for boxes, name_prefix, parameter_prefix, offset in repeats:
        name = _numbers(boxes.names, name_prefix, names)[boxes.name]
        parameter = _numbers(boxes.parameters, parameter_prefix, parameters)[boxes.parameter]
        corners = [boxes.row0, boxes.row1, boxes.col0, boxes.col1]
        columns.append([name, *corners, boxes.rank + offset, parameter, boxes.local_row, boxes.local_col])
    whole = [np.concatenate(column) for column in zip(*columns, strict=True)]
    order = np.argsort(whole[5], kind="stable")
    return Boxes(tuple(names), tuple(parameters), *(column[order] for column in whole))


def _numbers(strings: tuple[str, ...], prefix: str, table: dict[str, int]) -> np.ndarray:
    """The number of each string, with `prefix` before it, in a table that grows."""
    return np.array([table.setdefault(prefix + string, len(table)) for string in strings], dtype=np.int64)
