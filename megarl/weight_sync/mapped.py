"""The transport `mapped`: workers map the parameters of the trainer ranks and copy every box straight from there.

On a CPU the first sync moves the storages of the parameters into shared memory. Every tensor that views them stays valid,
megatron-core's buffers included. On a GPU workers open the allocations of the parameters by CUDA IPC. A box is copied in
pieces. Once a worker has copied everything, the ranks compute the checksums of what they hold, and the worker compares them
with the checksums of its copies. Equal checksums prove that nobody wrote the weights during the copy.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Mapping, Sequence

import torch

from megarl.platform import current as platform
from megarl.platform.device_memory import SHARED_MEMORY
from megarl.weight_sync.buckets import Piece
from megarl.weight_sync.checks import checksums
from megarl.weight_sync.manifest import SyncError

FILES_SHARE = 4  # parameters may take a quarter of the files that a process may open


def needs_of(parameters: Mapping[str, torch.Tensor], names: Sequence[str]) -> tuple[int, int]:
    """Return what a rank needs before these parameters can be mapped: bytes of shared memory, and files. Nothing on a GPU,
    and no bytes for parameters that are shared already."""
    if not platform.shares_by_moving:
        return 0, 0
    storages = _storages(parameters, names).values()
    return sum(storage.nbytes() for storage in storages if not storage.is_shared()), len(storages)


def obstacle_of(needs: Sequence[tuple[int, int]]) -> str | None:
    """Describe what this host lacks of what all ranks need (`needs_of`); None if it has everything."""
    room = os.statvfs(SHARED_MEMORY)
    num_bytes, num_files = map(sum, zip(*needs, strict=True))
    free_bytes, most = room.f_bavail * room.f_frsize, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // FILES_SHARE
    if num_bytes > free_bytes:  # writing to a page that cannot be allocated would end the process
        return f"mapped weights need {num_bytes} bytes of shared memory, which has {free_bytes} free (docker run --shm-size)"
    if num_files > most:
        return f"{num_files} parameters have memory of their own, and a worker may open {most} files for them (ulimit -n)"
    return None


def share(parameters: Mapping[str, torch.Tensor], names: Sequence[str]) -> str:
    """Make these parameters mappable; return the address for `map_parameters`.

    Storages move into shared memory one after another, and each exists twice while it moves. So the first sync needs room
    for the largest storage besides the weights: for all weights of the rank where megatron-core keeps them in one buffer.
    """
    storages = _storages(parameters, names)
    handles = [platform.share_storage(storage) for storage in storages.values()]
    numbers = {storage.data_ptr(): number for number, storage in enumerate(storages.values())}  # they may have moved
    places = {}
    for name in names:
        matrix = parameters[name].view(parameters[name].shape[0], -1)  # a vector is one column
        number, dtype = numbers[matrix.untyped_storage().data_ptr()], str(matrix.dtype).removeprefix("torch.")
        places[name] = (number, dtype, matrix.storage_offset(), matrix.shape, matrix.stride())
    return json.dumps({"handles": handles, "places": places})


def map_parameters(address: str, rank: int) -> dict[str, torch.Tensor]:
    """Map the parameters of a trainer rank into this process, as matrices; `address` is the result of `share` on that rank.
    Raises SyncError where they cannot be reached."""
    values = json.loads(address)
    try:
        memories = [platform.reach_bytes(handle) for handle in values["handles"]]
    except RuntimeError as error:
        raise SyncError(
            f"no way to the weights of trainer rank {rank}: {error}; the rank is gone, or engines and trainer do not "
            "see each other's processes (separate containers), and then they need weight_sync.transport = group"
        ) from error
    matrices = {}
    for name, (number, dtype, offset, size, stride) in values["places"].items():
        memory = memories[number].view(getattr(torch, dtype))
        # An offset of `as_strided` counts from the begin of the storage: of the whole allocation that was mapped.
        matrices[name] = memory.as_strided(size, stride, memory.storage_offset() + offset)
    return matrices


def local_checksums(parameters: Mapping[str, torch.Tensor], pieces: Sequence[Piece], version: int) -> torch.Tensor:
    """Return the checksums of pieces in their dtype, as workers hold them: int64 [pieces], in host memory."""
    contents = (box.within(parameters[box.parameter]).to(box.dtype) for _, box, *_ in pieces)
    return checksums(contents, version, [piece.number for piece in pieces]).cpu()


def _storages(parameters: Mapping[str, torch.Tensor], names: Sequence[str]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of parameters by their address."""
    storages = (parameters[name].untyped_storage() for name in names)
    return {storage.data_ptr(): storage for storage in storages}
