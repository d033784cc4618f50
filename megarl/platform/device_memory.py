"""Share memory with other processes of this machine, which map it by a handle: GPU allocations, or unnamed files on the
host.

A handle names neither a device nor an event: a Ray actor sees only its own device, and cannot open events of other devices.
"""

from __future__ import annotations

import ast
import ctypes
import mmap
import os
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

IPC_HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE
SHARED_MEMORY = Path("/dev/shm")
LOCKED = 0x2000  # Linux's MAP_LOCKED on x86 and arm64; Python 3.11 has no name for it


def share_on_cuda(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, str]:
    """Return zeroed memory of the current `device`, uint8 [num_bytes], and its handle. The memory comes from `cudaMalloc`,
    because torch's allocator has no IPC handles under `expandable_segments`, and is freed with its last view. Raises
    RuntimeError if the device has too little memory or cannot share it."""
    from cuda.bindings import runtime  # torch depends on it where it is built for CUDA

    pointer = _value(runtime.cudaMalloc(num_bytes), f"cudaMalloc of {num_bytes} bytes")
    memory = _tensor_at(pointer, num_bytes, device, partial(runtime.cudaFree, pointer)).zero_()
    torch.cuda.synchronize()  # write the zeros before other processes read
    return memory, _cuda_handle(pointer, num_bytes, 0, num_bytes)


def share_cuda(storage: torch.UntypedStorage) -> str:
    """Return the handle of a storage of torch's allocator. Raises RuntimeError under `expandable_segments`."""
    from cuda.bindings import driver

    base, num_bytes = _values(driver.cuMemGetAddressRange(storage.data_ptr()), "cuMemGetAddressRange")
    offset = storage.data_ptr() - int(base)
    try:
        return _cuda_handle(int(base), int(num_bytes), offset, storage.nbytes())
    except RuntimeError as error:
        raise RuntimeError(
            f"{error}; memory of PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True cannot be mapped by other processes: "
            "leave that setting out, or use weight_sync.transport: group"
        ) from error


def _cuda_handle(base: int, num_bytes: int, offset: int, size: int) -> str:
    from cuda.bindings import runtime

    handle = _value(runtime.cudaIpcGetMemHandle(base), "cudaIpcGetMemHandle")
    return repr((ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES), num_bytes, offset, size))


def share_on_host(num_bytes: int) -> tuple[torch.Tensor, str]:
    """Return zeroed host memory, uint8 [num_bytes], and its handle. Raises RuntimeError if there is too little memory."""
    descriptor = os.memfd_create("megarl")
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise RuntimeError(f"no {num_bytes} bytes of shared memory: {error}") from error
    memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=torch.uint8)
    weakref.finalize(memory.untyped_storage(), os.close, descriptor)
    return memory, _file_handle(descriptor)


def share_cpu(storage: torch.UntypedStorage) -> str:
    """Move a storage into shared memory, unless it is there already, and return its handle."""
    # As torch shares a storage with another process (2.13): this moves the storage once, and keeps the file open.
    return _file_handle(storage._share_fd_cpu_()[0])


def _file_handle(descriptor: int) -> str:
    status = os.fstat(descriptor)
    # Process ids and descriptors repeat; inode numbers do not.
    return repr((f"/proc/{os.getpid()}/fd/{descriptor}", status.st_ino, status.st_size))


def reach(handle: str) -> torch.Tensor:
    """Map shared memory, uint8 [bytes]. On a GPU the result counts as memory of the current device, so that one kernel casts
    and gathers a box over NVLink; both devices must be peers. Raises RuntimeError if the memory cannot be mapped."""
    values = ast.literal_eval(handle)
    return _reach_file(*values) if isinstance(values[0], str) else _reach_cuda(*values)


def _reach_cuda(name: bytes, num_bytes: int, offset: int, size: int) -> torch.Tensor:
    from cuda.bindings import runtime

    opened = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(opened.getPtr(), name, IPC_HANDLE_BYTES)
    # An allocation that holds several storages is opened several times; CUDA counts the openings.
    flags = runtime.cudaIpcMemLazyEnablePeerAccess
    pointer = _value(runtime.cudaIpcOpenMemHandle(opened, flags), "cudaIpcOpenMemHandle")
    device = torch.device("cuda", torch.cuda.current_device())
    memory = _tensor_at(pointer, num_bytes, device, partial(runtime.cudaIpcCloseMemHandle, pointer))
    return memory[offset : offset + size]


def _reach_file(path: str, number: int, num_bytes: int) -> torch.Tensor:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(f"{path}: {error}") from error
    try:
        status = os.fstat(descriptor)
        if (status.st_ino, status.st_size) != (number, num_bytes):  # a restarted process has other files
            raise RuntimeError(f"{path} is another file: its process is gone, or another process has its number")
        # Lock the pages if the system allows it (`ulimit -l`). No process touches the weights during generation. If the
        # kernel drops idle pages from the mapping, the next sync pays for each page: on a machine with DAMON's pageout,
        # copying the 540 MB of SmolLM2 took 0.9 to 1.2 s, and 0.4 s with locked pages (two runs each).
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        try:
            content = mmap.mmap(descriptor, num_bytes, flags | LOCKED, mmap.PROT_READ)
        except OSError:
            try:
                content = mmap.mmap(descriptor, num_bytes, flags, mmap.PROT_READ)
            except OSError as error:
                raise RuntimeError(f"{path} cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only memory; no caller writes to this memory
        return torch.frombuffer(content, dtype=torch.uint8)


def _values(answer: tuple[Any, ...], call: str) -> list[Any]:
    """Return the values of a CUDA call. Raises RuntimeError with the name of CUDA's error."""
    error, *values = answer
    if error != 0:
        raise RuntimeError(f"{call}: {error.name}")
    return values


def _value(answer: tuple[Any, ...], call: str) -> Any:
    return _values(answer, call)[0]


def _tensor_at(pointer: int, num_bytes: int, device: torch.device, release: Callable[[], Any]) -> torch.Tensor:
    """Return the memory at an address, uint8 [num_bytes]; `release` runs when the last view is gone.

    torch's CUDA graphs make a storage of foreign memory in the same way (2.13).
    """
    storage = torch._C._construct_storage_from_data_pointer(pointer, device, num_bytes)
    weakref.finalize(storage, release).atexit = False  # at exit the device's context ends anyway
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))
