"""Cut the boxes of one worker into pieces, put these in order, and pack them into buckets of one size.

Pure functions: both ends compute the same. Inside a bucket the pieces of one source rank lie together as a *part*: the
content of one message, which ends with its checksum.

    bucket | piece piece piece checksum | piece checksum | free |
           '-- part of rank 0 ----------'-- of rank 2 ---'

Every bucket holds the same share of what each rank sends to the worker. So all ranks send all the time and finish together,
and each bucket mixes near and far ranks. In the order of the layers the ranks of the first pipeline stage would send alone,
then the ranks of the second. A rank's weights keep their order, so about one module of each rank is incomplete at a time.

Weights go layer by layer if adapters are merged into them during the sync, because a rank would otherwise hold merged
weights of many layers; and in checkpoint mode, because a worker would otherwise hold many incomplete tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from megarl.models import ModelShape
from megarl.models.quantised_blocks import BLOCK, block_bytes, quantised_tensors, scale_bytes
from megarl.platform import current as platform
from megarl.weight_sync.manifest import SyncSettings
from megarl.weight_sync.plan import ReshardPlan

FP8 = torch.float8_e4m3fn
NUM_BUCKETS = 2  # one is written while the other is read
ALIGNMENT = 64  # each piece, and so each part, starts on a cache line
MOST_WRITTEN = 1.5  # buckets that a rank writes in a round at most; with as many ranks as workers each writes about one
SMALLEST_PART = 256 << 10  # bytes: a rank that would send less in a bucket sends in fewer buckets
PHASES = 1 << 16  # steps of the phase that shifts a rank's parts against those of other ranks
# The R2 sequence: gives pairs of a rank and a worker phases that lie far apart.
SPREAD = round(PHASES * 0.7548776662), round(PHASES * 0.5698402910)
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def _layer_numbers(plan: ReshardPlan, copies: np.ndarray) -> np.ndarray:
    """Return the layer of each copy, int64 [copies]; -1 for weights outside the layers."""
    matches = (_LAYER.match(parameter) for parameter in plan.destination_parameters)
    numbers = np.array([int(match.group(1)) if match else -1 for match in matches], dtype=np.int64)
    return numbers[plan.destination_parameter[copies]]


class Part(NamedTuple):
    """What one source rank contributes to a bucket: its bytes `[start, end)`, of which the last line begins with the
    checksum of all before; and the positions of its pieces."""

    source_rank: int
    start: int
    end: int
    pieces: np.ndarray

    @property
    def size(self) -> int:
        """Return the bytes of the part, with the checksum."""
        return self.end - self.start

    @property
    def check(self) -> int:
        """Return the offset of the checksum in the bucket."""
        return self.end - ALIGNMENT


class LocalBox(NamedTuple):
    """A rectangle of a local parameter, `rows` x `cols` elements from (row, col) on, and the dtype in which these travel."""

    parameter: str
    row: int
    col: int
    rows: int
    cols: int
    dtype: torch.dtype

    @property
    def owner(self) -> str:
        """Return the module that has the parameter."""
        return self.parameter.rpartition(".")[0]

    def within(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the box's view of the parameter, [rows, cols]; a vector is one column. Raises ValueError where it ends
        before the box."""
        matrix = parameter.detach() if parameter.dim() == 2 else parameter.detach().view(parameter.shape[0], -1)
        place = matrix[self.row : self.row + self.rows, self.col : self.col + self.cols]
        if place.shape != (self.rows, self.cols):
            end = f"{self.row + self.rows} x {self.col + self.cols}"
            raise ValueError(f"{self.parameter} of {tuple(matrix.shape)} ends before {end}")
        return place


class Piece(NamedTuple):
    """One piece as one end of the stream sees it: a box of its local parameter, in the bytes `[start, end)` of a bucket.
    `number` is the position in the stream."""

    number: int
    box: LocalBox
    start: int
    end: int
    scale_bytes: int  # of FP8 blocks: their scales stand before the elements; 0 for any other format


@dataclass(frozen=True, eq=False)
class PieceStream:
    """The pieces of one destination, as int64 columns [pieces].

    A piece is `rows` rows, from row `row` on, of the copy number `copy` of the plan, from trainer rank `source`. It lies in
    bucket `bucket` at byte `offset` and has `size` bytes; the first `scales` bytes of FP8 blocks are their scales.
    `capacity` is the bytes of the fullest bucket. Elements travel in `dtype`, those of FP8 blocks as FP8.
    """

    dtype: torch.dtype
    copy: np.ndarray
    row: np.ndarray
    rows: np.ndarray
    source: np.ndarray
    bucket: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    scales: np.ndarray
    num_buckets: int
    capacity: int

    @classmethod
    def of(
        cls,
        plan: ReshardPlan,
        copies: np.ndarray,
        dtype: torch.dtype,
        bucket_bytes: int,
        quantised: Collection[str] = (),
        apart: Collection[int] = (),
    ) -> PieceStream:
        """Pack `copies`, positions in the plan to one destination in its order.

        Elements travel in `dtype`, except those of the tensors that are `quantised` to FP8 blocks. A new bucket begins at
        each of the positions in `copies` that are `apart`; the copies between two such positions are spread over their own
        buckets. Raises ValueError if the plan cuts blocks, or if a row of a box or of blocks does not fit into a bucket."""
        in_blocks = np.isin(plan.name, [number for number, name in enumerate(plan.names) if name in quantised])
        for place in copies[in_blocks[copies]].tolist():
            if plan.destination_row[place] % BLOCK or plan.destination_col[place] % BLOCK:
                raise ValueError(f"FP8 blocks: {plan.describe(place)} starts inside one; `check_blocks` says what cuts them")
        copy, row, rows, bucket = _cut(plan, copies, dtype.itemsize, bucket_bytes, in_blocks, frozenset(apart))
        cols = plan.cols[copy]
        scales = np.where(in_blocks[copy], scale_bytes(rows, cols), 0)
        source, size = plan.source_rank[copy], scales + rows * cols * np.where(in_blocks[copy], 1, dtype.itemsize)
        offset, capacity = _place(source, bucket, size)
        assert capacity <= bucket_bytes, f"a bucket of {capacity} bytes; {bucket_bytes} are allowed"
        num_buckets = int(bucket[-1]) + 1 if len(bucket) else 0
        return cls(dtype, copy, row, rows, source, bucket, offset, size, scales, num_buckets, capacity)

    @cached_property
    def parts(self) -> tuple[tuple[Part, ...], ...]:
        """Return the parts of each bucket, by source rank."""
        order = np.lexsort((np.arange(len(self.copy)), self.source, self.bucket))
        keys = np.stack([self.bucket[order], self.source[order]])
        first = np.flatnonzero(np.r_[True, (np.diff(keys) != 0).any(axis=0)]) if len(order) else np.empty(0, dtype=np.int64)
        after = np.append(first, len(order))[1:]
        last = order[after - 1]
        ends = -(-(self.offset[last] + self.size[last]) // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        columns = self.bucket[last], self.source[last], self.offset[order[first]], ends, first, after
        buckets: list[list[Part]] = [[] for _ in range(self.num_buckets)]
        for bucket, source, start, end, begin, stop in zip(*(column.tolist() for column in columns), strict=True):
            buckets[bucket].append(Part(source, start, end, order[begin:stop]))
        return tuple(map(tuple, buckets))

    @cached_property
    def starts(self) -> np.ndarray:
        """Return the position of each bucket's first piece, and last the number of pieces, int64 [buckets + 1]."""
        return np.searchsorted(self.bucket, np.arange(self.num_buckets + 1))

    def at_source(self, plan: ReshardPlan, pieces: np.ndarray) -> list[Piece]:
        """Return the pieces with these numbers as their source ranks see them."""
        copy = self.copy[pieces]
        parameters = [plan.source_parameters[number] for number in plan.source_parameter[copy]]
        return self._as_pieces(plan, pieces, parameters, plan.source_row[copy], plan.source_col[copy])

    def at_destination(self, plan: ReshardPlan, pieces: np.ndarray) -> list[Piece]:
        """Return the pieces with these numbers as the worker sees them."""
        copy = self.copy[pieces]
        parameters = [plan.destination_parameters[number] for number in plan.destination_parameter[copy]]
        return self._as_pieces(plan, pieces, parameters, plan.destination_row[copy], plan.destination_col[copy])

    def _as_pieces(
        self, plan: ReshardPlan, pieces: np.ndarray, parameters: list[str], row: np.ndarray, col: np.ndarray
    ) -> list[Piece]:
        """Convert columns to pieces of plain integers: the work for each piece must cost less than copying it."""
        start, scales = self.offset[pieces], self.scales[pieces].tolist()
        places = (row + self.row[pieces], col, self.rows[pieces], plan.cols[self.copy[pieces]])
        dtypes = [FP8 if scale_bytes else self.dtype for scale_bytes in scales]
        boxes = map(LocalBox, parameters, *(column.tolist() for column in places), dtypes)
        return list(map(Piece, pieces.tolist(), boxes, start.tolist(), (start + self.size[pieces]).tolist(), scales))


def _spread(
    plan: ReshardPlan, copies: np.ndarray, itemsize: int, bucket_bytes: int, in_blocks: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Cut `copies` and order the pieces so that at any time the same share of each source rank's bytes has travelled. A rank
    sends a part in every bucket, or in fewer buckets if its parts would be small. Return of each piece: copy, source rank,
    row, rows, how many rows stay together, and the bytes of these."""
    source, cols, rows = plan.source_rank[copies], plan.cols[copies], plan.rows[copies]
    blocks = in_blocks[copies]
    unit = np.where(blocks, np.minimum(BLOCK, rows), 1)
    unit_bytes = np.where(blocks, block_bytes(unit, cols), cols * itemsize)
    units = -(-rows // unit)
    size = units * unit_bytes
    # For each copy: its offset in the bytes that its rank sends, how many these are, and in how many parts they travel.
    order = np.argsort(source, kind="stable")
    before = np.cumsum(size[order]) - size[order]
    _, first, rank = np.unique(source[order], return_index=True, return_inverse=True)
    begin, total = np.empty_like(size), np.empty_like(size)
    begin[order], total[order] = before - before[first][rank], np.bincount(rank, size[order])[rank]
    buckets = -(-int(size.sum()) // bucket_bytes)
    parts = np.clip(total // min(SMALLEST_PART, bucket_bytes // 4), 1, buckets)
    first_part, last_part = begin * parts // total, (begin + (units - 1) * unit_bytes) * parts // total
    counts = last_part - first_part + 1
    copy = np.repeat(np.arange(len(copies)), counts)
    part = np.arange(len(copy)) - np.repeat(np.cumsum(counts) - counts - first_part, counts)
    bounds = [
        np.clip(-(-(-(-number * total[copy] // parts[copy]) - begin[copy]) // unit_bytes[copy]), 0, units[copy])
        for number in (part, part + 1)
    ]
    # Ranks with few parts take turns: in each bucket some of them send to this worker, and the others to other workers.
    ends = source[copy] * SPREAD[0] + plan.destination_rank[copies[0]] * SPREAD[1]
    turn = (part * PHASES + ends % PHASES) * buckets // parts[copy]
    nonempty = np.flatnonzero(bounds[0] < bounds[1])
    nonempty = nonempty[np.lexsort((copy[nonempty], turn[nonempty]))]
    copy = copy[nonempty]
    row, end = bounds[0][nonempty] * unit[copy], np.minimum(bounds[1][nonempty] * unit[copy], rows[copy])
    return copies[copy], source[copy], row, end - row, unit[copy], unit_bytes[copy]


def _cut(
    plan: ReshardPlan, copies: np.ndarray, itemsize: int, bucket_bytes: int, in_blocks: np.ndarray, apart: Collection[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut copies into pieces; return (copy, row, rows, bucket) of each. A bucket takes whole rows, or rows of blocks, until
    it is full (each part needs room for its checksum) or the next copy is `apart`."""
    pieces: list[tuple[int, int, int, int]] = []
    bucket = used = 0
    present: set[int] = set()  # ranks that have a part in the bucket that is filled
    for together in np.split(copies, sorted(set(apart) - {0})):
        if not len(together):
            continue
        if used:
            bucket, used = bucket + 1, 0
            present.clear()
        spread = _spread(plan, together, itemsize, bucket_bytes, in_blocks)
        for copy, source, row, num_rows, unit, unit_bytes in zip(*(column.tolist() for column in spread), strict=True):
            if (needed := _aligned(unit_bytes) + ALIGNMENT) > bucket_bytes:
                unit_name = "a row of blocks" if in_blocks[copy] else "a row"
                raise ValueError(
                    f"weight_sync.bucket_bytes = {bucket_bytes} is less than {unit_name} of {plan.names[plan.name[copy]]} "
                    f"needs, {needed} bytes with its checksum; give it at least these"
                )
            end = row + num_rows
            while row < end:
                # A part ends with its checksum, which takes a line.
                check = 0 if source in present else ALIGNMENT
                fits = min(end - row, (bucket_bytes - used - check) // ALIGNMENT * ALIGNMENT // unit_bytes * unit)
                if fits <= 0:
                    bucket, used = bucket + 1, 0
                    present.clear()
                    continue
                pieces.append((copy, row, fits, bucket))
                used += _aligned(-(-fits // unit) * unit_bytes) + check
                present.add(source)
                row += fits
    table = np.array(pieces, dtype=np.int64).reshape(-1, 4).T
    return table[0], table[1], table[2], table[3]


def _place(source: np.ndarray, bucket: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, int]:
    """Place part after part in each bucket, each with a line for its checksum at the end. Return the offset of each piece,
    and the bytes of the fullest bucket."""
    if not len(size):
        return np.zeros_like(size), 0
    order = np.lexsort((np.arange(len(size)), source, bucket))
    new_bucket = np.r_[True, np.diff(bucket[order]) != 0]
    last = np.r_[new_bucket[1:] | (np.diff(source[order]) != 0), True]  # of its part
    room = -(-size[order] // ALIGNMENT) * ALIGNMENT + ALIGNMENT * last
    end = np.cumsum(room)
    before = end - room
    before -= before[np.maximum.accumulate(np.where(new_bucket, np.arange(len(size)), 0))]
    offset = np.empty_like(size)
    offset[order] = before
    return offset, int((before + room).max())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def sync_stream(shape: ModelShape, plan: ReshardPlan, worker: int, settings: SyncSettings) -> PieceStream:
    """Return the stream to one of an engine's workers, the same for all engines; both ends compute it. By layer no bucket
    holds pieces of two layers, so a rank can finish a layer for all workers before it begins the next. Mapped weights have
    no buckets; then a piece is what a worker copies and hashes at a time."""
    bucket_bytes = platform.piece_bytes if settings.transport == "mapped" else settings.bucket_bytes
    quantised = quantised_tensors(shape) if settings.quantization == "fp8" else {}
    copies = plan.to_destination(worker)
    # The embedding is a layer; so are the final norm and the head together.
    apart = (np.flatnonzero(np.diff(_layer_numbers(plan, copies))) + 1).tolist() if settings.by_layer else ()
    return PieceStream.of(plan, copies, settings.dtype, bucket_bytes, quantised, apart)


# (bucket, stream); a round has at most one bucket of each stream.
Round = Sequence[tuple[int, int]]


def sync_rounds(plan: ReshardPlan, streams: Sequence[PieceStream], by_layer: bool) -> list[Round]:
    """Return the rounds in which the buckets for all workers of an engine travel; all ranks go through them in order.

    A round has the next bucket of each stream, as long as no rank writes more than `MOST_WRITTEN` of a bucket; with
    `by_layer` all buckets of a layer go before those of the next."""
    # The final norm and the head come after the last layer and count as part of it.
    layers = [np.zeros(stream.num_buckets) for stream in streams]
    if by_layer:
        first_copies = (stream.copy[stream.starts[:-1]] for stream in streams)  # of each bucket
        layers = [np.maximum.accumulate(_layer_numbers(plan, copies)) for copies in first_copies]
    room = MOST_WRITTEN * max(stream.capacity for stream in streams)
    num_ranks = int(plan.source_rank.max()) + 1
    taken, rounds = [0] * len(streams), list[Round]()
    while waiting := [number for number, stream in enumerate(streams) if taken[number] < stream.num_buckets]:
        layer = min(layers[number][taken[number]] for number in waiting)
        written, entries = np.zeros(num_ranks, dtype=np.int64), list[tuple[int, int]]()
        # First the streams that are behind, in the order of their numbers.
        for number in sorted(waiting, key=lambda number: taken[number] / streams[number].num_buckets):
            bucket = taken[number]
            ranks, sizes = np.array([(part.source_rank, part.size) for part in streams[number].parts[bucket]]).T
            if layers[number][bucket] == layer and (written[ranks] + sizes <= room).all():
                written[ranks] += sizes
                taken[number] += 1
                entries.append((bucket, number))
        rounds.append(entries)
    return rounds
