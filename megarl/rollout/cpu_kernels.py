"""Kernels that vLLM 0.32 has for CPUs and does not choose there: it norms and gates step by step in torch, six to eight
operations each, which for the few rows of a decode step is mostly the time to start them.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

PROVIDER = "megarl_cpu"
# Set in the processes of megarl's engines alone (`engine_environment`): vLLM calls its plugins in everybody's.
ASKED = "MEGARL_CPU_KERNELS"
# The kernels take rows in whole vectors and refuse others; those of a processor have at most so many elements.
VECTOR = 16
# `ir_op_priority` of an engine's arguments.
PRIORITY = {"rms_norm": [PROVIDER, "native"], "fused_add_rms_norm": [PROVIDER, "native"]}


def register() -> None:
    """Offer the norms to vLLM under `PROVIDER`, and have gated layers use theirs. Safe to call more than once; nothing
    where nobody `ASKED` for it, the platform is no CPU, or this build of vLLM has no such kernels."""
    from vllm.platforms import current_platform

    if ASKED not in os.environ or not current_platform.is_cpu():
        return
    from vllm import ir
    from vllm.model_executor.layers.activation import SiluAndMul

    current_platform.import_kernels()
    kernels = all(hasattr(torch.ops._C, name) for name in ("rms_norm", "fused_add_rms_norm", "silu_and_mul"))
    if PROVIDER not in ir.ops.rms_norm.impls:
        offered = {"provider": PROVIDER, "supported": kernels}
        ir.ops.rms_norm.register_impl(**offered, supports_args=_fits)(rms_norm)
        ir.ops.fused_add_rms_norm.register_impl(**offered, supports_args=_fits_both, inplace=True)(fused_add_rms_norm)
    if kernels:
        SiluAndMul.forward_cpu = _silu_and_mul


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def silu_and_mul(x: Tensor) -> Tensor:
    # x [rows, 2 * width], gates in front -> [rows, width]
    out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    torch.ops._C.silu_and_mul(out, x)
    return out


def _silu_and_mul(self: object, x: Tensor) -> Tensor:
    from vllm.model_executor.layers.activation import SiluAndMul

    fits = x.is_contiguous() and x.shape[-1] // 2 % VECTOR == 0
    return silu_and_mul(x) if fits else SiluAndMul.forward_native(x)


def _fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """The kernel walks through memory row by row, whatever the strides; it takes one format and the whole row's variance."""
    if variance_size is not None or weight is None or weight.dtype != x.dtype:
        return False
    return x.is_contiguous() and x.shape[-1] % VECTOR == 0


def _fits_both(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _fits(x, weight, epsilon, variance_size) and x_residual.is_contiguous() and x_residual.dtype == x.dtype
