"""What profilers and memory reports know of the device: ranges, captured steps, the allocator's history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

MOST_ALLOCATIONS = 100_000  # of the allocator's history, about 100 bytes each and the stack of each
OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "CUDA out of memory")


class TorchRanges:
    """Named parts of a step in torch's own profiler; they nest."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def open(self, name: str) -> None:
        self._open.append(torch.profiler.record_function(name))
        self._open[-1].__enter__()

    def close(self) -> None:
        self._open.pop().__exit__(None, None, None)


class NvtxRanges:
    """The same in Nsight Systems."""

    def open(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)

    def close(self) -> None:
        torch.cuda.nvtx.range_pop()


def activities(kind: str) -> list[torch.profiler.ProfilerActivity]:
    """What torch's profiler records where megarl computes on `kind`."""
    found = [torch.profiler.ProfilerActivity.CPU]
    return [*found, torch.profiler.ProfilerActivity.CUDA] if kind == "cuda" else found


def start_capture() -> None:
    """Have Nsight Systems record from here, if it waits for that (--capture-range=cudaProfilerApi)."""
    torch.cuda.profiler.start()


def stop_capture() -> None:
    """And to here."""
    torch.cuda.synchronize()  # what the host has queued belongs to the step
    torch.cuda.profiler.stop()


def record_allocations() -> None:
    """Have the allocator of this process's device keep its history, with Python's stacks."""
    torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS, stacks="python")


def write_allocations(path: Path) -> None:
    """Write that history, in the form that pytorch.org/memory_viz shows."""
    torch.cuda.memory._dump_snapshot(str(path))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it comes from, says that memory could not be had."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(seen, RuntimeError) and any(text in str(seen) for text in OUT_OF_MEMORY):
            return True
        seen = seen.__cause__
    return False
