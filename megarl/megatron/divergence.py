"""The divergence of the policy from a teacher over the vocabulary, from the hidden rows of both, block by block.

As in `logprobs.py` no rank holds all logits: a block of both sides' logits is made, joined into a few sums of each row, and
dropped; the backward pass makes it again. The blocks of both sides and what is computed from them take together what one
block of the log-probabilities takes. Of the KLs the forward pass makes each block once, of Jensen-Shannon twice: its sums
need the normalisers of both sides.

A tensor rank holds the same tokens of both heads; one MAX and one SUM all-reduce join the ranks (with Jensen-Shannon two).
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

_PARTS = 4  # blocks that are held at once: both sides' logits and two of what is computed from them
_NO_LOGIT = -1e30
# Hidden rows and head of the policy, and of the teacher.
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


class Divergence:
    """Compares hidden rows under the policy's head with a teacher's under its own. `kind` is
    `algorithm.distillation.divergence`; vocabulary, temperature and tensor ranks are those of the policy's `head`, and so is
    whether torch.compile compiles the arithmetic of a block."""

    def __init__(self, kind: str, mixture: float, head: LogProbabilities) -> None:
        self.kind, self.mixture, self.head = kind, mixture, head
        slopes = {"reverse_kl": formulas.reverse_slopes, "forward_kl": formulas.forward_slopes}
        self.sums = head.compiled(formulas.normaliser_sums if kind == "jensen_shannon" else formulas.kl_sums)
        self.mixture_sums = head.compiled(partial(formulas.mixture_sums, mixture=mixture))
        self.slopes = head.compiled(slopes.get(kind, partial(formulas.mixture_slopes, mixture=mixture)))

    def __call__(self, hidden: Tensor, weight: Tensor, rows: Tensor, teacher_weight: Tensor) -> Tensor:
        """Return the divergence [n] of hidden [n, hidden] from the teacher's rows [n, teacher's hidden]; the weights are
        [width, hidden] of either. Differentiable in `hidden` and `weight`, as `LogProbabilities`."""
        return _OverVocabulary.apply(hidden, weight, rows, teacher_weight, self)

    def logits(self, inputs: Inputs, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Make some rows and columns of the logits of the policy and of the teacher."""
        hidden, weight, teacher_hidden, teacher_weight = inputs
        policy = scaled(hidden[rows] @ weight[columns].t(), self.head.temperature)
        return policy, scaled(teacher_hidden[rows] @ teacher_weight[columns].t(), self.head.temperature)

    def logs(self, inputs: Inputs, rows: slice, columns: slice, normalisers: Tensor) -> tuple[Tensor, Tensor]:
        """Make the log-probabilities; `normalisers` [2, n] are the log-sums of all exponentials."""
        policy, teacher = self.logits(inputs, rows, columns)
        local = normalisers[:, rows].unsqueeze(-1)
        return policy.sub_(local[0]), teacher.sub_(local[1])


class _OverVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, teacher_weight: Tensor, divergence: Divergence
    ) -> Tensor:
        inputs, head = (hidden, weight, rows, teacher_weight), divergence.head
        order = -1 if divergence.kind == "forward_kl" else 1  # the teacher's KL from the policy
        sums = scaled(hidden.new_zeros(3, 2, len(hidden)), 1.0)
        sums[0] = _NO_LOGIT
        for some_rows, columns in head.blocks(len(hidden), weight, _PARTS):
            so_far, more = sums[..., some_rows], divergence.sums(*divergence.logits(inputs, some_rows, columns)[::order])
            highest = torch.maximum(so_far[0], more[0])
            so_far[1:] = so_far[1:] * (so_far[0] - highest).exp() + more[1:] * (more[0] - highest).exp()
            so_far[0] = highest
        highest = head.reduce(sums[0].clone(), dist.ReduceOp.MAX)
        totals, weighted = head.reduce(sums[1:] * (sums[0] - highest).exp())
        normalisers = highest + totals.log()
        if divergence.kind == "jensen_shannon":
            parts = torch.zeros_like(totals)
            for some_rows, columns in head.blocks(len(hidden), weight, _PARTS):
                parts[:, some_rows] += divergence.mixture_sums(*divergence.logs(inputs, some_rows, columns, normalisers))
            policy, teacher = head.reduce(parts)
            value, slope_value = divergence.mixture * teacher + (1.0 - divergence.mixture) * policy, policy
        else:  # the weighted sum is of the differences of logits, not of log-probabilities
            value = slope_value = weighted[0] / totals[0] - normalisers[0] + normalisers[1]
            normalisers = normalisers if order == 1 else normalisers.flip(0)
        # The weights are not saved as tensors: offloading saved tensors would return copies without main_grad.
        ctx.weight, ctx.teacher_weight, ctx.divergence = weight, teacher_weight, divergence
        ctx.save_for_backward(hidden, rows, normalisers, slope_value)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden, rows, normalisers, value = ctx.saved_tensors
        weight, divergence = ctx.weight, ctx.divergence
        inputs, head = (hidden, weight, rows, ctx.teacher_weight), divergence.head
        slope = gradients[0] / head.temperature

        def slopes_of(some_rows: slice, columns: slice) -> Tensor:
            slopes = divergence.slopes(*divergence.logs(inputs, some_rows, columns, normalisers), value[some_rows])
            return slopes.mul_(slope[some_rows].unsqueeze(-1)).to(hidden.dtype)

        return *head.gradients(ctx, hidden, value.dtype, slopes_of, _PARTS), None, None, None


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
