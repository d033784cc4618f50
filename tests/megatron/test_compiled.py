"""A compiled function gives what the plain one gives; where its first call fails or hangs, the run goes on and says so."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest
import torch

from megarl import platform
from megarl.megatron.compiled import Compiled
from megarl.megatron.logprobs import slopes, slopes_with_entropy, sums, sums_with_entropy
from megarl.platform import cuda_stub
from tests.logprobs_cases import Case, run_head
from tests.ranks import run_ranks

ROWS, COLUMNS = 9, 70


def _arguments(rows: int, entropy: bool, backward: bool) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, COLUMNS, generator=generator)
    targets = torch.randint(-5, COLUMNS + 5, (rows,), generator=generator)
    if not backward:
        return logits, targets, 0.7
    normaliser, slope, entropies, bonus = torch.rand(4, rows, generator=generator)
    return (logits, targets, normaliser, 0.7, slope, *((entropies, bonus) if entropy else ()))


@pytest.mark.parametrize("function", [sums, sums_with_entropy, slopes, slopes_with_entropy])
def test_what_is_compiled_gives_the_same_and_is_compiled_once(function: Any) -> None:
    built, ran = [], []

    def backend(graph: Any, inputs: Any) -> Any:
        built.append(graph)

        def run(*arguments: Any) -> Any:
            ran.append(len(arguments))
            return graph.forward(*arguments)

        return run

    compiled = Compiled(function, 300.0, lambda plain: torch.compile(plain, dynamic=True, backend=backend))
    backward, entropy = function in (slopes, slopes_with_entropy), function in (sums_with_entropy, slopes_with_entropy)
    for rows in (ROWS, 5, 300, ROWS, 1):
        with torch.no_grad():
            found = compiled(*_arguments(rows, entropy, backward))
        torch.testing.assert_close(found, function(*_arguments(rows, entropy, backward)))
    assert len(built) == 1, "a later call compiles, without a deadline"
    assert len(ran) == 4, "all but the call of one row run what was compiled"


def test_the_compiled_head_gives_what_the_plain_one_gives() -> None:
    """torch.compile's own compiler, which `make setup` sees to, over blocks of several sizes."""
    cases = [
        Case(13, 1000, 1024, temperature=1.3, block_bytes=4 * 64 * 5, block_rows=7, compile_timeout_s=deadline)
        for deadline in (280.0, None)
    ]
    for compiled, plain in run_ranks(run_head, 1, cases):
        for name, value in plain.items():
            np.testing.assert_allclose(compiled[name], value, atol=2e-5, err_msg=name)


def _broken(plain: Any) -> Any:
    raise RuntimeError("no C++ compiler")


def _breaks_when_called(plain: Any) -> Any:
    def call(logits: torch.Tensor, *more: Any) -> torch.Tensor:
        logits.fill_(torch.nan)
        raise torch._dynamo.exc.BackendCompilerFailed(plain, OSError("g++ not found"), None)

    return call


@pytest.mark.parametrize("compile", [_broken, _breaks_when_called])
def test_a_failing_compiler_is_named_and_done_without(compile: Any, caplog: pytest.LogCaptureFixture) -> None:
    function = Compiled(sums_with_entropy, 60.0, compile)
    expected = sums_with_entropy(*_arguments(ROWS, True, False))
    with caplog.at_level(logging.WARNING, "megarl"):
        for _ in range(2):
            assert torch.equal(function(*_arguments(ROWS, True, False)), expected)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "rank 0" in warning and "trainer.compile = true" in warning and "sums_with_entropy" in warning
    assert ("no C++ compiler" in warning) or ("g++ not found" in warning)


def test_the_first_call_runs_on_the_device_of_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's current device is one of a thread, and the first call has a thread of its own."""
    current = threading.local()

    monkeypatch.setattr(cuda_stub, "set_device", lambda device: setattr(current, "device", device))
    monkeypatch.setattr(platform.torch, "cuda", cuda_stub)
    monkeypatch.setattr("megarl.megatron.compiled.platform", platform.Platform("cuda", "nccl", "local"))
    seen = []

    def watched(plain: Any) -> Any:
        def call(*arguments: Any) -> Any:
            seen.append(getattr(current, "device", "device 0"))
            return plain(*arguments)

        return call

    Compiled(sums, 60.0, watched)(*_arguments(ROWS, False, False))
    assert seen == [torch.device("cpu")]


def test_a_hanging_compiler_is_left_at_its_deadline(caplog: pytest.LogCaptureFixture) -> None:
    release, gone_on = threading.Event(), threading.Event()

    def hangs(plain: Any) -> Any:
        def call(logits: torch.Tensor, *more: Any) -> torch.Tensor:
            release.wait(60.0)
            logits.fill_(torch.nan)  # what it was given is not what the run goes on with
            gone_on.set()
            return logits

        return call

    function = Compiled(slopes, 0.2, hangs)
    arguments = _arguments(ROWS, False, True)
    with caplog.at_level(logging.WARNING, "megarl"):
        found = function(*arguments)
    release.set()
    assert gone_on.wait(60.0), "the abandoned thread goes on"
    assert torch.equal(found, slopes(*_arguments(ROWS, False, True)))
    assert torch.equal(function(*_arguments(ROWS, False, True)), found)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "was not done after trainer.compile_timeout_s = 0.2 s" in warning and "slopes" in warning
