"""The rollout worker's end: take bucket after bucket, verify each, hand out the boxes in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megarl.family import ModelShape
from megarl.reshard.order import copy_order
from megarl.reshard.plan import ReshardPlan
from megarl.sync.link import Link
from megarl.sync.manifest import DTYPES, SyncError, WeightManifest, sync_plan
from megarl.sync.stream import CHECKSUM_BYTES, Stream, checksum
from megarl.sync.transport import Receiver


class Box(NamedTuple):
    """A rectangle of a local parameter: `content` [rows, cols] belongs at (row, col)."""

    parameter: str
    row: int
    col: int
    content: torch.Tensor


@dataclass
class ReadFigures:
    """What a reader did for one version; seconds waited for buckets and spent on checksums, bytes of boxes."""

    wait_s: float = 0.0
    verify_s: float = 0.0
    received_bytes: int = 0


class StreamReader:
    """Reads the stream of one worker number for one engine. Plan and stream are made at the first version and kept, and so
    is what the transport needs."""

    def __init__(self, shape: ModelShape, worker: int) -> None:
        self._shape, self._worker = shape, worker
        self._key: tuple[str, str, int] | None = None  # what the plan and the stream belong to
        self._plan: ReshardPlan
        self._stream: Stream
        self._link = Link()
        self.figures = ReadFigures()

    def boxes(self, manifest: WeightManifest, engine: int) -> Iterator[Box]:
        """Every box of a version, layer by layer and verified; a box larger than a bucket comes in pieces. The contents are
        overwritten after the next one was asked for.

        Raises SyncError naming the first box that differs, or what did not come in time.
        """
        self.figures = ReadFigures()
        self._prepare(manifest)
        end = self._link.open(manifest, self._stream, engine, self._worker)
        complete = False
        try:
            for bucket in range(self._stream.num_buckets):
                yield from self._bucket(manifest, bucket, end)
                end.release(bucket)
            complete = True
        finally:
            if not complete:
                end.give_up()

    def close(self) -> None:
        self._link.close()

    def _bucket(self, manifest: WeightManifest, bucket: int, end: Receiver) -> Iterator[Box]:
        begun = time.perf_counter()
        content = end.take(bucket)
        taken = time.perf_counter()
        pieces = self._stream.pieces(bucket)
        self._verify(manifest.version, bucket, pieces, content.numpy())
        self.figures.wait_s += taken - begun
        self.figures.verify_s += time.perf_counter() - taken
        plan, stream, dtype = self._plan, self._stream, DTYPES[manifest.precision]
        for piece in pieces:
            copy, start, size = stream.copy[piece], int(stream.offset[piece]), int(stream.size[piece])
            self.figures.received_bytes += size
            yield Box(
                plan.destination_parameters[plan.destination_parameter[copy]],
                int(plan.destination_row[copy] + stream.row[piece]),
                int(plan.destination_col[copy]),
                content[start : start + size].view(dtype).view(int(stream.rows[piece]), int(plan.cols[copy])),
            )

    def _verify(self, version: int, bucket: int, pieces: range, content: np.ndarray) -> None:
        stream = self._stream
        for piece in pieces:
            start, check = int(stream.offset[piece]), int(stream.check[piece])
            sent = int(content[check : check + CHECKSUM_BYTES].view(np.uint64)[0])
            if checksum(content[start : start + int(stream.size[piece])], version, bucket) != sent:
                box = self._plan.describe(stream.copy[piece])
                raise SyncError(f"weight version {version}: wrong bytes in bucket {bucket} of {stream.num_buckets}, {box}")

    def _prepare(self, manifest: WeightManifest) -> None:
        key = (manifest.plan_hash, manifest.precision, manifest.bucket_bytes)
        if self._key == key:
            return
        plan = sync_plan(self._shape, manifest.layout, manifest.rollout, manifest.mode)
        if plan.hash != manifest.plan_hash:
            raise SyncError(
                f"weight version {manifest.version}: the trainer's reshard plan {manifest.plan_hash[:12]} is not "
                f"this worker's {plan.hash[:12]}; both must run the same megarl on the same model"
            )
        self._plan = plan
        order = copy_order(plan, self._worker, self._worker, manifest.rollout.workers)
        self._stream = Stream.of(plan, order, DTYPES[manifest.precision].itemsize, manifest.bucket_bytes)
        self._key = key
