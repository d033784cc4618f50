"""The one place that knows CUDA from CPU. Importing it makes megatron-core importable on this machine."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.platform import cpu_megatron, device_memory, profiling, transfers
from megarl.platform.messages import GlooMessages, NcclMessages
from megarl.platform.peaks import peak_of


@dataclass(frozen=True)
class Platform:
    """What the rest of megarl may know about the device."""

    kind: str  # "cuda" or "cpu"
    backend: str  # torch.distributed backend of the default group, and of all that are made without naming another
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

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of this process's GPU, as (9, 0); None on a CPU."""
        return torch.cuda.get_device_capability() if self.kind == "cuda" else None

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cuda", local_rank) if self.kind == "cuda" else torch.device("cpu")

    def synchronize(self) -> None:
        """Wait until the device has finished, so that a phase's seconds are its own."""
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def current_device(self) -> torch.device:
        """The device that this thread computes on."""
        return self.device(torch.cuda.current_device() if self.kind == "cuda" else 0)

    def empty_cache(self) -> None:
        """Give the device's memory that torch's allocator keeps for later back to the driver: other processes of the device
        map theirs from there."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def release_memory(self) -> None:
        """The same, of all memory that no live tensor uses: also what only reference cycles hold, and what queued kernels
        still read."""
        if self.kind == "cuda":
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def take_peak_reserved_bytes(self) -> int | None:
        """The most that torch's allocator has held of the device since this was last called; None on a CPU."""
        if self.kind != "cuda":
            return None
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        return peak

    def pair_without_peer_access(self, devices: Iterable[int]) -> tuple[int, int] | None:
        """The first two of these devices of which one cannot reach the other's memory; None where all can, and on a CPU."""
        pairs = permutations(sorted(set(devices)), 2) if self.kind == "cuda" else ()
        return next((pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)), None)

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

        On a GPU it runs on a stream of its own, beside the computation.
        """
        strides = torch.empty_like(tensor, device="meta").stride()  # the tensor's own, without gaps
        copy = self.host_bytes(tensor.nbytes).view(tensor.dtype).as_strided(tensor.shape, strides)
        if self.kind != "cuda":
            return copy.copy_(tensor), None
        stream = transfers.stream_of(tensor.device, "out")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            copy.copy_(tensor, non_blocking=True)
            event = stream.record_event()
        tensor.record_stream(stream)  # its memory is not given away before the copy is made
        return copy, event

    def to_device(self, copy: torch.Tensor, device: torch.device, event: Any) -> tuple[torch.Tensor, Any]:
        """Start to bring a copy that `to_host` made back to the device; the tensor, and the event that it is complete at
        (None on a CPU). On a GPU it runs on a stream of its own, beside the computation."""
        if self.kind == "cuda":
            return transfers.start_to_device(copy, device, event)
        return torch.empty_like(copy, device=device).copy_(copy), None

    def upload(self, arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        """The arrays as tensors on the device, all in one transfer that the host does not wait for."""
        return transfers.upload(arrays, device) if self.kind == "cuda" else [torch.from_numpy(one) for one in arrays]

    @property
    def prefetches(self) -> bool:
        """Whether copies between host and device run beside the computation."""
        return self.kind == "cuda"

    @property
    def attention_shares_keys(self) -> bool:
        """Whether `scaled_dot_product_attention` takes one head of keys for several of queries in every precision; else it
        writes out the square of each sequence."""
        return self.kind == "cpu"

    def varlen_attention(self, dtype: torch.dtype, head_dim: int) -> Callable[..., torch.Tensor] | None:
        """`torch.nn.attention.varlen.varlen_attn` where this device runs it for such heads, else None."""
        has = transfers.has_varlen_attention(self.capability, dtype, head_dim)
        return transfers.varlen_attention() if has else None

    def device_bytes(self, size: int) -> torch.Tensor:
        """Zeroed memory of this process's device, uint8 [size]."""
        return torch.zeros(size, dtype=torch.uint8, device="cuda" if self.kind == "cuda" else "cpu")

    def shared_device_bytes(self, size: int) -> tuple[torch.Tensor, bytes]:
        """The same, and a handle by which other processes of this machine reach it, with `reach_device_bytes`. On a CPU a
        file without a name stands in."""
        if self.kind == "cuda":
            return device_memory.share_on_cuda(size, self.current_device())
        return device_memory.share_on_cpu(size)

    def reach_device_bytes(self, handle: bytes) -> torch.Tensor:
        """Memory that another process shares. Raises RuntimeError where it cannot be reached."""
        if self.kind == "cuda":
            return device_memory.reach_on_cuda(handle, self.current_device())
        return device_memory.reach_on_cpu(handle)

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
        """Named parts of a step in the profiler of the device's maker; on a GPU alone."""
        return profiling.NvtxRanges()

    def start_capture(self) -> None:
        """Have that profiler record from here to `stop_capture`; on a GPU alone."""
        profiling.start_capture()

    def stop_capture(self) -> None:
        """The end of a `start_capture`."""
        profiling.stop_capture()

    def record_allocations(self) -> None:
        """Have the device's allocator keep its history; nothing on a CPU, which has none."""
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


def _detect() -> Platform:
    if torch.cuda.is_available():
        # Without Transformer Engine a GPU takes the modules of the CPU path: torch's fused attention runs on both.
        # The compiled part: the wheel of `transformer_engine` alone has none.
        spec = "local" if importlib.util.find_spec("transformer_engine_torch") is None else "transformer_engine"
        # No gloo in it: every group of a layout would be a mesh of sockets too. What has only CPU tensors to exchange takes
        # a gloo group of its own: megarl's metadata (`megatron/parallel.py`), megatron-core's optimizer states.
        return Platform("cuda", "nccl", spec)
    return Platform("cpu", "gloo", "local")


current = _detect()
if current.kind == "cpu":
    cpu_megatron.install()
