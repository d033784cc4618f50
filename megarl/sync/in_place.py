"""Weights that are read where they are: a trainer rank's parameters lie in shared memory, and the workers of its machine
copy every box from there to its place. One copy, no bucket, and nobody waits for anybody but at the end.

The storages under the parameters are moved into shared memory at the first sync, as they are: every tensor on top of them,
megatron-core's buffers and their views too, stays what it was. They are files without a name, that other processes of the
machine open through `/proc`, and gone with the last process that maps them. Workers map them for reading alone.

A box is copied in pieces, and the bytes of a piece are hashed right after they were copied. A rank hashes its own, and the
worker compares at the end, before its engine takes the version. So whoever writes to a parameter while it is read is found:
what was read before is not what is hashed, or what was hashed is not what the rank had.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megarl.reshard.plan import ReshardPlan
from megarl.sync.manifest import SyncError
from megarl.sync.segment import ROOT
from megarl.sync.stream import CHECKSUM_BYTES, checksum

# What is hashed at a time: the copy has left it in the cache.
PIECE_BYTES = 2 << 20
# Of the files that a process may have open, those that parameters may be.
FILES_SHARE = 4
_WORDS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, eq=False)
class Pieces:
    """The boxes of one destination in the order in which they are read, as int64 columns [pieces]: `rows` rows, from row
    `row` on, of the copy number `copy` of the plan, which rank `source` holds."""

    copy: np.ndarray
    row: np.ndarray
    rows: np.ndarray
    source: np.ndarray

    @classmethod
    def of(cls, plan: ReshardPlan, copies: np.ndarray, itemsize: int) -> Pieces:
        """`copies` are positions in the plan, all to one destination; `itemsize` is bytes of an element."""
        most = np.maximum(1, PIECE_BYTES // (plan.cols[copies] * itemsize))
        counts = -(-plan.rows[copies] // most)
        copy, most = np.repeat(copies, counts), np.repeat(most, counts)
        row = (np.arange(len(copy)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
        return cls(copy, row, np.minimum(most, plan.rows[copy] - row), plan.source_rank[copy])

    def __len__(self) -> int:
        return len(self.copy)

    @property
    def table_bytes(self) -> int:
        """Of a checksum for each piece."""
        return CHECKSUM_BYTES * len(self)

    def of_rank(self, rank: int) -> np.ndarray:
        """Positions of the pieces that a rank holds."""
        return np.flatnonzero(self.source == rank)

    def at_source(self, plan: ReshardPlan, number: int) -> tuple[str, int, int, int, int]:
        """(parameter, row, column, rows, columns) of a piece in its rank's memory."""
        copy = self.copy[number]
        place = int(plan.source_row[copy] + self.row[number]), int(plan.source_col[copy])
        parameter = plan.source_parameters[plan.source_parameter[copy]]
        return parameter, *place, int(self.rows[number]), int(plan.cols[copy])

    def at_destination(self, plan: ReshardPlan, number: int) -> tuple[str, int, int]:
        """(parameter, row, column) of a piece in its worker's memory."""
        copy = self.copy[number]
        place = int(plan.destination_row[copy] + self.row[number]), int(plan.destination_col[copy])
        return plan.destination_parameters[plan.destination_parameter[copy]], *place


def words_of(content: torch.Tensor) -> np.ndarray:
    """The same memory as whole numbers: numpy knows no bfloat16."""
    return content.view(_WORDS[content.itemsize]).numpy()


def piece_checksum(words: np.ndarray, version: int, number: int) -> int:
    """Of a piece [rows, columns], by its number among those of its destination."""
    return checksum(np.ascontiguousarray(words), version, number)


def private_bytes(parameters: Mapping[str, torch.Tensor], names: Sequence[str], dtype: torch.dtype) -> int | None:
    """How much of the parameters of these names has to be moved into shared memory, so that they can be read in place.

    None where they cannot: in another number format than `dtype`, or made anew whenever they are asked for (a mapping that
    is no dict), not in the host's memory, or more storages than files may be open.
    """
    if not isinstance(parameters, dict):
        return None
    matrices = {name: _matrix(parameters[name]) for name in names}
    if any(one.dtype != dtype or one.device.type != "cpu" or one.stride(1) != 1 for one in matrices.values()):
        return None
    storages = _storages(matrices)
    if len(storages) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // FILES_SHARE:
        return None
    return sum(storage.nbytes() for storage in storages.values() if not storage.is_shared())


def has_room(num_bytes: int) -> bool:
    """Whether shared memory can take so much more: a page that is not there when it is written to would end a process."""
    room = os.statvfs(ROOT)
    return num_bytes <= room.f_bavail * room.f_frsize


def share(parameters: Mapping[str, torch.Tensor], names: Sequence[str]) -> str:
    """Bring the parameters of these names into shared memory, where they are not yet, and say where: what `Home` takes.
    Only where `private_bytes` and `has_room` have allowed it."""
    matrices = {name: _matrix(parameters[name]) for name in names}
    storages = _storages(matrices)
    numbers = {key: number for number, key in enumerate(storages)}
    files = []
    for storage in storages.values():
        # torch's own way to hand a storage to another process (2.13): moves it, once, and keeps the file open.
        descriptor, num_bytes = storage._share_fd_cpu_()
        files.append((descriptor, os.fstat(descriptor).st_ino, num_bytes))
    places = {
        name: (numbers[one.untyped_storage()._cdata], one.storage_offset(), one.stride(0)) for name, one in matrices.items()
    }
    return json.dumps({"process": os.getpid(), "files": files, "places": places})


def _storages(matrices: Mapping[str, torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    return {one.untyped_storage()._cdata: one.untyped_storage() for one in matrices.values()}


class Home:
    """A trainer rank's parameters, mapped into this process for reading alone."""

    def __init__(self, said: str, rank: int, dtype: torch.dtype) -> None:
        """`said` is what `share` gave on that rank. Raises SyncError where they cannot be reached."""
        self.said = said
        values = json.loads(said)
        files = [_mapped(values["process"], rank, *file).view(dtype) for file in values["files"]]
        self._places = {name: (files[file], offset, stride) for name, (file, offset, stride) in values["places"].items()}

    def box(self, parameter: str, row: int, col: int, rows: int, cols: int) -> torch.Tensor:
        """A box [rows, cols] of a local parameter."""
        file, offset, stride = self._places[parameter]
        return file.as_strided((rows, cols), (stride, 1), offset + row * stride + col)


def own_box(
    parameters: Mapping[str, torch.Tensor], parameter: str, row: int, col: int, rows: int, cols: int
) -> torch.Tensor:
    """The same of a rank's own."""
    box = _matrix(parameters[parameter])[row : row + rows, col : col + cols]
    if tuple(box.shape) != (rows, cols):
        raise ValueError(f"{parameter} of {tuple(parameters[parameter].shape)} has no box {rows} x {cols} at ({row}, {col})")
    return box


def _matrix(parameter: torch.Tensor) -> torch.Tensor:
    """A vector is one column."""
    own = parameter.detach()
    return own.view(own.shape[0], -1)


def _mapped(process: int, rank: int, descriptor: int, number: int, num_bytes: int) -> torch.Tensor:
    """An open file of another process, uint8 [bytes]."""
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        own = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SyncError(
            f"no way to the weights of trainer rank {rank} at {path}: {error}; it is gone, or engines and trainer do not "
            "see each other's processes (containers of their own), and then they need weight_sync.transport = gloo"
        ) from error
    try:
        found = os.fstat(own)
        if (found.st_ino, found.st_size) != (number, num_bytes):  # a process that was started again has other files
            raise SyncError(
                f"{path} is not the weights of trainer rank {rank}: it is gone, or other processes have its number"
            )
        content = mmap.mmap(own, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
    finally:
        os.close(own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch knows no memory that is only read; nobody writes to this
        return torch.frombuffer(content, dtype=torch.uint8)
