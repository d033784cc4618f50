"""The divergence of the policy from a teacher over the vocabulary, from the hidden rows of both, block by block.

As in `logprobs.py` no rank holds all logits: a block of both sides' logits is made, joined into a few sums of each row, and
dropped. The forward pass makes each block twice, for the normalisers of both sides and for the divergence, and the backward
pass once more.

A tensor rank holds the same tokens of both heads; one MAX and one SUM all-reduce of each side, and a SUM join the ranks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithm import divergence as formulas
from megarl.megatron.logprobs import LogProbabilities, scaled

_PARTS = 8  # blocks that are held at once: both sides' log-probabilities, and what is computed from them
# Hidden rows and head of the policy, and of the teacher.
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


class Divergence:
    """Compares hidden rows under the policy's head with a teacher's under its own. `kind` is
    `algorithm.distillation.divergence`; vocabulary, temperature and tensor ranks are those of the policy's `head`, and so is
    whether torch.compile compiles the arithmetic of a block."""

    def __init__(self, kind: str, mixture: float, head: LogProbabilities) -> None:
        self.kind, self.mixture, self.head = kind, mixture, head
        self.summands = head.compiled(partial(formulas.summands, divergence=kind, mixture=mixture))
        self.slopes = head.compiled(partial(formulas.slopes, divergence=kind, mixture=mixture))

    def __call__(self, hidden: Tensor, weight: Tensor, rows: Tensor, teacher_weight: Tensor) -> Tensor:
        """Return the divergence [n] of hidden [n, hidden] from the teacher's rows [n, teacher's hidden]; the weights are
        [width, hidden] of either. Differentiable in `hidden` and `weight`, as `LogProbabilities`."""
        return _OverVocabulary.apply(hidden, weight, rows, teacher_weight, self)

    def logs(self, inputs: Inputs, rows: slice, columns: slice, normalisers: Tensor) -> list[Tensor]:
        """Make some rows and columns of the log-probabilities of both sides; `normalisers` are [2, n]."""
        sides = zip((inputs[:2], inputs[2:]), normalisers[:, rows].unsqueeze(-1), strict=True)
        return [
            scaled(hidden[rows] @ weight[columns].t(), self.head.temperature).sub_(normaliser)
            for (hidden, weight), normaliser in sides
        ]


class _OverVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, teacher_weight: Tensor, divergence: Divergence
    ) -> Tensor:
        inputs, head = (hidden, weight, rows, teacher_weight), divergence.head
        normalisers = torch.stack([head.normaliser(hidden, weight), head.normaliser(rows, teacher_weight)])
        sums = torch.zeros_like(normalisers)
        for some_rows, columns in head.blocks(len(hidden), weight, _PARTS):
            parts = divergence.summands(*divergence.logs(inputs, some_rows, columns, normalisers))
            sums[:, some_rows] += torch.stack([part.sum(-1) for part in parts])
        value, total = head.reduce(sums)
        # The weights are not saved as tensors: offloading saved tensors would return copies without main_grad.
        ctx.weight, ctx.teacher_weight, ctx.divergence = weight, teacher_weight, divergence
        ctx.save_for_backward(hidden, rows, normalisers, total)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden, rows, normalisers, total = ctx.saved_tensors
        divergence, inputs = ctx.divergence, (hidden, ctx.weight, rows, ctx.teacher_weight)
        slope = gradients[0] / divergence.head.temperature

        def slopes_of(some_rows: slice, columns: slice) -> Tensor:
            slopes = divergence.slopes(*divergence.logs(inputs, some_rows, columns, normalisers), total[some_rows])
            return slopes.mul_(slope[some_rows].unsqueeze(-1)).to(hidden.dtype)

        return *divergence.head.gradients(ctx, hidden, total.dtype, slopes_of, _PARTS), None, None, None


# The teacher's likeliest tokens ------------------------------------------------------------------------------------------


def likeliest_tokens(hidden: Tensor, weight: Tensor, head: LogProbabilities, count: int) -> Tensor:
    """Return the log-probabilities of each row's `count` likeliest tokens, and their numbers: [n, 2 count] fp32, in which
    numbers below 2^24 are exact. The head multiplies twice, the second time for the normaliser."""
    logits = hidden.new_full((len(hidden), count), -math.inf)
    numbers = torch.zeros(len(hidden), count, dtype=torch.int64, device=hidden.device)
    for rows, columns in head.blocks(len(hidden), weight):
        block = hidden[rows] @ weight[columns].t()
        largest, at = block.topk(min(count, block.shape[-1]), dim=-1)
        candidates = torch.cat([numbers[rows], at + head.first_column(weight) + columns.start], -1)
        logits[rows], numbers[rows] = _likeliest(torch.cat([logits[rows], largest], -1), candidates, count)
    if head.group.size() > 1:
        of_ranks = [[torch.empty_like(part) for _ in range(head.group.size())] for part in (logits, numbers)]
        for parts, part in zip(of_ranks, (logits, numbers), strict=True):
            dist.all_gather(parts, part, group=head.group)
        logits, numbers = _likeliest(torch.cat(of_ranks[0], -1), torch.cat(of_ranks[1], -1), count)
    return torch.cat([head(hidden, weight, numbers, entropy=False)["logprobs"], numbers.float()], -1)


def _likeliest(logits: Tensor, numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's `count` highest logits and the tokens that have them."""
    highest, at = logits.topk(count, dim=-1)
    return highest, numbers.gather(-1, at)
