"""Checksums of the pieces in buckets, made where the pieces are written and compared where they are read.

On a host every piece is hashed by xxh3 and compared before it is handed out. On a device the words of the pieces are added
up, of all pieces or of a sample: the bytes never come to the host, which reads the result once a version. Both checksums
depend on the version and the bucket, so bytes of another version or bucket do not pass.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch

from megarl.weight_sync.stream import ALIGNMENT, CHECKSUM_BYTES, Piece, Stream, checksum

SAMPLE = 16  # check one piece in so many, other pieces in every version
WORD_BYTES = 8
# Words that are mixed at a time: a check needs a few times 4 MiB besides the buckets.
CHUNK_WORDS = 1 << 19
# The constants of splitmix64 (Steele, Lea and Flood 2014, fig. 16).
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class HostChecks:
    """Checksums of one bucket in host memory."""

    def __init__(self, memory: torch.Tensor, version: int, bucket: int) -> None:
        self._content, self._version, self._bucket = memory.numpy(), version, bucket
        self._sums: list[int] = []

    def add(self, piece: Piece) -> None:
        """Hash the next piece of the writer's part, in the order of the bytes."""
        if not self._sums:
            self._table = piece.check  # the sums follow each other
        self._sums.append(checksum(self._content[piece.start : piece.end], self._version, self._bucket))

    def close(self) -> None:
        """Write the table of the complete part."""
        table = self._content[self._table : self._table + CHECKSUM_BYTES * len(self._sums)]
        table.view(np.uint64)[:] = self._sums

    def is_wrong(self, piece: Piece) -> bool:
        """Whether the bytes of a piece differ from what was written."""
        sent = int.from_bytes(self._content[piece.check : piece.check + CHECKSUM_BYTES].data, sys.byteorder)
        return checksum(self._content[piece.start : piece.end], self._version, self._bucket) != sent


class DeviceChecks:
    """Checksums of the buckets of one stream in device memory, at one end.

    Each word is mixed one to one with its place, the version and the bucket; a piece's checksum is the sum modulo 2**64. So
    any change of a single word is detected for certain. Other errors (words or pieces that changed places or belong to
    another version) are missed in about one case in 2**64. The checksum is no defence against chosen bytes.

    A sample has the first piece of every part, so that a missing part is detected, and one in `SAMPLE` of the other pieces.
    An error in a piece outside the sample is not detected.

    `write` and `compare` never wait for the device: the places go there once, those of a sample once a version.
    """

    def __init__(self, stream: Stream, device: torch.device, sampled: bool, source: int | None = None) -> None:
        """`source` is the trainer rank whose parts are written; None on the side that reads all pieces."""
        pieces = np.arange(len(stream.copy)) if source is None else np.flatnonzero(stream.source == source)
        self._pieces = pieces[np.lexsort((stream.offset[pieces], stream.bucket[pieces]))]  # positions in the stream
        self._bucket, rank = stream.bucket[self._pieces], stream.source[self._pieces]
        new_part = (np.diff(self._bucket) != 0) | (np.diff(rank) != 0)
        self._is_first = np.r_[True, new_part][: len(pieces)]
        start, end = stream.offset[self._pieces], stream.offset[self._pieces] + stream.size[self._pieces]
        # The gap up to the next cache line travels with the piece and counts as part of it.
        end = -(-end // ALIGNMENT) * ALIGNMENT
        self._words = np.stack([start, end, stream.check[self._pieces]]) // WORD_BYTES  # [3, pieces]
        self._num_buckets, self._device, self._sampled = stream.num_buckets, device, sampled
        self._version = 0
        if not sampled:
            self._choose(np.arange(len(pieces)))

    def begin(self, version: int) -> None:
        """Begin a version: choose its sample and forget earlier differences."""
        self._version = version
        if self._sampled:
            seeds = np.array([_seed(version, bucket) for bucket in range(self._num_buckets)], dtype=np.uint64)
            numbers = seeds[self._bucket] + self._pieces.astype(np.uint64)
            self._choose(np.flatnonzero(self._is_first | (_mixed_numbers(numbers) % SAMPLE == 0)))
        self._differs.zero_()

    def write(self, bucket: int, memory: torch.Tensor) -> None:
        """Write the checksums of a bucket's complete pieces into its `memory`, uint8 [bytes]."""
        chosen = self._of(bucket)
        memory.view(torch.int64)[self._places[2, chosen]] = self._sums(chosen, bucket, memory)

    def compare(self, bucket: int, memory: torch.Tensor) -> None:
        """Compare a bucket's pieces with their checksums; `wrong` gives the result."""
        chosen = self._of(bucket)
        self._differs[chosen] = self._sums(chosen, bucket, memory) != memory.view(torch.int64)[self._places[2, chosen]]

    def wrong(self) -> list[int]:
        """Positions in the stream of the wrong pieces in all buckets compared since `begin`. Waits for the device."""
        return self._chosen[self._differs.cpu().numpy()].tolist()

    def _choose(self, order: np.ndarray) -> None:
        """Check these of the pieces of this end, by their numbers."""
        self._chosen, self._host_places = self._pieces[order], self._words[:, order]
        self._starts = np.searchsorted(self._bucket[order], np.arange(self._num_buckets + 1))
        self._places = torch.from_numpy(self._host_places).to(self._device)
        self._differs = torch.zeros(len(order), dtype=torch.bool, device=self._device)

    def _of(self, bucket: int) -> slice:
        """The chosen pieces of a bucket."""
        return slice(int(self._starts[bucket]), int(self._starts[bucket + 1]))

    def _sums(self, chosen: slice, bucket: int, memory: torch.Tensor) -> torch.Tensor:
        """The sum of each piece, int64 [pieces]."""
        first, last, _ = self._places[:, chosen]
        starts, ends, _ = self._host_places[:, chosen].tolist()
        words, seed = memory.view(torch.int64), _seed(self._version, bucket)
        sums = torch.zeros_like(first)
        for low, high in _runs(starts, ends):
            for begin in range(low, high, CHUNK_WORDS):
                end = min(begin + CHUNK_WORDS, high)
                added = torch.zeros(end - begin + 1, dtype=torch.int64, device=memory.device)
                torch.cumsum(mixed_words(words[begin:end], begin, seed), 0, out=added[1:])
                sums += added[last.clamp(begin, end) - begin] - added[first.clamp(begin, end) - begin]
        return sums


def mixed_words(words: torch.Tensor, begin: int, seed: int) -> torch.Tensor:
    """Mix each word of a bucket, int64 [words], with its place, from place `begin` on: one step of splitmix64."""
    mixed = torch.arange(begin, begin + len(words), device=words.device).mul_(_signed(GOLDEN)).add_(_signed(seed))
    mixed ^= words
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        # torch's right shift repeats the sign, and then two words become one: clear those bits.
        mixed ^= (mixed >> shift) & ((1 << 64 - shift) - 1)
        mixed *= _signed(factor)
    return mixed


def _runs(starts: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Join pieces without a gap between them into ranges of words."""
    runs: list[tuple[int, int]] = []
    for start, end in zip(starts, ends, strict=True):
        if runs and runs[-1][1] == start:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((start, end))
    return runs


def _seed(version: int, bucket: int) -> int:
    """The seed for the words of a bucket in a version, in [0, 2**64)."""
    return int(_mixed_numbers(np.array([version << 32 | bucket], dtype=np.uint64))[0])


def _mixed_numbers(values: np.ndarray) -> np.ndarray:
    """The same step of splitmix64 on the host, uint64 [numbers]."""
    values = values + np.uint64(GOLDEN)
    for shift, factor in ((30, FIRST), (27, SECOND)):
        values = (values ^ values >> np.uint64(shift)) * np.uint64(factor)
    return values ^ values >> np.uint64(31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
