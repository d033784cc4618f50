"""The rollout worker's end: verify the boxes of its own shards, then hand them out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from megarl.family import ModelShape
from megarl.sync.manifest import DTYPES, SyncError, WeightManifest, sync_plan
from megarl.sync.segment import SharedSegment
from megarl.sync.wire import WireLayout, box_checksum, destination_checksum


class Box(NamedTuple):
    """A rectangle of a local parameter: `content` [rows, cols] belongs at (row, col)."""

    parameter: str
    row: int
    col: int
    content: torch.Tensor


class ShardReader:
    """Reads the shards of one tensor rank. The plan and the mapping are made at the first version and kept."""

    def __init__(self, shape: ModelShape, rank: int) -> None:
        self._shape, self._rank = shape, rank
        self._planned: tuple[str, str] | None = None  # plan hash and segment name that the rest belongs to
        self._segment: SharedSegment | None = None

    def verify(self, manifest: WeightManifest) -> int:
        """Check that every byte of this rank's shards is what was published; the number of bytes checked.

        Raises SyncError naming the first box that differs.
        """
        self._prepare(manifest)
        assert self._segment is not None
        data, wire = self._segment.data, self._wire
        table = wire.checksums(data)
        for position, copy in enumerate(wire.copies):
            if box_checksum(wire.box(data, position)) != int(table[position]):
                raise SyncError(f"weight version {manifest.version}: wrong bytes in {self._plan.describe(copy)}")
        if destination_checksum(table, manifest.version) != manifest.checksums[self._rank]:
            raise SyncError(f"weight version {manifest.version}: the segment {self._segment.name} holds another one")
        return int(wire.sizes.sum())

    def boxes(self, manifest: WeightManifest) -> Iterator[Box]:
        """Every box, in the order of the model's forward pass; the contents lie in shared memory."""
        self._prepare(manifest)
        assert self._segment is not None
        plan, dtype = self._plan, DTYPES[manifest.precision]
        for position, copy in enumerate(self._wire.copies):
            yield Box(
                plan.destination_parameters[plan.destination_parameter[copy]],
                int(plan.destination_row[copy]),
                int(plan.destination_col[copy]),
                self._wire.matrix(self._segment.data, position, plan, dtype),
            )

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
        self._segment, self._planned = None, None

    def _prepare(self, manifest: WeightManifest) -> None:
        key = (manifest.plan_hash, manifest.segments[self._rank])
        if self._planned == key:
            return
        self.close()
        plan = sync_plan(self._shape, manifest.layout, manifest.rollout_tensor)
        if plan.hash != manifest.plan_hash:
            raise SyncError(
                f"weight version {manifest.version}: the trainer's reshard plan {manifest.plan_hash[:12]} is not "
                f"this worker's {plan.hash[:12]}; both must run the same megarl on the same model"
            )
        self._plan, self._wire = plan, WireLayout.of(plan, self._rank, DTYPES[manifest.precision].itemsize)
        try:
            self._segment = SharedSegment.open(manifest.segments[self._rank])
        except FileNotFoundError as error:
            raise SyncError(
                f"weight version {manifest.version}: no shared memory segment {manifest.segments[self._rank]!r} "
                "on this machine; engines and trainer must share one"
            ) from error
        if self._segment.num_bytes != self._wire.num_bytes:
            size = self._segment.num_bytes
            self.close()
            raise SyncError(f"weight version {manifest.version}: segment of {size} bytes, not {self._wire.num_bytes}")
        self._planned = key
