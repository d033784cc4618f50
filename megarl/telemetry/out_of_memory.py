"""What held a rank's memory when there was no more: `memory/rank-00000.json` of the run directory."""

from __future__ import annotations

import gc
import json
import logging
import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

FOLDER = "memory"
LARGEST, LARGEST_SHAPES = 50, 4
KIB = 1024  # the unit of ru_maxrss on Linux


@contextmanager
def snapshot_on_out_of_memory(run: Path, rank: int, platform: Any) -> Iterator[None]:
    """Within this, an error that says that memory could not be had gets a note with the path of a snapshot.

    `platform` is megarl.platform.current: on a GPU the allocator's history is recorded from here on, and written beside the
    snapshot.
    """
    platform.record_allocations()
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if platform.is_out_of_memory(error):
            error.add_note(_snapshot(run / FOLDER, rank, platform, error))
        raise


def _snapshot(folder: Path, rank: int, platform: Any, error: BaseException) -> str:
    """Write what holds memory now; what to say of it."""
    path = folder / f"rank-{rank:05d}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "rank": rank,
            "error": str(error),
            "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB,
            "largest_tensors": largest_tensors(LARGEST),
        }
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
        history = platform.write_allocations(path.with_suffix(".pickle"))
    except (OSError, MemoryError, RuntimeError) as failure:  # the first error is the one to be seen
        return f"no memory snapshot of rank {rank}: {failure}"
    beside = "" if history is None else f", and the device's allocations in {history} (for pytorch.org/memory_viz)"
    return f"what held the memory of rank {rank} is in {path}{beside}"


def _add(tensor: torch.Tensor, held: dict[tuple[str, int], dict[str, Any]]) -> None:
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return
    storage, device, shape = tensor.untyped_storage(), str(tensor.device), list(tensor.shape)
    one = {"bytes": storage.nbytes(), "device": device, "dtype": str(tensor.dtype), "shapes": []}
    known = held.setdefault((device, storage.data_ptr()), one)
    if shape not in known["shapes"]:
        known["shapes"].append(shape)


def largest_tensors(most: int) -> list[dict[str, Any]]:
    """The largest memory that tensors of this process hold, largest first: bytes, device, type, and the largest shapes of
    the tensors that share it.

    Those that Python can see: what autograd alone holds on to is not among them.
    """
    held: dict[tuple[str, int], dict[str, Any]] = {}
    unread = 0
    for found in gc.get_objects():
        if not issubclass(type(found), torch.Tensor):
            continue
        try:
            _add(found, held)
        except Exception:  # whatever a tensor of a library's own kind raises that has no memory: the others are to be seen
            unread += 1
    if unread:
        logger.warning("%d tensors do not say what memory they hold, and are left out of the largest", unread)
    largest = sorted(held.values(), key=lambda one: -one["bytes"])[:most]
    for one in largest:
        one["shapes"] = sorted(one["shapes"], key=math.prod, reverse=True)[:LARGEST_SHAPES]
    return largest
