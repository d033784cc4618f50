"""Memory of the device that other processes of this machine reach by a handle. On a CPU a file without a name stands in.

Not yet run on a GPU.
"""

from __future__ import annotations

import ast
import mmap
import os
import secrets
import weakref

import numpy as np
import torch


def share_on_cuda(num_bytes: int) -> tuple[torch.Tensor, bytes]:
    """Zeroed memory of the current device, uint8 [num_bytes], and its handle. It lives as long as the tensor."""
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.synchronize()  # the zeros are there before anyone else writes
    return memory, repr(memory.untyped_storage()._share_cuda_()).encode()


def reach_on_cuda(handle: bytes) -> torch.Tensor:
    """Memory of another process, wherever it lies, as if it were the current device's: so that one kernel casts, gathers and
    writes a box over NVLink, where torch would first make a copy for a tensor of another device. Both devices must be peers.

    The number of the device in the handle is the owner's, which may see other devices than this process (a Ray actor sees
    its own alone), and is not used.
    """
    _, *place = ast.literal_eval(handle.decode())
    device = torch.device("cuda", torch.cuda.current_device())
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *place)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


def share_on_cpu(num_bytes: int) -> tuple[torch.Tensor, bytes]:
    """As `share_on_cuda`. The handle is the file's path among this process's open files, with a mark that no other has: a
    process that is started again may have the number of an earlier one."""
    descriptor = os.memfd_create("megarl-device-memory")
    os.posix_fallocate(descriptor, 0, num_bytes)
    array = _mapped(descriptor, num_bytes)
    weakref.finalize(array, os.close, descriptor)
    return torch.from_numpy(array), repr((secrets.token_hex(8), f"/proc/{os.getpid()}/fd/{descriptor}")).encode()


def reach_on_cpu(handle: bytes) -> torch.Tensor:
    """As `reach_on_cuda`."""
    _, path = ast.literal_eval(handle.decode())
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise RuntimeError(f"its owner is gone: {error}") from error
    try:
        return torch.from_numpy(_mapped(descriptor, os.fstat(descriptor).st_size))
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, num_bytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=np.uint8)
