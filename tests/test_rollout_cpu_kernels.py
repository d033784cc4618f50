"""vLLM's own kernels for CPUs, which an engine is told to use, against the formulas."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from megarl.rollout import cpu_kernels
from tests.in_process_engine import close_engines, open_engine
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cpu_kernels.ASKED, "1")
        cpu_kernels.register()
        cpu_kernels.register()  # as vLLM may
        yield


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
    narrow = rows(5, 2 * 12)  # half a vector is left over: the kernel would raise
    assert_close(cpu_kernels._silu_and_mul(None, narrow), torch.nn.functional.silu(narrow[:, :12]) * narrow[:, 12:])


def test_what_the_kernels_would_misread_is_left_to_torch() -> None:
    """They take rows for one behind the other, which those of one part of a projection are not."""
    part = rows(5, 3 * 16)[:, 16:32]
    weight = rows(16)
    assert not cpu_kernels._fits(part, weight, 1e-5)
    assert not cpu_kernels._fits(rows(1, 20), rows(20), 1e-5)  # in whole vectors alone
    assert not cpu_kernels._fits(part.contiguous(), weight.bfloat16(), 1e-5)
    assert not cpu_kernels._fits(part.contiguous(), None, 1e-5)
    assert not cpu_kernels._fits(part.contiguous(), weight, 1e-5, 8)
    assert not cpu_kernels._fits_both(part.contiguous(), part, weight, 1e-5)


def asks_for_a_group(model: Path) -> tuple[int, list[int], list[list[int]], list[list[int]]]:
    """How often the norms ran; tokens that each completion of a prompt found in the cache; what was sampled, and what with
    no cache shared."""
    from vllm import SamplingParams

    calls, kernel = [], torch.ops._C.fused_add_rms_norm
    torch.ops._C.fused_add_rms_norm = lambda *rows: (calls.append(1), kernel(*rows))
    prompt: Any = {"prompt_token_ids": list(range(2, 47))}
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    found = []
    for shared in (True, False):
        engine = open_engine(model, enable_prefix_caching=shared)
        found.append(engine.generate([prompt] * 4, sampling, use_tqdm=False))
        del engine
        close_engines()
    cached = [one.num_cached_tokens or 0 for one in found[0]]
    return len(calls), cached, *([list(one.outputs[0].token_ids) for one in outputs] for outputs in found)


def test_a_group_shares_a_prompt_that_is_shorter_than_vllms_blocks(
    engine_process: ProcessPoolExecutor, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path, "llama", head_dim=32)
    norms, cached, sampled, alone = engine_process.submit(asks_for_a_group, model).result(300)
    assert cached == [0, 32, 32, 32]
    assert sampled == alone
    assert norms >= 2 * 4 * 8, "two engines, four passes, two norms in each of four layers"
