"""Weights as their difference to the last version, for slow links: what both ends keep for it, and what travels.

Each end keeps the bytes that went through it last: a trainer rank those of its parts, a worker those of its stream. The next
version travels as what changed in them, and is put together in the worker's copy, from where boxes and checksums are read as
ever: checksums are of the whole content, so a difference to other bytes never passes. A version that no copy belongs to
travels whole.

A message is the table of checksums of its part and then a delta of what stands before it, in memory for a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.weight_sync.codec import HEADER_BYTES, decode_delta, encode_delta
from megarl.weight_sync.manifest import DTYPES, SyncError, WeightManifest
from megarl.weight_sync.stream import Part, Stream
from megarl.weight_sync.transport import NUM_BUCKETS


class Bases:
    """Rank 0's knowledge of what both ends keep: the version that a difference may be sent to."""

    def __init__(self) -> None:
        self._sent: int | None = None  # what the trainer ranks keep
        self._taken: dict[int, tuple[int, int]] = {}  # by engine that received it from them: version, and its starts then

    def begin(self, attempt: int, leading: Sequence[int], starts: Sequence[int]) -> int | None:
        """The version that every end of an attempt keeps, None for none; `starts` says how often each engine was started.
        From here on they keep nothing that is known, until `finish`. What went wrong once travels whole."""
        base, self._sent = self._sent, None
        taken = {self._taken.pop(engine, (None, 0)) == (base, starts[engine]) for engine in leading}
        return base if attempt == 1 and taken == {True} else None

    def finish(self, version: int, received: Sequence[int], starts: Sequence[int]) -> None:
        """All ranks have sent a version, and engines have `received` it from them, whole and verified."""
        self._sent = version
        self._taken |= {engine: (version, starts[engine]) for engine in received}


class SentParts:
    """A trainer rank's copy of what it sent last, in the host's memory."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self._contents: dict[tuple[int, int], torch.Tensor] = {}  # by worker and bucket
        self._has_base, self._element_bytes = False, 1
        self.changed_bytes = self.content_bytes = 0  # since `begin`

    def begin(self, manifest: WeightManifest) -> None:
        self._has_base = manifest.base is not None
        self._element_bytes = 1 if manifest.quantization else DTYPES[manifest.precision].itemsize
        self.changed_bytes = self.content_bytes = 0

    def message(self, worker: int, bucket: int, part: Part, content: torch.Tensor) -> torch.Tensor:
        """What has to travel in place of a part's bytes, uint8 [bytes]; they are kept."""
        table = _table(self._streams[worker], part) - part.start
        new, key = content[:table], (worker, bucket)
        delta = encode_delta(self._contents[key] if self._has_base else None, new, self._element_bytes)
        self.changed_bytes += delta.changed_bytes
        self.content_bytes += delta.num_bytes
        if key not in self._contents:
            self._contents[key] = torch.empty(table, dtype=torch.uint8)
        self._contents[key].copy_(new)
        return torch.cat([content[table:], delta.payload])


class TakenParts:
    """A worker's copy of the stream that it received last, in the host's memory."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.version: int | None = None  # that all of it belongs to
        self._contents = [[torch.zeros(_table(stream, p) - p.start, dtype=torch.uint8) for p in b] for b in stream.parts]
        beside = HEADER_BYTES * max(map(len, stream.parts), default=0)
        self._rooms = torch.zeros(NUM_BUCKETS, stream.capacity + beside, dtype=torch.uint8)

    def begin(self, manifest: WeightManifest) -> None:
        """Raises SyncError where the version to come is a difference to another one than is kept."""
        kept, self.version = self.version, None
        if manifest.base is not None and manifest.base != kept:
            raise SyncError(
                f"weight version {manifest.version} comes as its difference to version {manifest.base}, but this worker "
                f"keeps {'none' if kept is None else f'version {kept}'}"
            )

    def room(self, bucket: int, number: int) -> torch.Tensor:
        """Memory for the longest message of a part, by its number in the bucket."""
        part, beside = self.stream.parts[bucket][number], number * HEADER_BYTES
        return self._rooms[bucket % NUM_BUCKETS, part.start + beside : part.end + beside + HEADER_BYTES]

    def put(self, message: torch.Tensor, bucket: int, number: int, memory: torch.Tensor) -> None:
        """Write what a message stands for, the bytes of a bucket's part by its number, where they belong in the bucket's
        memory. Raises SyncError for one that is torn."""
        part, kept = self.stream.parts[bucket][number], self._contents[bucket][number]
        table = _table(self.stream, part)
        table_bytes = part.end - table
        try:
            decode_delta(message[table_bytes:], kept)
        except ValueError as error:
            raise SyncError(f"take: bucket {bucket}, from trainer rank {part.source_rank}: {error}") from error
        memory[part.start : table].copy_(kept)
        memory[table : part.end].copy_(message[:table_bytes])


def _table(stream: Stream, part: Part) -> int:
    """Where in the bucket a part's checksums begin."""
    return int(stream.check[part.pieces[0]])
