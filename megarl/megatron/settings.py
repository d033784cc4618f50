"""What a recipe's words on precision, memory and overlap are in megatron-core's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megarl import platform  # noqa: F401  # before megatron.core: on a machine without CUDA it makes it importable
from megarl.models import ModelShape
from megarl.recipe.role_sections import MemorySection, OptimizerSection

from megatron.core.distributed import DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer import OptimizerConfig  # isort: skip

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Forward in the format with more digits, gradients in the one with more range, as Micikevicius et al. 2022 (sec. 3.2) do;
# block-wise scales leave the gradients no need of range.
_FP8_FORMAT = {"tensorwise": "hybrid", "delayed": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}

# Under fp16 the loss scale is halved when an update overflows as the one before did, and doubled after so many good ones.
_HYSTERESIS = 2
_GROWTH_UPDATES = 1000


def precision_settings(precision: str, fp8: str | None) -> dict[str, Any]:
    """Fields of a TransformerConfig. `precision` is "fp32", "bf16" or "fp16" (weights and activations), `fp8` None or a
    Transformer Engine recipe for the matrix products of the layers; their weights stay in `precision`."""
    dtype = DTYPES[precision]
    settings = dict(params_dtype=dtype, pipeline_dtype=dtype, bf16=precision == "bf16", fp16=precision == "fp16")
    if fp8 is None:
        return settings
    # A scale that is taken from past maxima needs some: Transformer Engine's own length.
    history = dict(fp8_amax_history_len=1024, fp8_amax_compute_algo="max") if fp8 == "delayed" else {}
    return {**settings, "fp8": _FP8_FORMAT[fp8], "fp8_recipe": fp8, **history}


def recompute_settings(memory: MemorySection) -> dict[str, Any]:
    """Fields of a TransformerConfig, whose names and values are the recipe's. Without `mla_up_proj`, which megatron-core
    takes for its own latent attention alone."""
    if memory.recompute == "none":
        return {}
    settings: dict[str, Any] = {"recompute_granularity": memory.recompute}
    if memory.recompute == "selective":
        return settings | {"recompute_modules": [name for name in memory.recompute_modules if name != "mla_up_proj"]}
    return settings | {"recompute_method": memory.recompute_method, "recompute_num_layers": memory.recompute_num_layers}


def fusion_settings(shape: ModelShape, spec: str, router_replay: bool) -> dict[str, bool]:
    """Fields of a TransformerConfig that fuse operations of a layer. Their kernels are Transformer Engine's (all since 2.7;
    megarl's lock has 2.20) or compiled by Triton, so the local spec takes none."""
    if spec == "local":
        return {}
    has_experts = shape.experts is not None
    return dict(
        # megarl's own attention rotates by per-token angles, and Megatron's fused rotation drops YaRN's factor.
        apply_rope_fusion=not shape.has_own_attention,
        bias_activation_fusion=shape.activation == "silu",  # the only gate that megatron-core and megarl share
        moe_permute_fusion=has_experts,
        # The fused router asks nobody for the experts that the rollout engine chose (megatron-core 0.16 and 0.19).
        moe_router_fusion=has_experts and not router_replay,
    )


def fuse_gradient_accumulation(model: nn.Module) -> None:
    """Let Transformer Engine's linear layers add their gradients to the fp32 gradient buffer inside the matrix product.

    Call this when the gradient buffers exist. The TransformerConfig field `gradient_accumulation_fusion` would ask for Apex:
    the vocabulary's output layer, which megarl never calls, is megatron-core's own (0.16 and 0.19).
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]


def data_parallel_config(optimizer: OptimizerSection, precision: str) -> DistributedDataParallelConfig:
    """Gradients in fp32, cut optimizer states, and what overlaps."""
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        # It would end one rank before the reduction that all others wait in; megarl looks at their norm (`finite.py`).
        check_for_nan_in_grad=False,
        overlap_grad_reduce=optimizer.overlap_gradients,
        overlap_param_gather=optimizer.overlap_parameters,
    )


def optimizer_config(optimizer: OptimizerSection, precision: str, initial_loss_scale: float) -> OptimizerConfig:
    """Adam over the data-parallel ranks, with fp32 copies of 16-bit weights; fp16 has a loss scale that moves."""
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
    """Where megatron-core took torch's Adam, as it does without Transformer Engine and Apex: one pass over a weight and its
    moments in place of ten. A rank without trainable weights has none."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(getattr(one, "optimizer", None), torch.optim.Adam):
            for group in one.optimizer.param_groups:
                group |= {"fused": True, "foreach": False}
