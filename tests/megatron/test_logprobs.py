"""Log-probabilities and entropy from hidden rows equal torch's from whole logits, gradients too, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.megatron.logprobs import LogProbabilities
from megarl.megatron.parallel import Place
from megarl.models.layout import Layout
from megarl.schedule import logit_blocks as blocks
from tests.engine_cases import start
from tests.ranks import run_ranks

HIDDEN = 24


@dataclass(frozen=True)
class Case:
    """`rows` tokens, a vocabulary of `vocab` padded to `padded`, over `tensor` ranks; what a block may hold in fp32."""

    rows: int
    vocab: int
    padded: int
    tensor: int = 1
    temperature: float = 1.0
    precision: torch.dtype = torch.float32
    entropy: bool = True
    bonus: bool = True  # the loss reads the entropy
    block_bytes: int = 2**26
    block_rows: int = 8192
    compile: bool = False

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """hidden [rows, HIDDEN], weight [padded, HIDDEN] (large numbers in the padding), targets and two slopes [rows]."""
        generator = torch.Generator().manual_seed(5)
        hidden = torch.randn(self.rows, HIDDEN, generator=generator)
        weight = torch.randn(self.padded, HIDDEN, generator=generator)
        weight[self.vocab :] *= 100
        targets = torch.randint(0, self.vocab, (self.rows,), generator=generator)
        slopes = torch.randn(2, self.rows, generator=generator)
        return hidden.to(self.precision), weight.to(self.precision), targets, slopes

    def expected(self) -> dict[str, np.ndarray]:
        """By torch's log_softmax over the whole vocabulary in fp64."""
        hidden, weight, targets, slopes = self.inputs()
        hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
        logs = (hidden @ weight[: self.vocab].t() / self.temperature).log_softmax(-1)
        outputs = {"logprobs": logs.gather(-1, targets[:, None])[:, 0], "entropy": -(logs.exp() * logs).sum(-1)}
        loss = (slopes[0] * outputs["logprobs"]).sum()
        if self.entropy and self.bonus:
            loss = loss + (slopes[1] * outputs["entropy"]).sum()
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        arrays = {name: value.detach().numpy() for name, value in outputs.items() if name == "logprobs" or self.entropy}
        return arrays | {"hidden": hidden.grad.numpy(), "weight": weight.grad.numpy()}


def run_head(cases: list[Case], main_grad: bool = False) -> list[dict[str, np.ndarray]]:
    """What this rank gets: outputs, the hidden rows' gradient, and the gradient of its rows of the weight.

    With `main_grad` the weight has a buffer as megatron-core's parameters have, full of ones.
    """
    place = start(Layout(tensor=cases[0].tensor))
    results = []
    for case in cases:
        with patch.multiple(blocks, CPU_BLOCK_BYTES=case.block_bytes, BLOCK_ROWS=case.block_rows):
            results.append(_run(case, place, main_grad))
    return results


def _run(case: Case, place: Place, main_grad: bool) -> dict[str, np.ndarray]:
    head = LogProbabilities(case.vocab, case.temperature, place.tensor_group, case.compile)
    hidden, whole, targets, slopes = case.inputs()
    width = case.padded // case.tensor
    weight: Any = whole[place.tensor_rank * width :][:width].clone().requires_grad_()
    if main_grad:
        weight.main_grad = torch.ones(weight.shape)
    outputs = head(hidden.requires_grad_(), weight, targets, case.entropy)
    loss = (slopes[0] * outputs["logprobs"]).sum()
    if case.entropy and case.bonus:
        loss = loss + (slopes[1] * outputs["entropy"]).sum()
    loss.backward()
    arrays = {name: value.detach().numpy() for name, value in outputs.items()}
    gradient = weight.main_grad - 1 if main_grad else weight.grad
    assert hidden.grad is not None
    return arrays | {"hidden": hidden.grad.float().numpy(), "weight": gradient.float().numpy()}


SMALL = 4 * 64 * 5  # five rows of 64 columns in fp32


def _cases(tensor: int) -> list[Any]:
    return [
        Case(7, 131, 256, tensor),  # of two ranks the second has three tokens
        Case(7, 100, 256, tensor),  # and here none
        Case(7, 131, 256, tensor, temperature=0.7, block_bytes=SMALL, block_rows=5),  # ragged blocks of rows and columns
        Case(13, 1000, 1024, tensor, temperature=1.3, block_bytes=SMALL, block_rows=3, bonus=False),
        Case(13, 1000, 1024, tensor, block_bytes=SMALL, entropy=False),
        Case(1, 131, 256, tensor),
        Case(0, 131, 256, tensor),  # a context rank whose part of a sequence is prompt
    ]


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("tensor", [1, 2])
def test_blocks_give_what_whole_logits_give(tensor: int, main_grad: bool) -> None:
    cases = _cases(tensor)
    ranks = run_ranks(run_head, tensor, cases, main_grad)
    for number, case in enumerate(cases):
        results, expected = [rank[number] for rank in ranks], case.expected()
        gradient = np.concatenate([result.pop("weight") for result in results])
        np.testing.assert_allclose(gradient, expected.pop("weight"), atol=2e-5)
        assert not gradient[case.vocab :].any()
        for result in results:
            assert result.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(result[name], value, atol=2e-5, err_msg=f"{name} of {case}")


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_a_short_precision_rounds_the_logits_and_nothing_behind_them(precision: torch.dtype) -> None:
    case = Case(40, 1000, 1024, precision=precision, block_bytes=SMALL, block_rows=17)
    (outputs,) = run_ranks(run_head, 1, [case], True)[0]
    hidden, weight, targets, _ = case.inputs()
    logs = (hidden @ weight[: case.vocab].t()).float().log_softmax(-1)
    np.testing.assert_allclose(outputs["logprobs"], logs.gather(-1, targets[:, None])[:, 0], atol=1e-6)
    np.testing.assert_allclose(outputs["entropy"], -(logs.exp() * logs).sum(-1), atol=2e-6)
    expected = case.expected()
    for name in ("hidden", "weight"):
        error = np.linalg.norm(outputs[name] - expected[name]) / np.linalg.norm(expected[name])
        assert error < 0.02, f"gradient of {name}: {error}"


@given(st.integers(0, 40_000), st.integers(0, 200_000), st.booleans())
def test_blocks_cover_everything_once_within_the_bound(rows: int, columns: int, on_cpu: bool) -> None:
    covered, bound = 0, blocks.CPU_BLOCK_BYTES if on_cpu else blocks.BLOCK_BYTES
    for row, column in blocks.cut(rows, columns, on_cpu):
        size = (row.stop - row.start) * (column.stop - column.start)
        assert size * 4 <= bound and row.stop <= rows and column.stop <= columns
        covered += size
    assert covered == rows * columns


SIZES = (512, 40 * 512, 32)  # rows and whole blocks of 512 columns, which are 1 MiB in fp32; hidden size


def _peaks(precision: torch.dtype) -> dict[str, int]:
    """Peak of live bytes of forward and backward: this head with its smallest bound, and log_softmax over all logits."""
    from tests.memory_cases import peak_of

    rows, vocab, width = SIZES
    place = start(Layout())
    head = LogProbabilities(vocab, 1.0, place.tensor_group)
    targets = torch.zeros(rows, dtype=torch.int64)

    def run(whole: bool) -> None:
        hidden = torch.randn(rows, width, dtype=precision).requires_grad_()
        weight = torch.randn(vocab, width, dtype=precision).requires_grad_()
        weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
        if whole:
            logs = (hidden @ weight.t()).float().log_softmax(-1)
            outputs = {"logprobs": logs.gather(-1, targets[:, None])[:, 0], "entropy": -(logs.exp() * logs).sum(-1)}
        else:
            outputs = head(hidden, weight, targets, entropy=True)
        (outputs["logprobs"].sum() + outputs["entropy"].sum()).backward()

    with patch.object(blocks, "CPU_BLOCK_BYTES", 2**20):
        return {name: peak_of(lambda whole=whole: run(whole)) for name, whole in (("head", False), ("naive", True))}  # type: ignore[misc]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_memory_does_not_grow_with_the_vocabulary(precision: torch.dtype) -> None:
    (peaks,) = run_ranks(_peaks, 1, precision)
    rows, vocab, width = SIZES
    inputs = (rows + vocab) * width * precision.itemsize + 4 * vocab * width
    # Gradients: the hidden rows' in fp32 and rounded, the weight's that autograd wants; and a few numbers a row.
    beside = rows * width * 8 + vocab * width * precision.itemsize + 40 * 8 * rows
    bound = inputs + beside + 2**20 * (2.5 if precision == torch.bfloat16 else 2)
    assert peaks["head"] < bound < 4 * rows * vocab < peaks["naive"]


def test_the_bound_is_that_of_the_page() -> None:
    """Two fp32 blocks and one of bf16, of 256 MiB in fp32 and of 24 on a CPU, whatever the micro-batch."""
    for on_cpu, mebibytes in ((False, 256), (True, 24)):
        rows, columns = blocks.largest_block(100_000, 152_000, on_cpu)
        assert blocks.bytes_of(rows, columns, 2, entropy=True) <= 2.5 * mebibytes * 2**20
        assert blocks.bytes_of(rows, columns, 4, entropy=False) <= mebibytes * 2**20


COMPILED = [Case(13, 1000, 1024, temperature=1.3, block_bytes=4 * 64 * 5, block_rows=7, compile=on) for on in (True, False)]


def run_counted(cases: list[Case]) -> tuple[list[dict[str, np.ndarray]], int]:
    """What `run_head` returns, and how many graphs torch has compiled for it."""
    results = run_head(cases)
    return results, int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_the_compiled_head_gives_what_the_plain_one_gives() -> None:
    """torch.compile's own compiler, which `make setup` sees to, over blocks of several sizes."""
    (((compiled, plain), graphs),) = run_ranks(run_counted, 1, COMPILED)
    assert graphs, "nothing was compiled"
    for name, value in plain.items():
        np.testing.assert_allclose(compiled[name], value, atol=2e-5, err_msg=name)
