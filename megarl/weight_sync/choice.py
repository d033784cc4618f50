"""Which transport a run takes."""

from __future__ import annotations

import sys

from megarl.planner.placement import PlacementError
from megarl.weight_sync.transport import TRANSPORTS


def choose_transport(
    wanted: str, device: str, one_host: bool, separate: bool, no_peer_access: tuple[int, int] | None = None
) -> str:
    """`weight_sync.transport`, or for `auto` the fastest that works: buckets in the memory of devices where there are any
    (`device` is "cuda"), and messages where trainer ranks and engines are on several hosts. NCCL's need `separate` devices
    (`rollout.placement`): it takes no two members on one. `no_peer_access`: two of the run's devices on one host that cannot
    reach each other's memory, which `cuda_ipc` needs; `auto` then takes another transport and says so.

    Raises PlacementError for one that this machine, or this run, cannot have.
    """
    no_peers = None
    if no_peer_access is not None:
        no_peers = "GPUs {} and {} cannot reach each other's memory (no peer access)".format(*no_peer_access)
    if wanted == "auto":
        if device != "cuda":
            return "shared_memory" if one_host else "gloo"
        if not one_host:
            return "nccl" if separate else "gloo"
        if no_peers is None:
            return "cuda_ipc"
        chosen = "nccl" if separate else "shared_memory"
        print(f"weight_sync.transport = auto takes {chosen} and not cuda_ipc: {no_peers}", file=sys.stderr)
        return chosen
    means = TRANSPORTS[wanted]
    if means.on_device and device != "cuda":
        raise PlacementError(f"weight_sync.transport = {wanted} needs GPUs, and trainer ranks run on {device}; use auto")
    if not means.messages and not one_host:
        raise PlacementError(f"weight_sync.transport = {wanted} needs all trainer ranks and engines on one host; use auto")
    if wanted == "cuda_ipc" and no_peers is not None:
        raise PlacementError(f"weight_sync.transport = cuda_ipc needs GPUs that are peers, and {no_peers}; use auto")
    return wanted
