"""Which transport a run takes."""

from __future__ import annotations

from megarl.placement import PlacementError
from megarl.sync.transport import TRANSPORTS


def choose_transport(wanted: str, device: str, one_host: bool, separate: bool) -> str:
    """`weight_sync.transport`, or for `auto` the fastest that works: buckets in the memory of devices where there are any
    (`device` is "cuda"), and messages where trainer ranks and engines are on several hosts. NCCL's need `separate` devices
    (`rollout.placement`): it takes no two members on one.

    Raises PlacementError for one that this machine, or this run, cannot have.
    """
    if wanted == "auto":
        if device != "cuda":
            return "shared_memory" if one_host else "gloo"
        if one_host:
            return "cuda_ipc"
        return "nccl" if separate else "gloo"
    means = TRANSPORTS[wanted]
    if means.on_device and device != "cuda":
        raise PlacementError(f"weight_sync.transport = {wanted} needs GPUs, and trainer ranks run on {device}; use auto")
    if not means.messages and not one_host:
        raise PlacementError(f"weight_sync.transport = {wanted} needs all trainer ranks and engines on one host; use auto")
    return wanted
