"""Updated weights that data-parallel ranks gather beside a forward pass (`overlap_parameters`): how to wait for them where
the module that holds them is not called.

megatron-core's DistributedDataParallel waits in a hook before a module's forward. It starts the gather of a bucket once, and
asserts before the next start that somebody waited (0.16 and 0.19).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def finish_gather(chunk: Any, weight: Tensor) -> None:
    """Wait until a weight of a trained chunk is whole. Collective over its data-parallel ranks."""
    # A frozen weight is in no bucket.
    if chunk.ddp_config.overlap_param_gather and weight in chunk.param_to_bucket_group:
        chunk.param_to_bucket_group[weight].finish_param_sync()


def gather_all(chunk: Any) -> None:
    """Make all weights of a trained chunk whole after its last update. Collective over its data-parallel ranks."""
    if not chunk.ddp_config.overlap_param_gather:
        return
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        if group.param_gather_handle is not None:
            # It may have been started before the update. Forced, megatron-core only waits for it and gathers nothing anew.
            group.start_param_sync(force_sync=True)
    chunk.start_param_sync(force_sync=True)
