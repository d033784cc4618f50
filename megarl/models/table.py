"""The rows of a family's weight table: a checkpoint tensor, and how Megatron and vLLM shard it over their ranks.

A tensor is a matrix of `rows` x `columns`; a vector of n elements is an [n, 1] matrix, and a parameter of more dimensions
is the matrix of its last one. In a fused parameter `before` rows stand above the tensor, of `total` rows before sharding;
so each part of a fused parameter is described by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from megarl.models.shape import ModelShape


class Piece(NamedTuple):
    """A rectangle of the tensor (half-open) and where it starts in the rank's parameter."""

    row0: int
    row1: int
    col0: int
    col1: int
    local_row: int
    local_col: int


class Sharding(Protocol):
    """One way to shard a tensor over `ranks`, of which `rank` is one."""

    def pieces(self, rows: int, columns: int, ranks: int, rank: int) -> Iterator[Piece]:
        """The rectangles of the tensor that one rank holds, without padding."""

    def extent(self, rows: int, columns: int, ranks: int) -> tuple[int, int]:
        """(rows, columns) of the whole parameter on a rank, padding and the other parts of a fused one included."""


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole tensor."""

    before: int = 0
    total: int = 0

    def pieces(self, rows: int, columns: int, ranks: int, rank: int) -> Iterator[Piece]:
        yield Piece(0, rows, 0, columns, self.before, 0)

    def extent(self, rows: int, columns: int, ranks: int) -> tuple[int, int]:
        return self.total or rows, columns


@dataclass(frozen=True)
class Rows:
    """Equal intervals of rows. The parts of a fused parameter are sharded first and stacked then."""

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
class InterleavedRows:
    """A fused parameter that is sharded as a whole: blocks of `height` rows of the tensor stand `stride` rows apart, the
    first block `before` rows down, and a rank holds an equal interval of all `total` rows.

    With more ranks than blocks a block spans several ranks. Megatron fuses queries, keys and values like this: group by
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
class FusedHeads:
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


class Held(NamedTuple):
    """The parameter of one side (Megatron or vLLM) that holds a checkpoint tensor, and its sharding."""

    parameter: str
    sharding: Sharding


class Weight(NamedTuple):
    """One checkpoint tensor and where Megatron and vLLM hold it.

    Names of a layer's weights are those below the layer (`self_attn.o_proj.weight`). With `experts` it stands for so many
    tensors: `{expert}` in `name` is the expert's number, in Megatron's parameter its number on the rank; vLLM stacks all of
    them, in this order, in one parameter. Without a `vllm` side versions can only travel whole, for vLLM's own loader
    (`weight_sync.mode: checkpoint`). A `fixed` one no update moves: engines keep what they loaded, in whatever number
    format, and no weight sync sends it. A `shared` one is of an expert that every token passes.
    """

    name: str
    rows: int
    columns: int  # 1 of a vector
    megatron: Held
    vllm: Held | None
    experts: int = 0
    fixed: bool = False
    shared: bool = False


@dataclass(frozen=True)
class Family:
    """One kind of decoder.

    `read` makes a ModelShape of a `config.json` and the name of the file for its errors; it raises ValueError for what
    megarl does not support. `layer` gives the weights of a layer by its number, those of one vLLM module together and the
    modules in the order of the forward pass.
    """

    model_type: str
    architecture: str
    read: Callable[[Mapping[str, Any], str], ModelShape]
    layer: Callable[[ModelShape, int], list[Weight]]
    # Regular expressions of checkpoint names that megarl may leave aside; NUM_LAYERS stands for the number of layers.
    harmless: tuple[str, ...] = ()
