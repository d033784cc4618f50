"""Weights that are read in place: a trainer rank's parameters lie in shared memory, and the workers of its machine copy
every box straight from there. There are no buckets, and nobody waits until the end.

The first sync moves the storages of the parameters into shared memory. Every tensor on top of them, megatron-core's buffers
and their views too, stays valid. The storages are files without a name, which other processes of the machine open through
`/proc`, and which vanish with the last process that maps them. Workers map them read-only.

A box is copied in pieces, and each piece is hashed right after its copy. When everything
was read, a rank hashes its own bytes: later, so that both ends do not compete for the memory's rate, and because it proves
that what was read is what the rank still holds. The worker compares at the end, before its engine takes the version.
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
from megarl.weight_sync.stream import checksum

PIECE_BYTES = 2 << 20  # hashed at a time, while the copy is in the cache
LOCKED = 0x2000  # Linux's MAP_LOCKED on x86 and arm64; Python 3.11 has no name for it
FILES_SHARE = 4  # parameters may take one in so many of the files that a process may open
_WORDS = {2: torch.int16, 4: torch.int32}


class Place(NamedTuple):
    """Where a piece lies in a local parameter: `rows` x `cols` elements from (row, col) on."""

    parameter: str
    row: int
    col: int
    rows: int
    cols: int


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of one destination in the order in which they are read, as int64 columns [pieces]: `rows` rows, from row
    `row` on, of the copy number `copy` of the plan, which rank `source` holds."""

    copy: np.ndarray
    row: np.ndarray
    rows: np.ndarray
    source: np.ndarray

    @classmethod
    def of(cls, plan: ReshardPlan, copies: np.ndarray, itemsize: int) -> Pieces:
        """Cut `copies`, positions in the plan to one destination, into pieces; `itemsize` is bytes an element."""
        most_rows = np.maximum(1, PIECE_BYTES // (plan.cols[copies] * itemsize))
        counts = -(-plan.rows[copies] // most_rows)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # within its copy
        copy, most_rows = np.repeat(copies, counts), np.repeat(most_rows, counts)
        row = number * most_rows
        return cls(copy, row, np.minimum(most_rows, plan.rows[copy] - row), plan.source_rank[copy])

    def __len__(self) -> int:
        return len(self.copy)

    def at_source(self, plan: ReshardPlan, number: int) -> Place:
        """Where a piece is in its rank's memory."""
        copy = self.copy[number]
        parameter = plan.source_parameters[plan.source_parameter[copy]]
        return self._place(plan, number, parameter, plan.source_row[copy], plan.source_col[copy])

    def at_destination(self, plan: ReshardPlan, number: int) -> Place:
        """Where a piece belongs in its worker's memory."""
        copy = self.copy[number]
        parameter = plan.destination_parameters[plan.destination_parameter[copy]]
        return self._place(plan, number, parameter, plan.destination_row[copy], plan.destination_col[copy])

    def _place(self, plan: ReshardPlan, number: int, parameter: str, row: int, col: int) -> Place:
        rows, cols = int(self.rows[number]), int(plan.cols[self.copy[number]])
        return Place(parameter, int(row) + int(self.row[number]), int(col), rows, cols)


def words_of(content: torch.Tensor) -> np.ndarray:
    """View memory as whole numbers for numpy, which has no bfloat16."""
    return content.view(_WORDS[content.itemsize]).numpy()


def piece_checksum(words: np.ndarray, version: int, number: int) -> int:
    """Hash a piece, by its number among the pieces of its destination; its layout in memory does not count."""
    return checksum(np.ascontiguousarray(words), version, number)


def identity(parameters: Mapping[str, torch.Tensor], names: Sequence[str]) -> list[tuple[Any, ...]]:
    """Address and layout of the parameters of these names. While views of them are kept, so that nothing else can get the
    addresses, an equal identity means the same memory."""
    tensors = [parameters[name] for name in names]
    return [(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]


def private_bytes(parameters: Mapping[str, torch.Tensor], names: Sequence[str], dtype: torch.dtype) -> int | None:
    """Bytes of the parameters of these names that must move into shared memory before they can be read in place.

    None where they cannot be read in place: their dtype is not `dtype`, they are made anew at each access (the mapping is
    no dict), they are not in host memory, or they have more storages than files may be open.
    """
    if not isinstance(parameters, dict):
        return None
    matrices = {name: _matrix(parameters[name]) for name in names}
    if any(m.dtype != dtype or m.device.type != "cpu" or m.stride(1) != 1 for m in matrices.values()):
        return None
    storages = _storages(matrices)
    if len(storages) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // FILES_SHARE:
        return None
    return sum(storage.nbytes() for storage in storages.values() if not storage.is_shared())


def has_room(num_bytes: int) -> bool:
    """Whether shared memory has so many bytes left: writing to a page that cannot be allocated would end the process."""
    room = os.statvfs(ROOT)
    return num_bytes <= room.f_bavail * room.f_frsize


def share(parameters: Mapping[str, torch.Tensor], names: Sequence[str]) -> str:
    """Move the parameters of these names into shared memory, as far as they are not there yet; the address for `Home`. Only
    where `private_bytes` and `has_room` allow it.

    Storages move one after another, and each exists twice while it moves. So the first sync needs room for the largest
    storage besides the weights: for all weights of the rank where megatron-core keeps them in one buffer.
    """
    matrices = {name: _matrix(parameters[name]) for name in names}
    storages = _storages(matrices)
    numbers = {key: number for number, key in enumerate(storages)}
    files = []
    for storage in storages.values():
        # torch's own way to share a storage with another process (2.13): moves it once, and keeps the file open.
        descriptor, num_bytes = storage._share_fd_cpu_()
        files.append((descriptor, os.fstat(descriptor).st_ino, num_bytes))
    places = {name: (numbers[m.untyped_storage()._cdata], m.storage_offset(), m.stride(0)) for name, m in matrices.items()}
    return json.dumps({"process": os.getpid(), "files": files, "places": places})


def _storages(matrices: Mapping[str, torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    return {m.untyped_storage()._cdata: m.untyped_storage() for m in matrices.values()}


class Home:
    """A trainer rank's parameters, mapped into this process read-only."""

    def __init__(self, address: str, rank: int, dtype: torch.dtype) -> None:
        """`address` is the result of `share` on that rank. Raises SyncError where the parameters cannot be reached."""
        self.address = address
        values = json.loads(address)
        files = [_mapped(values["process"], rank, *file).view(dtype) for file in values["files"]]
        self._places = {name: (files[file], offset, stride) for name, (file, offset, stride) in values["places"].items()}

    def box(self, place: Place) -> torch.Tensor:
        """A piece of a local parameter, [rows, cols]."""
        file, offset, stride = self._places[place.parameter]
        return file.as_strided((place.rows, place.cols), (stride, 1), offset + place.row * stride + place.col)


def own_box(parameters: Mapping[str, torch.Tensor], place: Place) -> torch.Tensor:
    """A piece of one of this rank's own parameters. Raises ValueError for a parameter that is smaller."""
    box = _matrix(parameters[place.parameter])[place.row : place.row + place.rows, place.col : place.col + place.cols]
    if box.shape != (place.rows, place.cols):
        raise ValueError(
            f"{place.parameter} of {tuple(parameters[place.parameter].shape)} does not have the size in the plan, at least "
            f"{place.row + place.rows} x {place.col + place.cols}"
        )
    return box


def _matrix(parameter: torch.Tensor) -> torch.Tensor:
    """View a parameter as a matrix; a vector is one column."""
    return parameter.detach().view(parameter.shape[0], -1)


def _mapped(process: int, rank: int, descriptor: int, number: int, num_bytes: int) -> torch.Tensor:
    """Map an open file of another process, uint8 [bytes]."""
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SyncError(
            f"no way to the weights of trainer rank {rank} at {path}: {error}; the rank is gone, or engines and trainer do "
            "not see each other's processes (separate containers), and then they need weight_sync.transport = gloo"
        ) from error
    try:
        status = os.fstat(opened)
        if (status.st_ino, status.st_size) != (number, num_bytes):  # a restarted process has other files
            raise SyncError(
                f"{path} is not the weights of trainer rank {rank}: it is gone, or another process has its number"
            )
        # Locked where the system allows it (`ulimit -l`). Nobody touches the weights during generation, and where the kernel
        # drops idle pages from the mapping the next sync pays for each page: on a machine with DAMON's pageout, copying the
        # 540 MB of SmolLM2 took 0.9 to 1.2 s, and locked 0.4 s (two runs each).
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        try:
            content = mmap.mmap(opened, num_bytes, flags | LOCKED, mmap.PROT_READ)
        except OSError:
            content = mmap.mmap(opened, num_bytes, flags, mmap.PROT_READ)
    finally:
        os.close(opened)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only memory; nobody writes to this
        return torch.frombuffer(content, dtype=torch.uint8)
