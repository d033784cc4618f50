"""Which transport a run takes."""

from __future__ import annotations

from megarl.sync.transport import TRANSPORTS


def choose_transport(wanted: str, device: str, one_host: bool) -> str:
    """`weight_sync.transport`, or for `auto` the fastest that works: buckets in the memory of devices where there are any
    (`device` is "cuda"), and messages where trainer ranks are on several hosts.

    Raises ValueError for one that this machine, or this run, cannot have.
    """
    if wanted == "auto":
        if device == "cuda":
            return "cuda_ipc" if one_host else "nccl"
        return "shared_memory" if one_host else "gloo"
    means = TRANSPORTS[wanted]
    if means.on_device and device != "cuda":
        raise ValueError(f"weight_sync.transport = {wanted} needs GPUs, and trainer ranks run on {device}; use auto")
    if not means.messages and not one_host:
        raise ValueError(f"weight_sync.transport = {wanted} needs all trainer ranks on one host; use auto")
    return wanted
