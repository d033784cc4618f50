"""How the boxes of one destination lie in its segment: one after the other in plan order, then their checksums."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from megarl.reshard.plan import ReshardPlan

# Each box starts on a cache line.
ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class WireLayout:
    """Places of the copies to one destination: `copies` are positions in the plan, `offsets` bytes, both [copies].

    At `table` starts uint64 [copies]: the checksum of each box, written by the rank that wrote the box.
    """

    copies: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    table: int
    num_bytes: int

    @classmethod
    def of(cls, plan: ReshardPlan, destination: int, itemsize: int) -> WireLayout:
        """`itemsize` is bytes of one element on the wire."""
        copies = plan.to_destination(destination)
        sizes = plan.sizes[copies] * itemsize
        ends = np.cumsum(-(-sizes // ALIGNMENT) * ALIGNMENT)
        offsets = np.concatenate([[0], ends[:-1]])
        table = int(ends[-1])
        return cls(copies, offsets, sizes, table, table + 8 * len(copies))

    def box(self, data: np.ndarray, position: int) -> np.ndarray:
        """The bytes of one box."""
        start = int(self.offsets[position])
        return data[start : start + int(self.sizes[position])]

    def matrix(self, data: np.ndarray, position: int, plan: ReshardPlan, dtype: torch.dtype) -> torch.Tensor:
        """One box as a tensor [rows, cols] on the segment's memory."""
        copy = self.copies[position]
        flat = torch.from_numpy(self.box(data, position)).view(dtype)
        return flat.view(int(plan.rows[copy]), int(plan.cols[copy]))

    def checksums(self, data: np.ndarray) -> np.ndarray:
        """The table, uint64 [copies], on the segment's memory."""
        return data[self.table : self.num_bytes].view(np.uint64)


def box_checksum(content: np.ndarray) -> int:
    """A hash of every byte and its place, so that exchanged elements are seen; xxh3 runs at memory speed."""
    return xxhash.xxh3_64_intdigest(content.data)


def destination_checksum(checksums: np.ndarray, version: int) -> str:
    """One hex number for all boxes of a destination and the version they belong to."""
    return xxhash.xxh3_128_hexdigest(checksums.tobytes() + version.to_bytes(8, "little"))
