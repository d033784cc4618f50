"""The one place that knows CUDA from CPU. Importing it makes megatron-core importable on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.platform import cpu_megatron


@dataclass(frozen=True)
class Platform:
    """What the rest of megarl may know about the device."""

    kind: str  # "cuda" or "cpu"
    backend: str  # torch.distributed backend of the collectives on tensors of this device
    layer_spec: str  # "transformer_engine" or "local": which megatron-core layer specs run here

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cuda", local_rank) if self.kind == "cuda" else torch.device("cpu")

    def synchronize(self) -> None:
        """Wait until the device has finished, so that a phase's seconds are its own."""
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def start_process_group(self, local_rank: int, timeout_s: float) -> None:
        """Join the torchrun rendezvous; every collective gets the deadline `timeout_s`."""
        if self.kind == "cuda":
            torch.cuda.set_device(local_rank)
        dist.init_process_group(self.backend, timeout=timedelta(seconds=timeout_s))


def _detect() -> Platform:
    if torch.cuda.is_available():
        # gloo beside NCCL: metadata and checkpoints exchange CPU tensors.
        return Platform("cuda", "cpu:gloo,cuda:nccl", "transformer_engine")
    return Platform("cpu", "gloo", "local")


current = _detect()
if current.kind == "cpu":
    cpu_megatron.install()
