"""The one place that knows CUDA from CPU. Importing it makes megatron-core importable on this machine."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.platform import cpu_megatron, device_memory, diagnostics, transfers
from megarl.platform.messages import GlooMessages, NcclMessages

MOST_ALLOCATIONS = 100_000  # of the allocator's history; each has about 100 bytes and a stack


@dataclass(frozen=True)
class Platform:
    """The device that this process computes on. Operations on memory and streams do nothing on a CPU."""

    kind: str  # "cuda" or "cpu"
    backend: str  # torch.distributed's backend of every group that names no other
    layer_spec: str  # megatron-core's layer specs that run here: "transformer_engine" or "local"

    # Properties ---------------------------------------------------------------------------------------------------------

    @property
    def num_devices(self) -> int | None:
        """GPUs that this process sees; None on a CPU, whose cores all processes share."""
        return torch.cuda.device_count() if self.kind == "cuda" else None

    @property
    def total_bytes(self) -> int | None:
        """Memory of this process's GPU; None on a CPU."""
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if self.kind == "cuda" else None

    @property
    def device_variable(self) -> str | None:
        """The environment variable that lists the GPUs that a process may see; it renumbers them from 0."""
        return "CUDA_VISIBLE_DEVICES" if self.kind == "cuda" else None

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of this process's GPU, as (9, 0); None on a CPU."""
        return torch.cuda.get_device_capability() if self.kind == "cuda" else None

    @property
    def prefetches(self) -> bool:
        """Whether copies between host and device overlap with the computation."""
        return self.kind == "cuda"

    @property
    def attention_shares_keys(self) -> bool:
        """Whether `scaled_dot_product_attention` takes fewer key heads than query heads in every precision. On other devices
        it would materialize a matrix with the square of each sequence's length."""
        return self.kind == "cpu"

    @property
    def piece_bytes(self) -> int:
        """Bytes that are copied and hashed at most at a time: on a CPU as many as its last cache holds, since every piece
        costs time in Python; on a GPU each piece takes a dozen kernels."""
        return 32 << 20 if self.kind == "cuda" else 8 << 20

    @property
    def shares_by_moving(self) -> bool:
        """Whether `share_storage` moves a storage into shared memory, which needs room and an open file."""
        return self.kind == "cpu"

    @property
    def frees_once_unmapped(self) -> bool:
        """Whether memory may be freed only once no other process maps it."""
        return self.kind == "cuda"

    def has_avx(self) -> bool:
        """Return whether torch runs AVX kernels on this host's CPU."""
        return torch.backends.cpu.get_cpu_capability().startswith("AVX")

    def peak_tflops(self, precision: str) -> float | None:
        """Return the peak rate of this process's GPU in 10**12 operations a second; None if the rate is unknown."""
        return diagnostics.peak_of(torch.cuda.get_device_name(), precision) if self.kind == "cuda" else None

    def pair_without_peer_access(self, devices: Iterable[int]) -> tuple[int, int] | None:
        """Return the first two of these GPUs that cannot read each other's memory; None if all can, and on a CPU."""
        pairs = permutations(sorted(set(devices)), 2) if self.kind == "cuda" else ()
        return next((pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)), None)

    def varlen_attention(self, dtype: torch.dtype, head_dim: int) -> Callable[..., torch.Tensor] | None:
        """Return `torch.nn.attention.varlen.varlen_attn` if this device runs it for this head size and type, else None."""
        has = transfers.has_varlen_attention(self.capability, dtype, head_dim)
        return transfers.varlen_attention() if has else None

    # Device and its memory ----------------------------------------------------------------------------------------------

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cuda", local_rank) if self.kind == "cuda" else torch.device("cpu")

    def current_device(self) -> torch.device:
        """Return the device that this thread computes on."""
        return self.device(torch.cuda.current_device() if self.kind == "cuda" else 0)

    def synchronize(self) -> None:
        """Wait for all work of the device, so that the work of a phase counts in the seconds of that phase."""
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def settle(self) -> None:
        """Wait for the work of the current stream, so that every process sees its results."""
        if self.kind == "cuda":
            torch.cuda.current_stream().synchronize()

    def empty_cache(self) -> None:
        """Return torch's cached blocks to the driver, for other processes on the device."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def release_memory(self) -> None:
        """Return to the driver all memory that no live tensor uses, including reference cycles and queued kernels."""
        if self.kind == "cuda":
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def take_peak_reserved_bytes(self) -> int | None:
        """Return the most bytes that torch's allocator held since the last call; None on a CPU."""
        if self.kind != "cuda":
            return None
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        return peak

    def device_bytes(self, size: int) -> torch.Tensor:
        """Return zeroed memory of this process's device, uint8 [size]."""
        return torch.zeros(size, dtype=torch.uint8, device="cuda" if self.kind == "cuda" else "cpu")

    def share_bytes(self, size: int, on_device: bool) -> tuple[torch.Tensor, str]:
        """Return zeroed memory, uint8 [size], and a handle for `reach_bytes` in other processes of this machine."""
        if on_device and self.kind == "cuda":
            return device_memory.share_on_cuda(size, self.current_device())
        return device_memory.share_on_host(size)

    def share_storage(self, storage: torch.UntypedStorage) -> str:
        """Return a handle for `reach_bytes` to memory that torch allocated on this process's device. On a CPU, first move
        the storage into shared memory unless it is there already. Raises RuntimeError if the memory cannot be shared."""
        return device_memory.share_cuda(storage) if self.kind == "cuda" else device_memory.share_cpu(storage)

    def reach_bytes(self, handle: str) -> torch.Tensor:
        """Return memory that another process shares, uint8 [bytes], for reading only. Raises RuntimeError if the memory
        cannot be mapped."""
        return device_memory.reach(handle)

    # Copies between host and device -------------------------------------------------------------------------------------

    def host_bytes(self, size: int) -> torch.Tensor:
        """Return host memory for `size` offloaded bytes; pinned on a GPU.

        On a CPU numpy allocates it, so that torch's allocator holds only what a device would hold.
        """
        if self.kind == "cuda":
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.from_numpy(np.empty(size, dtype=np.uint8))

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start to copy a tensor to the host; return the copy and the event of its completion (None on a CPU). On a GPU the
        copy runs in its own stream, at the same time as the computation."""
        strides = torch.empty_like(tensor, device="meta").stride()  # the tensor's strides without gaps
        copy = self.host_bytes(tensor.nbytes).view(tensor.dtype).as_strided(tensor.shape, strides)
        if self.kind != "cuda":
            return copy.copy_(tensor), None
        stream = transfers.stream_of(tensor.device, "out")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            copy.copy_(tensor, non_blocking=True)
            event = stream.record_event()
        tensor.record_stream(stream)  # keep its memory until the copy is made
        return copy, event

    def to_device(self, copy: torch.Tensor, device: torch.device, event: Any) -> tuple[torch.Tensor, Any]:
        """Start to copy the result of `to_host` back to the device; return the tensor and the event of its completion (None
        on a CPU)."""
        if self.kind == "cuda":
            return transfers.start_to_device(copy, device, event)
        return torch.empty_like(copy, device=device).copy_(copy), None

    def upload(self, arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        """Return the arrays as tensors on the device, in one transfer that the host does not wait for."""
        return transfers.upload(arrays, device) if self.kind == "cuda" else [torch.from_numpy(array) for array in arrays]

    # Processes ----------------------------------------------------------------------------------------------------------

    def message_group(
        self, store: dist.Store, member: int, size: int, timeout_s: float, join_s: float, host: str, on_device: bool
    ) -> GlooMessages | NcclMessages:
        """Join a group that exchanges messages between device memories or host memories. gloo stands in for NCCL on a CPU.

        `host` is the store's machine; `timeout_s` bounds one NCCL call. Raises RuntimeError if other members do not come
        within `join_s`.
        """
        store.set_timeout(timedelta(seconds=join_s))
        if on_device and self.kind == "cuda":
            return NcclMessages(store, member, size, timeout_s, join_s)
        return GlooMessages(store, member, size, join_s, host)

    def start_process_group(self, local_rank: int, timeout_s: float) -> None:
        """Join the torchrun rendezvous; every collective gets the deadline `timeout_s`."""
        if self.kind == "cuda":
            torch.cuda.set_device(local_rank)
        deadline = timedelta(seconds=timeout_s)
        store, rank, size = next(dist.rendezvous("env://", timeout=deadline))
        # With a fixed master, torchrun keeps one store for all starts (2.13): restarted ranks must not find old addresses.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefixed = dist.PrefixStore(f"start {start}", store)
        dist.init_process_group(self.backend, store=prefixed, rank=rank, world_size=size, timeout=deadline)

    # Profilers and memory reports ---------------------------------------------------------------------------------------

    @property
    def profile_activities(self) -> list[torch.profiler.ProfilerActivity]:
        """The activities that torch's profiler records."""
        activities = torch.profiler.ProfilerActivity
        return [activities.CPU, activities.CUDA] if self.kind == "cuda" else [activities.CPU]

    @contextmanager
    def capture(self) -> Iterator[diagnostics.NvtxRanges]:
        """Record inside, if Nsight Systems waits for it (--capture-range=cudaProfilerApi), until all queued work has ended;
        yield named ranges. GPU only."""
        torch.cuda.profiler.start()
        try:
            yield diagnostics.NvtxRanges()
        finally:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()

    def record_allocations(self) -> None:
        """Have the device's allocator keep its history with Python stacks."""
        if self.kind == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS, stacks="python")

    def write_allocations(self, path: Path) -> Path | None:
        """Write the allocator's history for pytorch.org/memory_viz and return the path; None on a CPU."""
        if self.kind != "cuda":
            return None
        torch.cuda.memory._dump_snapshot(str(path))
        return path


def _detect() -> Platform:
    if torch.cuda.is_available():
        # Without Transformer Engine's compiled part, which the wheel `transformer_engine` alone lacks, a GPU uses the
        # modules of the CPU path with torch's fused attention.
        spec = "local" if importlib.util.find_spec("transformer_engine_torch") is None else "transformer_engine"
        # Without gloo, because every group of a layout would also open a mesh of sockets. CPU tensors use separate gloo
        # groups (`megatron/parallel.py`, megatron-core's optimizer states).
        return Platform("cuda", "nccl", spec)
    return Platform("cpu", "gloo", "local")


current = _detect()
if current.kind == "cpu":
    cpu_megatron.install()
