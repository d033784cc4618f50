"""Memory of the device that other processes of this machine reach by a handle. On a CPU a file without a name stands in.

On a GPU the memory comes from `cudaMalloc` and not from torch's allocator: under `expandable_segments` no plain IPC handle
names the allocator's memory. The handle names neither a device nor an event: a consumer may see other devices than the
owner (a Ray actor sees its own alone) and cannot open an event of a device that it does not see.
"""

from __future__ import annotations

import ast
import ctypes
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

IPC_HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE


def share_on_cuda(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, bytes]:
    """Zeroed memory of `device`, the current one, uint8 [num_bytes], and its handle. It lives as long as the tensor and its
    views. Raises RuntimeError where the device has not so much, or shares none."""
    from cuda.bindings import runtime  # torch depends on it where it is built for CUDA

    pointer = _value(runtime.cudaMalloc(num_bytes), f"cudaMalloc of {num_bytes} bytes")
    memory = _tensor_at(pointer, num_bytes, device, partial(runtime.cudaFree, pointer)).zero_()
    handle = _value(runtime.cudaIpcGetMemHandle(pointer), "cudaIpcGetMemHandle")
    torch.cuda.synchronize()  # the zeros are there before any other process writes
    return memory, repr((ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES), num_bytes)).encode()


def reach_on_cuda(handle: bytes, device: torch.device) -> torch.Tensor:
    """Memory of another process, wherever it lies, as if it were that of `device`, the current one: so that one kernel
    casts, gathers and writes a box over NVLink, where torch would first make a copy for a tensor of another device. Both
    devices must be peers. Raises RuntimeError where the memory cannot be mapped."""
    from cuda.bindings import runtime

    name, num_bytes = ast.literal_eval(handle.decode())
    opened = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(opened.getPtr(), name, IPC_HANDLE_BYTES)
    pointer = _value(runtime.cudaIpcOpenMemHandle(opened, runtime.cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle")
    return _tensor_at(pointer, num_bytes, device, partial(runtime.cudaIpcCloseMemHandle, pointer))


def _value(answer: tuple[Any, ...], call: str) -> Any:
    """The value of a CUDA call. Raises RuntimeError for an error."""
    error, *value = answer
    if error != 0:
        raise RuntimeError(f"{call}: {error.name}")
    return value[0]


def _tensor_at(pointer: int, num_bytes: int, device: torch.device, release: Callable[[], Any]) -> torch.Tensor:
    """Memory at an address, uint8 [num_bytes]; `release` is called when the last view of it is gone.

    torch's own way to make a storage of memory that it did not allocate, as its CUDA graphs do (2.13).
    """
    storage = torch._C._construct_storage_from_data_pointer(pointer, device, num_bytes)
    weakref.finalize(storage, release).atexit = False  # then the device's context is going too
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))


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
