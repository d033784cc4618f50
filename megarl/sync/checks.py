"""Checksums of the pieces in one bucket, made where they are written and compared where they are read.

On a host every piece is hashed whole, by xxh3. On a device the pieces are added up there, word by word, all of them or a
sample: their bytes never come to the host. Both know what the bytes are for: those of another version or bucket do not pass.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch

from megarl.sync.manifest import WeightManifest
from megarl.sync.stream import ALIGNMENT, CHECKSUM_BYTES, Piece, checksum
from megarl.sync.transport import TRANSPORTS

SAMPLE = 16  # of so many pieces one is checked, in every version others
WORD_BYTES = 8
# Words that are mixed at a time: what a check needs beside the buckets is a few times 4 MiB.
CHUNK_WORDS = 1 << 19
# The constants of splitmix64 (Steele, Lea and Flood 2014, fig. 16), as signed numbers; odd, so that no word is lost.
GOLDEN, FIRST, SECOND = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


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

    def expect(self, pieces: Sequence[Piece]) -> None:
        """All pieces of the bucket are there."""

    def wrong(self, pieces: Sequence[Piece]) -> Piece | None:
        """The first of some pieces whose bytes are not what was written."""
        for piece in pieces:
            sent = int.from_bytes(self._content[piece.check : piece.check + CHECKSUM_BYTES].data, sys.byteorder)
            if checksum(self._content[piece.start : piece.end], self._version, self._bucket) != sent:
                return piece
        return None


class DeviceChecks:
    """Of a bucket in the memory of a device. Not yet run on a GPU.

    A word is mixed with its place in the bucket, the version and the bucket's number, one to one, and the sum modulo 2**64
    is the piece's. So whatever happens to one word alone is found for certain, a flipped bit as well; anything else, words
    or pieces that changed places or belong to another version, but for about one case in 2**64. It is no defence against
    somebody who chooses the bytes.

    A sample has the first piece of every part, so that a part that did not come is found, and one of `SAMPLE` of the
    others. An error in a piece that is not in it is not found.
    """

    def __init__(self, memory: torch.Tensor, version: int, bucket: int, sampled: bool) -> None:
        self._memory, self._sampled = memory, sampled
        self._seed = _mixed_int(version << 32 | bucket)
        self._pieces: list[Piece] = []
        self._wrong: set[int] = set()

    def add(self, piece: Piece) -> None:
        """As in `HostChecks`."""
        self._pieces.append(piece)

    def close(self) -> None:
        chosen = self._chosen(self._pieces)
        if chosen:
            self._words()[self._places(chosen)] = self._sums(chosen)

    def expect(self, pieces: Sequence[Piece]) -> None:
        chosen = self._chosen(sorted(pieces, key=lambda piece: piece.start))
        if chosen:
            differs = self._sums(chosen) != self._words()[self._places(chosen)]
            self._wrong = {chosen[position].number for position in differs.nonzero()[:, 0].tolist()}

    def wrong(self, pieces: Sequence[Piece]) -> Piece | None:
        return next((piece for piece in pieces if piece.number in self._wrong), None)

    def _chosen(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Those that are checked, of pieces in the order of their bytes; the same at both ends. The sums of a part lie one
        behind the other, so that a piece whose sum does not follow is the first of its part."""
        if not self._sampled:
            return list(pieces)
        chosen, last = [], -1
        for piece in pieces:
            if piece.check != last + CHECKSUM_BYTES or _mixed_int(self._seed + piece.number) % SAMPLE == 0:
                chosen.append(piece)
            last = piece.check
        return chosen

    def _words(self) -> torch.Tensor:
        return self._memory.view(torch.int64)

    def _places(self, pieces: Sequence[Piece]) -> torch.Tensor:
        places = [piece.check // CHECKSUM_BYTES for piece in pieces]
        return torch.tensor(places, device=self._memory.device)

    def _sums(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """The sum of each piece, int64 [pieces]. What lies between a piece's end and the next cache line belongs to it: it
        travels with it."""
        starts = [piece.start // WORD_BYTES for piece in pieces]
        ends = [-(-piece.end // ALIGNMENT) * ALIGNMENT // WORD_BYTES for piece in pieces]
        sums = torch.zeros(len(pieces), dtype=torch.int64, device=self._memory.device)
        first, last = (torch.tensor(column, device=self._memory.device) for column in (starts, ends))
        for low, high in _runs(starts, ends):
            for begin in range(low, high, CHUNK_WORDS):
                end = min(begin + CHUNK_WORDS, high)
                added = torch.zeros(end - begin + 1, dtype=torch.int64, device=self._memory.device)
                torch.cumsum(self._mixed(begin, end), 0, out=added[1:])
                sums += added[last.clamp(begin, end) - begin] - added[first.clamp(begin, end) - begin]
        return sums

    def _mixed(self, begin: int, end: int) -> torch.Tensor:
        """Words of the bucket, each with its place: a step of splitmix64."""
        mixed = torch.arange(begin, end, device=self._memory.device).mul_(GOLDEN).add_(_signed(self._seed))
        mixed ^= self._words()[begin:end]
        for shift, factor in ((30, FIRST), (27, SECOND)):
            mixed ^= _shifted(mixed, shift)
            mixed *= factor
        mixed ^= _shifted(mixed, 31)
        return mixed


def open_checks(memory: torch.Tensor, manifest: WeightManifest, bucket: int) -> HostChecks | DeviceChecks:
    """The checks of a bucket of a version; the same kind at both ends."""
    if TRANSPORTS[manifest.transport].on_device:
        return DeviceChecks(memory, manifest.version, bucket, manifest.verify == "sampled")
    return HostChecks(memory, manifest.version, bucket)


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


def _mixed_int(value: int) -> int:
    """The same step of a number, in [0, 2**64)."""
    mask = (1 << 64) - 1
    value = (value + GOLDEN) & mask
    for shift, factor in ((30, FIRST), (27, SECOND)):
        value = (value ^ value >> shift) * factor & mask
    return value ^ value >> 31


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
