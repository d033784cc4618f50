"""Weights that are read where they are: a trainer rank's parameters lie in shared memory, and the workers of its machine
copy every box from there to its place. No bucket is between, and nobody waits for anybody but at the end.

The storages under the parameters are moved into shared memory at the first sync, as they are: every tensor on top of them,
megatron-core's buffers and their views too, stays what it was. They are files without a name, that other processes of the
machine open through `/proc`, and gone with the last process that maps them. Workers map them for reading alone.

A box is copied in pieces, several small ones as one, and the bytes of a piece are hashed right after they were copied. When
all was read a rank hashes its own: later, so that both do not draw on the memory's rate at once, and it proves that what was
read is what the rank still holds. The worker compares at the end, before its engine takes the version.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from megarl.weight_sync.manifest import SyncError
from megarl.weight_sync.plan import ReshardPlan
from megarl.weight_sync.segment import ROOT
from megarl.weight_sync.stream import CHECKSUM_BYTES, checksum_of_parts

# What is hashed at a time: the copy has left it in the cache.
PIECE_BYTES = 2 << 20
# Linux's MAP_LOCKED on x86 and arm64, which Python 3.11 has no name for.
LOCKED = 0x2000
# Of the files that a process may have open, those that parameters may be.
FILES_SHARE = 4
_WORDS = {2: torch.int16, 4: torch.int32}


class Place(NamedTuple):
    """Where a piece lies in a local parameter: `rows` x `cols` elements from (row, col) on; of several boxes `boxes` such,
    each `step` rows behind the one before."""

    parameter: str
    row: int
    col: int
    rows: int
    cols: int
    boxes: int = 1
    step: int = 0

    @property
    def size(self) -> tuple[int, ...]:
        """[rows, cols], or [boxes, rows, cols]."""
        return (self.rows, self.cols) if self.boxes == 1 else (self.boxes, self.rows, self.cols)


def part_of(matrix: torch.Tensor, row: int, col: int, size: Sequence[int], step: int) -> torch.Tensor:
    """A view of size [rows, cols], or [boxes, rows, cols] with a box every `step` rows, from (row, col) of a matrix on.
    Raises ValueError where the matrix ends before it."""
    *boxes, rows, cols = size
    last = row + rows + (step * (boxes[0] - 1) if boxes else 0)
    if last > matrix.shape[0] or col + cols > matrix.shape[1]:
        raise ValueError(f"a matrix of {tuple(matrix.shape)} has no rows up to {last} and columns up to {col + cols}")
    if not boxes:
        return matrix[row : row + rows, col : col + cols]
    down, right = matrix.stride()
    return matrix.as_strided(size, (step * down, down, right), matrix.storage_offset() + row * down + col * right)


@dataclass(frozen=True, eq=False)
class Pieces:
    """The boxes of one destination in the order in which they are read, as int64 columns [pieces]: `rows` rows, from row
    `row` on, of the copy number `copy` of the plan, which rank `source` holds.

    Boxes that follow each other at even steps, in the rank's parameter and in the worker's, are one piece: Megatron keeps
    the queries of one key-value group behind those of another, with keys and values between. So a piece is of `boxes` copies
    from `copy` on, each `source_step` rows behind the one before at the rank, and `destination_step` at the worker.
    """

    copy: np.ndarray
    row: np.ndarray
    rows: np.ndarray
    source: np.ndarray
    boxes: np.ndarray
    source_step: np.ndarray
    destination_step: np.ndarray

    @classmethod
    def of(cls, plan: ReshardPlan, copies: np.ndarray, itemsize: int) -> Pieces:
        """`copies` are positions in the plan, all to one destination; `itemsize` is bytes of an element."""
        first, boxes, *steps = _even_steps(plan, copies, itemsize)
        copies = copies[first]
        most = np.maximum(1, PIECE_BYTES // (plan.cols[copies] * itemsize))
        counts = np.where(boxes > 1, 1, -(-plan.rows[copies] // most))
        row = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        copy, most, boxes, source_step, destination_step = (
            np.repeat(column, counts) for column in (copies, most, boxes, *steps)
        )
        row = row * most
        rows = np.where(boxes > 1, plan.rows[copy], np.minimum(most, plan.rows[copy] - row))
        return cls(copy, row, rows, plan.source_rank[copy], boxes, source_step, destination_step)

    def __len__(self) -> int:
        return len(self.copy)

    @property
    def table_bytes(self) -> int:
        """Of a checksum for each piece."""
        return CHECKSUM_BYTES * len(self)

    def elements_before(self, plan: ReshardPlan) -> np.ndarray:
        """Elements of all pieces before each, int64 [pieces + 1]."""
        return np.concatenate([[0], np.cumsum(self.boxes * self.rows * plan.cols[self.copy])])

    def of_rank(self, rank: int) -> np.ndarray:
        """Positions of the pieces that a rank holds."""
        return np.flatnonzero(self.source == rank)

    def at_source(self, plan: ReshardPlan, number: int) -> Place:
        """Where a piece is in its rank's memory."""
        copy = self.copy[number]
        parameter = plan.source_parameters[plan.source_parameter[copy]]
        return self._place(plan, number, parameter, plan.source_row[copy], plan.source_col[copy], self.source_step)

    def at_destination(self, plan: ReshardPlan, number: int) -> Place:
        """Where a piece goes in its worker's memory."""
        copy = self.copy[number]
        parameter = plan.destination_parameters[plan.destination_parameter[copy]]
        row, col = plan.destination_row[copy], plan.destination_col[copy]
        return self._place(plan, number, parameter, row, col, self.destination_step)

    def _place(self, plan: ReshardPlan, number: int, parameter: str, row: int, col: int, steps: np.ndarray) -> Place:
        rows, cols = int(self.rows[number]), int(plan.cols[self.copy[number]])
        first = int(row) + int(self.row[number])
        return Place(parameter, first, int(col), rows, cols, int(self.boxes[number]), int(steps[number]))


def _even_steps(plan: ReshardPlan, copies: np.ndarray, itemsize: int) -> tuple[np.ndarray, ...]:
    """(first, boxes, source step, destination step) of the runs of copies that are one piece, each as large as a piece may
    be; `first` are positions in `copies`. A copy that is none of a run is one of its own."""
    alike = ("source_rank", "source_parameter", "source_col", "destination_parameter", "destination_col", "rows", "cols")
    same = np.ones(max(0, len(copies) - 1), dtype=bool)
    for column in alike:
        values = getattr(plan, column)[copies]
        same &= values[1:] == values[:-1]
    source, destination = np.diff(plan.source_row[copies]), np.diff(plan.destination_row[copies])
    same &= (source > 0) & (destination > 0)
    most = np.maximum(1, PIECE_BYTES // (plan.rows[copies] * plan.cols[copies] * itemsize)).tolist()
    links = list(zip(same.tolist(), source.tolist(), destination.tolist(), strict=True))
    runs: list[tuple[int, int, int, int]] = []
    first = 0
    while first < len(copies):
        last, steps = first, (0, 0)
        while last < len(links) and links[last][0] and last + 1 - first < most[first]:
            if last > first and links[last][1:] != steps:
                break
            steps = links[last][1:]
            last += 1
        runs.append((first, last + 1 - first, *steps))
        first = last + 1
    return tuple(np.array(runs, dtype=np.int64).reshape(-1, 4).T)


def words_of(content: torch.Tensor) -> np.ndarray:
    """The same memory as whole numbers for numpy, which knows no bfloat16."""
    return content.view(_WORDS[content.itemsize]).numpy()


def hashed_parts(words: np.ndarray) -> list[np.ndarray]:
    """A piece as parts whose bytes lie one behind the other. It is one where all of them do, or where no box's own do: these
    have to be copied before they are hashed."""
    if words.ndim == 3 and not words.flags.c_contiguous and words[0].flags.c_contiguous:
        return list(words)
    return [words]


def piece_checksum(parts: Sequence[np.ndarray], version: int, number: int) -> int:
    """Of a piece in `hashed_parts`, by its number among those of its destination. It is that of its elements in their order,
    however they lie."""
    return checksum_of_parts([np.ascontiguousarray(part) for part in parts], version, number)


def identity(parameters: Mapping[str, torch.Tensor], names: Sequence[str]) -> list[tuple[Any, ...]]:
    """Where the parameters of these names lie, and how. While somebody keeps views of them, so that nothing else can come to
    lie there, whatever has the same identity is the same memory."""
    own = [parameters[name] for name in names]
    return [(one.data_ptr(), one.shape, one.stride(), one.dtype) for one in own]


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
    Only where `private_bytes` and `has_room` have allowed it.

    A storage that moves is there twice for a moment, one after the other. So the first sync alone takes as much as the
    largest storage beside the weights: where megatron-core keeps them in one buffer, as much as all of the rank's.
    """
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

    def box(self, place: Place) -> torch.Tensor:
        """A piece of a local parameter, [rows, cols] or [boxes, rows, cols]."""
        file, offset, stride = self._places[place.parameter]
        steps = (stride, 1) if place.boxes == 1 else (place.step * stride, stride, 1)
        return file.as_strided(place.size, steps, offset + place.row * stride + place.col)


def own_box(parameters: Mapping[str, torch.Tensor], place: Place) -> torch.Tensor:
    """The same of a rank's own. Raises ValueError for a parameter that is smaller."""
    try:
        return part_of(_matrix(parameters[place.parameter]), place.row, place.col, place.size, place.step)
    except ValueError as error:
        size = tuple(parameters[place.parameter].shape)
        raise ValueError(f"{place.parameter} of {size} has not the size that the plan says: {error}") from error


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
        content = _read_only(own, num_bytes)
    finally:
        os.close(own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch knows no memory that is only read; nobody writes to this
        return torch.frombuffer(content, dtype=torch.uint8)


def _read_only(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Locked where the system lets us (`ulimit -l`), and mapped all the same where not. Nobody touches the weights while
    completions are generated, and where the kernel takes idle pages out of the mapping the next sync pays for each: in two
    runs each, on a machine with DAMON's pageout, copying the 540 MB of SmolLM2 took 0.9 to 1.2 s, and locked 0.4."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    try:
        return mmap.mmap(descriptor, num_bytes, flags | LOCKED, mmap.PROT_READ)
    except OSError:
        return mmap.mmap(descriptor, num_bytes, flags, mmap.PROT_READ)
