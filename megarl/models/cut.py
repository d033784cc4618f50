"""How one side (Megatron or vLLM) cuts a checkpoint tensor over tensor ranks and where the part lands in a parameter.

A tensor is a matrix of `rows` x `columns`; a vector of n elements is an [n, 1] matrix, and a parameter of more dimensions
is the matrix of its last one. `before` is the number of uncut rows that stand above the tensor in the fused parameter, and
`total` the number of all of them; so the parts of a fused parameter are described one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Piece(NamedTuple):
    """A rectangle of the tensor (half-open) and where it starts in the rank's parameter."""

    row0: int
    row1: int
    col0: int
    col1: int
    local_row: int
    local_col: int


class Cut(Protocol):
    """One way to cut. `ranks` cut the tensor, `rank` is one of them."""

    def pieces(self, rows: int, columns: int, ranks: int, rank: int) -> Iterator[Piece]:
        """What one rank holds of the tensor; padding left out."""

    def extent(self, rows: int, columns: int, ranks: int) -> tuple[int, int]:
        """(rows, columns) of the whole parameter on a rank, padding and the other parts of a fused one included."""


@dataclass(frozen=True)
class Whole:
    """Every rank holds all of it."""

    before: int = 0
    total: int = 0

    def pieces(self, rows: int, columns: int, ranks: int, rank: int) -> Iterator[Piece]:
        yield Piece(0, rows, 0, columns, self.before, 0)

    def extent(self, rows: int, columns: int, ranks: int) -> tuple[int, int]:
        return self.total or rows, columns


@dataclass(frozen=True)
class Rows:
    """Equal intervals of rows; fused, each part is cut before they are stacked."""

    before: int = 0
    total: int = 0

    def pieces(self, rows: int, columns: int, ranks: int, rank: int) -> Iterator[Piece]:
        share = rows // ranks
        yield Piece(rank * share, (rank + 1) * share, 0, columns, self.before // ranks, 0)

    def extent(self, rows: int, columns: int, ranks: int) -> tuple[int, int]:
        return (self.total or rows) // ranks, columns


@dataclass(frozen=True)
class Columns:
    """Equal intervals of columns."""

    def pieces(self, rows: int, columns: int, ranks: int, rank: int) -> Iterator[Piece]:
        share = columns // ranks
        yield Piece(0, rows, rank * share, (rank + 1) * share, 0, 0)

    def extent(self, rows: int, columns: int, ranks: int) -> tuple[int, int]:
        return rows, columns // ranks


@dataclass(frozen=True)
class PaddedRows:
    """Equal intervals of rows that are padded to a multiple of `unit`, or of `unit` a rank."""

    unit: int
    each_rank: bool

    def padded(self, rows: int, ranks: int) -> int:
        unit = self.unit * ranks if self.each_rank else self.unit
        return -(-rows // unit) * unit

    def pieces(self, rows: int, columns: int, ranks: int, rank: int) -> Iterator[Piece]:
        share = self.padded(rows, ranks) // ranks
        start, stop = rank * share, min((rank + 1) * share, rows)
        if start < stop:
            yield Piece(start, stop, 0, columns, 0, 0)

    def extent(self, rows: int, columns: int, ranks: int) -> tuple[int, int]:
        return self.padded(rows, ranks) // ranks, columns


@dataclass(frozen=True)
class Dealt:
    """Fused first and cut then: blocks of `height` rows of the tensor stand `stride` rows apart, the first one `before` rows
    down, and a rank holds an equal interval of all `total` rows.

    With more ranks than blocks the interval cuts through them. Megatron's fused queries, keys and values are such: group by
    group, [queries of the group | key | value].
    """

    height: int
    stride: int
    before: int
    total: int

    def pieces(self, rows: int, columns: int, ranks: int, rank: int) -> Iterator[Piece]:
        share = self.total // ranks
        start, stop = rank * share, (rank + 1) * share
        for block in range(max(0, (start - self.before) // self.stride), rows // self.height):
            fused = block * self.stride + self.before
            if fused >= stop:
                return
            low, high = max(fused, start), min(fused + self.height, stop)
            if low < high:
                row = block * self.height + low - fused
                yield Piece(row, row + high - low, 0, columns, low - start, 0)

    def extent(self, rows: int, columns: int, ranks: int) -> tuple[int, int]:
        return self.total // ranks, columns


@dataclass(frozen=True)
class Heads:
    """vLLM's fused queries, keys and values: [queries | keys | values] of the rank, where a key-value head has copies if
    there are more ranks than such heads. `part` is 0, 1 or 2."""

    part: int
    heads: int
    groups: int
    size: int  # rows of a head

    def pieces(self, rows: int, columns: int, ranks: int, rank: int) -> Iterator[Piece]:
        queries, keys = self.heads // ranks, max(1, self.groups // ranks)
        first = rank * queries if self.part == 0 else rank // max(1, ranks // self.groups) * keys
        count = queries if self.part == 0 else keys
        before = (0, queries, queries + keys)[self.part]
        yield Piece(first * self.size, (first + count) * self.size, 0, columns, before * self.size, 0)

    def extent(self, rows: int, columns: int, ranks: int) -> tuple[int, int]:
        return (self.heads // ranks + 2 * max(1, self.groups // ranks)) * self.size, columns
