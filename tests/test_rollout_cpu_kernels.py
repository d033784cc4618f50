"""vLLM's own kernels for CPUs, which an engine is told to use, against the formulas."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from megarl.rollout import cpu_kernels


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    cpu_kernels.register()
    cpu_kernels.register()  # as vLLM may


def rows(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, dtype=dtype, generator=torch.Generator().manual_seed(sum(size)))


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 16), (64, 576), (7, 3, 64)])
def test_norms(size: tuple[int, ...], dtype: torch.dtype) -> None:
    from vllm import ir

    x, residual, weight = rows(*size, dtype=dtype), rows(*size, dtype=dtype) + 1, rows(size[-1], dtype=dtype)
    assert ir.ops.rms_norm.impls[cpu_kernels.PROVIDER].supported
    assert cpu_kernels._fits(x, weight, 1e-5) and cpu_kernels._fits_both(x, residual, weight, 1e-5)
    assert_close(cpu_kernels.rms_norm(x, weight, 1e-5), norm(x, weight))
    both = x + residual
    found = cpu_kernels.fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert_close(found, (norm(both, weight), both))


def test_gates() -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    x = rows(5, 2 * 48)
    expected = torch.nn.functional.silu(x[:, :48].double()) * x[:, 48:].double()
    assert_close(cpu_kernels.silu_and_mul(x), expected.float())
    assert SiluAndMul.forward_cpu is cpu_kernels._silu_and_mul
    assert_close(cpu_kernels._silu_and_mul(None, x.t().contiguous().t()), expected.float())


def test_what_the_kernels_would_misread_is_left_to_torch() -> None:
    """They take rows for one behind the other, which those of one part of a projection are not."""
    part = rows(5, 3 * 16)[:, 16:32]
    weight = rows(16)
    assert not cpu_kernels._fits(part, weight, 1e-5)
    assert not cpu_kernels._fits(part.contiguous(), weight.bfloat16(), 1e-5)
    assert not cpu_kernels._fits(part.contiguous(), None, 1e-5)
    assert not cpu_kernels._fits(part.contiguous(), weight, 1e-5, 8)
    assert not cpu_kernels._fits_both(part.contiguous(), part, weight, 1e-5)
