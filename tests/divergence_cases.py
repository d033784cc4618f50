"""Divergences from a teacher over hidden rows and two heads: brute force over whole logits, and what one rank gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from megarl.megatron.logprobs import LogProbabilities
from megarl.models.layout import Layout
from megarl.schedule import logit_blocks as blocks
from tests.engine_cases import start

HIDDEN, TEACHER_HIDDEN = 24, 40


@dataclass(frozen=True)
class Case:
    """`rows` tokens, a vocabulary of `vocab` padded to `padded`; `top_k` compares the teacher's likeliest tokens alone."""

    kind: str
    rows: int = 7
    vocab: int = 131
    padded: int = 256
    mixture: float = 0.5
    temperature: float = 1.0
    top_k: int | None = None
    precision: torch.dtype = torch.float64
    block_bytes: int = 2**26
    block_rows: int = 8192

    def inputs(self) -> list[Tensor]:
        """hidden, weight and teacher's rows and weight (large numbers in the padding), and a slope for each row."""
        generator = torch.Generator().manual_seed(5)
        shapes = ((self.rows, HIDDEN), (self.padded, HIDDEN), (self.rows, TEACHER_HIDDEN), (self.padded, TEACHER_HIDDEN))
        inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5 for shape in shapes]
        for weight in inputs[1::2]:
            weight[self.vocab :] *= 100
        return [*(tensor.to(self.precision) for tensor in inputs), torch.randn(self.rows, generator=generator)]

    def expected(self) -> dict[str, np.ndarray]:
        """By whole distributions in fp64."""
        hidden, weight, rows, teacher_weight, slope = (tensor.double() for tensor in self.inputs())
        hidden.requires_grad_(), weight.requires_grad_()
        policy = (hidden @ weight[: self.vocab].t() / self.temperature).softmax(-1)
        teacher = (rows @ teacher_weight[: self.vocab].t() / self.temperature).softmax(-1)
        if self.top_k is not None:
            chosen = teacher.topk(self.top_k).indices
            policy, teacher = (
                torch.cat([side.gather(-1, chosen), 1 - side.gather(-1, chosen).sum(-1, keepdim=True)], -1)
                for side in (policy, teacher)
            )
        value = divergence(self.kind, policy, teacher, self.mixture)
        (slope * value).sum().backward()
        assert hidden.grad is not None and weight.grad is not None
        return {"value": value.detach().numpy(), "hidden": hidden.grad.numpy(), "weight": weight.grad.numpy()}


def divergence(kind: str, policy: Tensor, teacher: Tensor, mixture: float) -> Tensor:
    """Of probabilities [..., tokens], as they are defined."""

    def kl(left: Tensor, right: Tensor) -> Tensor:
        return (left * (left / right).log()).sum(-1)

    if kind == "jensen_shannon":
        mixed = mixture * teacher + (1 - mixture) * policy
        return mixture * kl(teacher, mixed) + (1 - mixture) * kl(policy, mixed)
    return kl(policy, teacher) if kind == "reverse_kl" else kl(teacher, policy)


def run(cases: list[Case], tensor: int, main_grad: bool) -> list[dict[str, np.ndarray]]:
    """What this rank gets: values, the hidden rows' gradient, and the gradient of its rows of the weight."""
    place = start(Layout(tensor=tensor))
    results = []
    for case in cases:
        with patch.multiple(blocks, CPU_BLOCK_BYTES=case.block_bytes, BLOCK_ROWS=case.block_rows):
            results.append(_run(case, place, tensor, main_grad))
    return results


def _run(case: Case, place: Any, tensor: int, main_grad: bool) -> dict[str, np.ndarray]:
    from megarl.algorithm.divergence import over_likeliest
    from megarl.megatron.divergence import Divergence, likeliest_tokens

    head = LogProbabilities(case.vocab, case.temperature, place.tensor_group)
    hidden, whole, rows, teacher, slope = case.inputs()
    width = case.padded // tensor
    local_rows = slice(place.tensor_rank * width, (place.tensor_rank + 1) * width)
    weight: Any = whole[local_rows].clone().requires_grad_()
    if main_grad:
        weight.main_grad = torch.ones(weight.shape, dtype=torch.float64)
    hidden.requires_grad_()
    if case.top_k is None:
        value = Divergence(case.kind, case.mixture, head)(hidden, weight, rows, teacher[local_rows])
    else:
        logprobs, numbers = likeliest_tokens(rows, teacher[local_rows], head, case.top_k).split(case.top_k, -1)
        chosen = head(hidden, weight, numbers.long(), entropy=False)["logprobs"]
        value = over_likeliest(chosen, logprobs, case.kind, case.mixture)
    (slope * value).sum().backward()
    gradient = weight.main_grad - 1 if main_grad else weight.grad
    assert hidden.grad is not None
    return {"value": value.detach().numpy(), "hidden": hidden.grad.double().numpy(), "weight": gradient.double().numpy()}
