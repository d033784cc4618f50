"""Device memory that other processes of this machine map by a handle; an unnamed file on a CPU.

On a GPU the memory comes from `cudaMalloc`, because torch's allocator has no plain IPC handle under `expandable_segments`.
The handle names neither a device nor an event: a Ray actor sees only its own device, and cannot open events of others.
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
    """Return zeroed memory of the current `device`, uint8 [num_bytes], and its handle. It is freed with the last view of it.
    Raises RuntimeError where the device has too little memory or cannot share it."""
    from cuda.bindings import runtime  # torch depends on it where it is built for CUDA

    pointer = _value(runtime.cudaMalloc(num_bytes), f"cudaMalloc of {num_bytes} bytes")
    memory = _tensor_at(pointer, num_bytes, device, partial(runtime.cudaFree, pointer)).zero_()
    handle = _value(runtime.cudaIpcGetMemHandle(pointer), "cudaIpcGetMemHandle")
    torch.cuda.synchronize()  # write the zeros before other processes write
    return memory, repr((ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES), num_bytes)).encode()


def reach_on_cuda(handle: bytes, device: torch.device) -> torch.Tensor:
    """Map memory of another process as memory of the current `device`, so that one kernel casts, gathers and writes a box
    over NVLink; torch would first copy a tensor of another device. Both devices must be peers. Raises RuntimeError where the
    memory cannot be mapped."""
    from cuda.bindings import runtime

    name, num_bytes = ast.literal_eval(handle.decode())
    opened = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(opened.getPtr(), name, IPC_HANDLE_BYTES)
    pointer = _value(runtime.cudaIpcOpenMemHandle(opened, runtime.cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle")
    return _tensor_at(pointer, num_bytes, device, partial(runtime.cudaIpcCloseMemHandle, pointer))


def _value(answer: tuple[Any, ...], call: str) -> Any:
    """Return the value of a CUDA call. Raises RuntimeError with the name of its error."""
    error, *value = answer
    if error != 0:
        raise RuntimeError(f"{call}: {error.name}")
    return value[0]


def _tensor_at(pointer: int, num_bytes: int, device: torch.device, release: Callable[[], Any]) -> torch.Tensor:
    """Return the memory at an address, uint8 [num_bytes]; `release` runs when its last view is gone.

    This is how torch's CUDA graphs make a storage of foreign memory (2.13).
    """
    storage = torch._C._construct_storage_from_data_pointer(pointer, device, num_bytes)
    weakref.finalize(storage, release).atexit = False  # at exit the device's context ends anyway
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))


def share_on_cpu(num_bytes: int) -> tuple[torch.Tensor, bytes]:
    """Do the same on a CPU. The handle has the file's path under /proc and a random mark, because process ids repeat."""
    descriptor = os.memfd_create("megarl-device-memory")
    os.posix_fallocate(descriptor, 0, num_bytes)
    array = _mapped(descriptor, num_bytes)
    weakref.finalize(array, os.close, descriptor)
    return torch.from_numpy(array), repr((secrets.token_hex(8), f"/proc/{os.getpid()}/fd/{descriptor}")).encode()


def reach_on_cpu(handle: bytes) -> torch.Tensor:
    """Do the same on a CPU."""
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
