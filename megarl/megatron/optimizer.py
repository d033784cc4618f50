"""Megatron's distributed optimizer from a recipe, and the gathers of updated weights that overlap a forward pass.

Under `overlap_parameters` megatron-core's DistributedDataParallel waits for updated weights in a hook before a module's
forward. It starts the gather of a bucket once, and asserts that it was waited for before the next start (0.16 and 0.19).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megarl.megatron.model import DTYPES
from megarl.recipe.role_sections import OptimizerSection

from megatron.core.distributed import DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer import OptimizerConfig  # isort: skip

# fp16: two overflows in a row halve the loss scale, and this many good updates double it.
_HYSTERESIS = 2
_GROWTH_UPDATES = 1000


def fuse_gradient_accumulation(model: nn.Module) -> None:
    """Let Transformer Engine's linear layers add their gradients to the fp32 gradient buffer inside the matrix product.

    Call this when the gradient buffers exist. The TransformerConfig field `gradient_accumulation_fusion` would need Apex for
    megatron-core's own output layer, which megarl never calls (0.16 and 0.19).
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]


def data_parallel_config(optimizer: OptimizerSection) -> DistributedDataParallelConfig:
    """Return the settings of gradient buffers: fp32, a distributed optimizer, and the overlaps of the recipe."""
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        # It would stop one rank while the others wait in the reduction; megarl checks the norm (`non_finite.py`).
        check_for_nan_in_grad=False,
        overlap_grad_reduce=optimizer.overlap_gradients,
        overlap_param_gather=optimizer.overlap_parameters,
    )


def optimizer_config(optimizer: OptimizerSection, precision: str, initial_loss_scale: float) -> OptimizerConfig:
    """Return the settings of Adam over the data-parallel ranks, with a dynamic loss scale for fp16."""
    return OptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.lr * optimizer.min_lr_share,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.epsilon,
        clip_grad=optimizer.grad_clip,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        initial_loss_scale=initial_loss_scale,
        hysteresis=_HYSTERESIS,
        loss_scale_window=_GROWTH_UPDATES,
        params_dtype=DTYPES[precision],
        use_distributed_optimizer=True,
        overlap_param_gather=optimizer.overlap_parameters,
    )


def fuse(optimizer: Any) -> None:
    """Fuse torch's Adam, which megatron-core uses without Transformer Engine and Apex: one pass over a weight and its
    moments instead of ten."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(getattr(part, "optimizer", None), torch.optim.Adam):
            for group in part.optimizer.param_groups:
                group |= {"fused": True, "foreach": False}


@torch.no_grad()
def forget(optimizer: Any) -> None:
    """Set Adam's moments and step counts to those of a new optimizer. In place: a checkpoint needs the states."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None:  # of a rank without a trained weight
            continue
        for state in part.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq", "step"):
                if name in state:
                    state[name].zero_()
        for group in part.optimizer.param_groups:
            if "step" in group:  # where Transformer Engine's Adam counts
                group["step"] = 0


def finish_gather(chunk: Any, weight: Tensor) -> None:
    """Wait until a weight of a trained chunk is gathered. Collective over its data-parallel ranks."""
    if chunk.ddp_config.overlap_param_gather and weight in chunk.param_to_bucket_group:  # a frozen weight is in none
        chunk.param_to_bucket_group[weight].finish_param_sync()


def gather_all(chunk: Any) -> None:
    """Gather all weights of a trained chunk after its last update. Collective over its data-parallel ranks."""
    if not chunk.ddp_config.overlap_param_gather:
        return
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        if group.param_gather_handle is not None:
            # Wait for a gather that was started before the update; megatron-core then starts no new one.
            group.start_param_sync(force_sync=True)
    chunk.start_param_sync(force_sync=True)
