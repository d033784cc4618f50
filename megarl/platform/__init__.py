"""The one place that knows CUDA from CPU. Importing it makes megatron-core importable on this machine."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.platform import cpu_megatron, device_memory, profiling
from megarl.platform.messages import GlooMessages, NcclMessages
from megarl.platform.peaks import peak_of


@dataclass(frozen=True)
class Platform:
    """What the rest of megarl may know about the device."""

    kind: str  # "cuda" or "cpu"
    backend: str  # torch.distributed backend of the collectives on tensors of this device
    layer_spec: str  # "transformer_engine" or "local": which megatron-core layer specs run here

    @property
    def num_devices(self) -> int | None:
        """Devices that a process of this node sees; None on a CPU, whose cores all share."""
        return torch.cuda.device_count() if self.kind == "cuda" else None

    @property
    def total_bytes(self) -> int | None:
        """Memory of this process's device; None on a CPU."""
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if self.kind == "cuda" else None

    @property
    def device_variable(self) -> str | None:
        """The environment variable that lists the devices a process may see, numbered anew from 0 in its order."""
        return "CUDA_VISIBLE_DEVICES" if self.kind == "cuda" else None

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cuda", local_rank) if self.kind == "cuda" else torch.device("cpu")

    def synchronize(self) -> None:
        """Wait until the device has finished, so that a phase's seconds are its own."""
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def has_avx(self) -> bool:
        """Whether the host's CPU is one whose kernels torch runs with AVX: an x86."""
        return torch.backends.cpu.get_cpu_capability().startswith("AVX")

    def peak_tflops(self, precision: str) -> float | None:
        """What this process's device can compute at most, in 10**12 operations a second; None where it is not known."""
        return peak_of(torch.cuda.get_device_name(), precision) if self.kind == "cuda" else None

    def host_bytes(self, size: int) -> torch.Tensor:
        """Memory of the host for `size` bytes that left the device, on a GPU pinned.

        On a CPU it is not torch's: torch's allocator then holds what a device would hold, and the rest is apart.
        """
        if self.kind == "cuda":
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.from_numpy(np.empty(size, dtype=np.uint8))

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start a copy of a tensor to the host; the copy, and the event that it is complete at (None on a CPU).

        On a GPU it runs on a stream of its own, beside the computation. Not yet run on a GPU.
        """
        strides = torch.empty_like(tensor, device="meta").stride()  # the tensor's own, without gaps
        copy = self.host_bytes(tensor.nbytes).view(tensor.dtype).as_strided(tensor.shape, strides)
        if self.kind != "cuda":
            return copy.copy_(tensor), None
        stream = _offload_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            copy.copy_(tensor, non_blocking=True)
            event = stream.record_event()
        tensor.record_stream(stream)  # its memory is not given away before the copy is made
        return copy, event

    def to_device(self, copy: torch.Tensor, device: torch.device, event: Any) -> torch.Tensor:
        """A copy that `to_host` made, on the device again."""
        if event is not None:
            event.wait()
        return torch.empty_like(copy, device=device, pin_memory=False).copy_(copy, non_blocking=True)

    def device_bytes(self, size: int) -> torch.Tensor:
        """Zeroed memory of this process's device, uint8 [size]."""
        return torch.zeros(size, dtype=torch.uint8, device="cuda" if self.kind == "cuda" else "cpu")

    def shared_device_bytes(self, size: int) -> tuple[torch.Tensor, bytes]:
        """The same, and a handle by which other processes of this machine reach it, with `reach_device_bytes`. On a CPU a
        file without a name stands in. Not yet run on a GPU."""
        return device_memory.share_on_cuda(size) if self.kind == "cuda" else device_memory.share_on_cpu(size)

    def reach_device_bytes(self, handle: bytes) -> torch.Tensor:
        """Memory that another process shares. Raises RuntimeError where it cannot be reached."""
        return device_memory.reach_on_cuda(handle) if self.kind == "cuda" else device_memory.reach_on_cpu(handle)

    def settle(self) -> None:
        """Wait until what this process has the device do, in its current stream, is done and seen by every process."""
        if self.kind == "cuda":
            torch.cuda.current_stream().synchronize()

    def message_group(
        self, store: dist.Store, member: int, size: int, timeout_s: float, meeting_s: float, host: str, on_device: bool
    ) -> GlooMessages | NcclMessages:
        """Meet in a group of processes, to exchange messages between the memory of their devices or of their hosts; `host`
        is the store's machine. On a CPU gloo stands in for NCCL. Raises RuntimeError where others do not come within
        `meeting_s`; `timeout_s` is how long a call of NCCL's may take."""
        store.set_timeout(timedelta(seconds=meeting_s))
        if on_device and self.kind == "cuda":
            return NcclMessages(store, member, size, timeout_s, meeting_s)
        return GlooMessages(store, member, size, meeting_s, host, numbered=not on_device)

    @property
    def profile_activities(self) -> list[torch.profiler.ProfilerActivity]:
        """What torch's profiler records."""
        return profiling.activities(self.kind)

    def torch_ranges(self) -> profiling.TorchRanges:
        """Named parts of a step in torch's profiler."""
        return profiling.TorchRanges()

    def device_ranges(self) -> profiling.NvtxRanges:
        """Named parts of a step in the profiler of the device's maker; on a GPU alone. Not yet run on a GPU."""
        return profiling.NvtxRanges()

    def start_capture(self) -> None:
        """Have that profiler record from here to `stop_capture`; on a GPU alone. Not yet run on a GPU."""
        profiling.start_capture()

    def stop_capture(self) -> None:
        """The end of a `start_capture`."""
        profiling.stop_capture()

    def record_allocations(self) -> None:
        """Have the device's allocator keep its history; nothing on a CPU, which has none. Not yet run on a GPU."""
        if self.kind == "cuda":
            profiling.record_allocations()

    def write_allocations(self, path: Path) -> Path | None:
        """Write that history; where it is, None on a CPU."""
        if self.kind != "cuda":
            return None
        profiling.write_allocations(path)
        return path

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that memory, of the device or of the host, could not be had."""
        return profiling.is_out_of_memory(error)

    def start_process_group(self, local_rank: int, timeout_s: float) -> None:
        """Join the torchrun rendezvous; every collective gets the deadline `timeout_s`."""
        if self.kind == "cuda":
            torch.cuda.set_device(local_rank)
        deadline = timedelta(seconds=timeout_s)
        store, rank, size = next(dist.rendezvous("env://", timeout=deadline))
        # Ranks that are started again must not find the addresses of those before: with a fixed master, torchrun keeps one
        # store for all starts (2.13).
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        own = dist.PrefixStore(f"start {start}", store)
        dist.init_process_group(self.backend, store=own, rank=rank, world_size=size, timeout=deadline)


@cache
def _offload_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _detect() -> Platform:
    if torch.cuda.is_available():
        # Without Transformer Engine a GPU takes the modules of the CPU path: torch's fused attention runs on both.
        spec = "local" if importlib.util.find_spec("transformer_engine") is None else "transformer_engine"
        # gloo beside NCCL: metadata and checkpoints exchange CPU tensors.
        return Platform("cuda", "cpu:gloo,cuda:nccl", spec)
    return Platform("cpu", "gloo", "local")


current = _detect()
if current.kind == "cpu":
    cpu_megatron.install()
