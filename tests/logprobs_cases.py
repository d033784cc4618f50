"""The head on hidden rows and a weight: a plain reference in fp64, and what one rank of a cut vocabulary gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from megarl.megatron.logprobs import LogProbabilities
from megarl.megatron.parallel import Place
from megarl.models.layout import Layout
from megarl.schedule import logit_blocks as blocks
from tests.engine_cases import start

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
        found = {"logprobs": logs.gather(-1, targets[:, None])[:, 0], "entropy": -(logs.exp() * logs).sum(-1)}
        loss = (slopes[0] * found["logprobs"]).sum()
        if self.entropy and self.bonus:
            loss = loss + (slopes[1] * found["entropy"]).sum()
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        arrays = {name: value.detach().numpy() for name, value in found.items() if name == "logprobs" or self.entropy}
        return arrays | {"hidden": hidden.grad.numpy(), "weight": weight.grad.numpy()}


def run_head(cases: list[Case], main_grad: bool = False) -> list[dict[str, np.ndarray]]:
    """What this rank gets: outputs, the hidden rows' gradient, and the gradient of its rows of the weight.

    With `main_grad` the weight has a buffer as megatron-core's parameters have, full of ones.
    """
    place = start(Layout(tensor=cases[0].tensor))
    found = []
    for case in cases:
        with patch.multiple(blocks, CPU_BLOCK_BYTES=case.block_bytes, BLOCK_ROWS=case.block_rows):
            found.append(_run(case, place, main_grad))
    return found


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
