"""Checksums of the pieces in buckets, made where they are written and compared where they are read.

On a host every piece is hashed whole, by xxh3, and compared before it is handed out. On a device the pieces are added up
there, word by word, all of them or a sample: their bytes never come to the host, and what was compared is read once, when a
whole version has come. Both know what the bytes are for: those of another version or bucket do not pass.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch

from megarl.weight_sync.stream import ALIGNMENT, CHECKSUM_BYTES, Piece, Stream, checksum

SAMPLE = 16  # of so many pieces one is checked, in every version others
WORD_BYTES = 8
# Words that are mixed at a time: what a check needs beside the buckets is a few times 4 MiB.
CHUNK_WORDS = 1 << 19
# The constants of splitmix64 (Steele, Lea and Flood 2014, fig. 16).
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class HostChecks:
    """Of a bucket in the host's memory."""

    def __init__(self, memory: torch.Tensor, version: int, bucket: int) -> None:
        self._content, self._version, self._bucket = memory.numpy(), version, bucket
        self._sums: list[int] = []

    def add(self, piece: Piece) -> None:
        """A piece of the writer's part was written, the next one in the order of the bytes."""
        if not self._sums:
            self._table = piece.check  # one sum behind the other
        self._sums.append(checksum(self._content[piece.start : piece.end], self._version, self._bucket))

    def close(self) -> None:
        """The part is complete."""
        table = self._content[self._table : self._table + CHECKSUM_BYTES * len(self._sums)]
        table.view(np.uint64)[:] = self._sums

    def wrong(self, pieces: Sequence[Piece]) -> Piece | None:
        """The first of some pieces whose bytes are not what was written."""
        for piece in pieces:
            sent = int.from_bytes(self._content[piece.check : piece.check + CHECKSUM_BYTES].data, sys.byteorder)
            if checksum(self._content[piece.start : piece.end], self._version, self._bucket) != sent:
                return piece
        return None


class DeviceChecks:
    """Of the buckets of one stream, in the memory of a device, at one end.

    A word is mixed with its place in the bucket, the version and the bucket's number, one to one, and the sum modulo 2**64
    is the piece's. So whatever happens to one word alone is found for certain, a flipped bit as well; anything else, words
    or pieces that changed places or belong to another version, but for about one case in 2**64. It is no defence against
    somebody who chooses the bytes.

    A sample has the first piece of every part, so that a part that did not come is found, and one of `SAMPLE` of the
    others. An error in a piece that is not in it is not found.

    Nothing in `write` and `compare` waits for the device: where pieces lie goes there once, of a sample once a version.
    """

    def __init__(self, stream: Stream, device: torch.device, sampled: bool, source: int | None = None) -> None:
        """`source` is the trainer rank whose parts are written; without, all pieces are read."""
        own = np.arange(len(stream.copy)) if source is None else np.flatnonzero(stream.source == source)
        self._pieces = own[np.lexsort((stream.offset[own], stream.bucket[own]))]  # positions in the stream
        self._bucket, rank = stream.bucket[self._pieces], stream.source[self._pieces]
        new_part = (np.diff(self._bucket) != 0) | (np.diff(rank) != 0)
        self._is_first = np.r_[True, new_part][: len(own)]
        start, end = stream.offset[self._pieces], stream.offset[self._pieces] + stream.size[self._pieces]
        # What lies between a piece's end and the next cache line belongs to it: it travels with it.
        end = -(-end // ALIGNMENT) * ALIGNMENT
        self._words = np.stack([start, end, stream.check[self._pieces]]) // WORD_BYTES  # [3, pieces]
        self._num_buckets, self._device, self._sampled = stream.num_buckets, device, sampled
        self._version = 0
        if not sampled:
            self._choose(np.arange(len(own)))

    def begin(self, version: int) -> None:
        """A version begins."""
        self._version = version
        if self._sampled:
            seeds = np.array([_seed(version, bucket) for bucket in range(self._num_buckets)], dtype=np.uint64)
            numbers = seeds[self._bucket] + self._pieces.astype(np.uint64)
            self._choose(np.flatnonzero(self._is_first | (_mixed_numbers(numbers) % SAMPLE == 0)))
        self._differs.zero_()

    def write(self, bucket: int, memory: torch.Tensor) -> None:
        """The checksums of a bucket's pieces, which are all written, into its `memory`, uint8 [bytes]."""
        chosen = self._of(bucket)
        memory.view(torch.int64)[self._places[2, chosen]] = self._sums(chosen, bucket, memory)

    def compare(self, bucket: int, memory: torch.Tensor) -> None:
        """Compare a bucket's pieces with their checksums; `wrong` says what was found."""
        chosen = self._of(bucket)
        self._differs[chosen] = self._sums(chosen, bucket, memory) != memory.view(torch.int64)[self._places[2, chosen]]

    def wrong(self) -> list[int]:
        """Positions in the stream of the pieces whose bytes are not what was written, of all buckets compared since `begin`.
        Waits for the device."""
        return self._chosen[self._differs.cpu().numpy()].tolist()

    def _choose(self, order: np.ndarray) -> None:
        """Check these of the end's pieces."""
        self._chosen, self._host_places = self._pieces[order], self._words[:, order]
        self._starts = np.searchsorted(self._bucket[order], np.arange(self._num_buckets + 1))
        self._places = torch.from_numpy(self._host_places).to(self._device)
        self._differs = torch.zeros(len(order), dtype=torch.bool, device=self._device)

    def _of(self, bucket: int) -> slice:
        """A bucket's pieces among those chosen."""
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
    """Words of a bucket, int64 [words], from place `begin` on, each mixed with its place: a step of splitmix64."""
    mixed = torch.arange(begin, begin + len(words), device=words.device).mul_(_signed(GOLDEN)).add_(_signed(seed))
    mixed ^= words
    for shift, factor in ((30, FIRST), (27, SECOND)):
        mixed ^= _shifted(mixed, shift)
        mixed *= _signed(factor)
    mixed ^= _shifted(mixed, 31)
    return mixed


def _runs(starts: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of words without a gap that the pieces fill."""
    runs: list[tuple[int, int]] = []
    for start, end in zip(starts, ends, strict=True):
        if runs and runs[-1][1] == start:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((start, end))
    return runs


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros behind; torch repeats the sign, and then two words become one."""
    return (words >> bits) & ((1 << 64 - bits) - 1)


def _seed(version: int, bucket: int) -> int:
    """What the words of a bucket of a version are mixed with, in [0, 2**64)."""
    return int(_mixed_numbers(np.array([version << 32 | bucket], dtype=np.uint64))[0])


def _mixed_numbers(values: np.ndarray) -> np.ndarray:
    """The same step of numbers, uint64 [numbers]."""
    values = values + np.uint64(GOLDEN)
    for shift, factor in ((30, FIRST), (27, SECOND)):
        values = (values ^ values >> np.uint64(shift)) * np.uint64(factor)
    return values ^ values >> np.uint64(31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
