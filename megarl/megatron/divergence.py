"""The divergence of the policy from a teacher over the vocabulary, from the hidden rows of both, block by block.

As in `logprobs.py` no rank holds all logits: a block of both sides' logits is made, joined into a few sums of each row, and
dropped; the backward pass makes it again. The blocks of both sides and what is computed from them take together what one
block of the log-probabilities takes. Of the KLs the forward pass makes each block once, of Jensen-Shannon twice: its sums
need the normalisers of both sides.

A tensor rank holds the same tokens of both heads; one MAX and one SUM all-reduce join the ranks (with Jensen-Shannon two).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithm import divergence as formulas
from megarl.megatron.logprobs import LogProbabilities

_PARTS = 4  # blocks that are held at once: both sides' logits and two of what is computed from them
_NO_LOGIT = -1e30
# Hidden rows and head of the policy, and of the teacher.
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


class Divergence:
    """Compares hidden rows under the policy's head with a teacher's under its own. `kind` is
    `algorithm.distillation.divergence`; vocabulary, temperature and tensor ranks are those of the policy's `head`."""

    def __init__(self, kind: str, mixture: float, head: LogProbabilities, compile: bool = False) -> None:
        self.kind, self.mixture, self.head = kind, mixture, head
        compiled: Callable[[Any], Any] = partial(torch.compile, dynamic=True) if compile else lambda function: function
        one_pass = {"reverse_kl": formulas.reverse_sums, "forward_kl": formulas.forward_sums}
        slopes = {"reverse_kl": formulas.reverse_slopes, "forward_kl": formulas.forward_slopes}
        self.sums = compiled(one_pass.get(kind, formulas.normaliser_sums))
        self.mixture_sums = compiled(partial(formulas.mixture_sums, mixture=mixture))
        self.slopes = compiled(slopes.get(kind, partial(formulas.mixture_slopes, mixture=mixture)))

    def __call__(self, hidden: Tensor, weight: Tensor, rows: Tensor, teacher_weight: Tensor) -> Tensor:
        """Return the divergence [n] of hidden [n, hidden] from the teacher's rows [n, teacher's hidden]; the weights are
        [width, hidden] of either. Differentiable in `hidden` and `weight`, as `LogProbabilities`."""
        return _OverVocabulary.apply(hidden, weight, rows, teacher_weight, self)

    def logits(self, inputs: Inputs, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Make some rows and columns of the logits of the policy and of the teacher."""
        hidden, weight, teacher_hidden, teacher_weight = inputs
        policy = _wide(hidden[rows] @ weight[columns].t(), self.head.temperature)
        return policy, _wide(teacher_hidden[rows] @ teacher_weight[columns].t(), self.head.temperature)

    def logs(self, inputs: Inputs, rows: slice, columns: slice, normalisers: Tensor) -> tuple[Tensor, Tensor]:
        """Make the log-probabilities; `normalisers` [2, n] are the log-sums of all exponentials."""
        policy, teacher = self.logits(inputs, rows, columns)
        local = normalisers[:, rows].unsqueeze(-1)
        return policy.sub_(local[0]), teacher.sub_(local[1])

    def reduce(self, sums: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Join the sums of the tensor ranks in place."""
        if self.head.group.size() > 1:
            dist.all_reduce(sums, op=op, group=self.head.group)
        return sums


class _OverVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, teacher_weight: Tensor, divergence: Divergence
    ) -> Tensor:
        inputs, head = (hidden, weight, rows, teacher_weight), divergence.head
        sums = _wide(hidden.new_zeros(3, 2, len(hidden)), 1.0)
        sums[0] = _NO_LOGIT
        for some_rows, columns in head.blocks(len(hidden), weight, _PARTS):
            own, more = sums[..., some_rows], divergence.sums(*divergence.logits(inputs, some_rows, columns))
            highest = torch.maximum(own[0], more[0])
            own[1:] = own[1:] * (own[0] - highest).exp() + more[1:] * (more[0] - highest).exp()
            own[0] = highest
        highest = divergence.reduce(sums[0].clone(), dist.ReduceOp.MAX)
        totals, weighted = divergence.reduce(sums[1:] * (sums[0] - highest).exp())
        normalisers = highest + totals.log()
        if divergence.kind == "jensen_shannon":
            parts = torch.zeros_like(totals)
            for some_rows, columns in head.blocks(len(hidden), weight, _PARTS):
                parts[:, some_rows] += divergence.mixture_sums(*divergence.logs(inputs, some_rows, columns, normalisers))
            policy, teacher = divergence.reduce(parts)
            value, slope_value = divergence.mixture * teacher + (1.0 - divergence.mixture) * policy, policy
        else:  # the weighted sum is of the differences of logits, not of log-probabilities
            left, right = (0, 1) if divergence.kind == "reverse_kl" else (1, 0)
            value = slope_value = weighted[left] / totals[left] - normalisers[left] + normalisers[right]
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


def _wide(logits: Tensor, temperature: float) -> Tensor:
    """Return logits over the temperature in fp32, or in fp64 if they are; a wide tensor is overwritten."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide.div_(temperature)


# The teacher's likeliest tokens ------------------------------------------------------------------------------------------


def likeliest_tokens(hidden: Tensor, weight: Tensor, head: LogProbabilities, count: int) -> Tensor:
    """Return the log-probabilities of each row's `count` likeliest tokens, and their numbers: [n, 2 count] fp32, in which
    numbers below 2^24 are exact."""
    logits = hidden.new_full((len(hidden), count), _NO_LOGIT, dtype=torch.float32)
    numbers = torch.zeros(len(hidden), count, dtype=torch.int64, device=hidden.device)
    sums = torch.zeros(2, len(hidden), dtype=torch.float32, device=hidden.device)
    sums[0] = _NO_LOGIT
    for rows, columns in head.blocks(len(hidden), weight, _PARTS):
        block = _wide(hidden[rows] @ weight[columns].t(), head.temperature)
        largest, at = block.topk(min(count, block.shape[-1]), dim=-1)
        candidates = torch.cat([logits[rows], largest], -1)
        known = torch.cat([numbers[rows], at + head.first_column(weight) + columns.start], -1)
        logits[rows], chosen = candidates.topk(count, dim=-1)
        numbers[rows] = known.gather(-1, chosen)
        _add_exponentials(sums[:, rows], block)
    if head.group.size() > 1:
        logits, numbers = _join_ranks(logits, numbers, head.group)
    return torch.cat([logits - _normaliser(sums, head.group).unsqueeze(-1), numbers.float()], -1)


def _add_exponentials(sums: Tensor, block: Tensor) -> None:
    """Add a block, which is overwritten, to the highest logit and the sum of exponentials of its rows, [2, rows]."""
    highest = torch.maximum(sums[0], block.amax(-1))
    sums[1] = sums[1] * (sums[0] - highest).exp() + block.sub_(highest.unsqueeze(-1)).exp_().sum(-1)
    sums[0] = highest


def _normaliser(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return log Z of each row over all tensor ranks, from this rank's sums as `_add_exponentials` leaves them."""
    highest, total = sums[0].clone(), sums[1]
    if group.size() > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        total = total * (sums[0] - highest).exp()
        dist.all_reduce(total, group=group)
    return highest + total.log()


def _join_ranks(logits: Tensor, numbers: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens over all tensor ranks."""
    of_ranks = [[torch.empty_like(part) for _ in range(group.size())] for part in (logits, numbers)]
    for parts, part in zip(of_ranks, (logits, numbers), strict=True):
        dist.all_gather(parts, part, group=group)
    logits, chosen = torch.cat(of_ranks[0], -1).topk(logits.shape[-1], dim=-1)
    return logits, torch.cat(of_ranks[1], -1).gather(-1, chosen)


class _Chosen(torch.autograd.Function):
    """log p of some tokens of each row: log p_k = l_k - log Z, d log p_k / d l_j = 1[j = k] - p_j."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, numbers: Tensor, head: LogProbabilities) -> Tensor:
        local = numbers - head.first_column(weight)
        chosen = _wide(hidden.new_zeros(local.shape), 1.0)
        sums = torch.stack([torch.full_like(chosen[:, 0], _NO_LOGIT), torch.zeros_like(chosen[:, 0])])
        for rows, columns in head.blocks(len(hidden), weight, _PARTS):
            block = _wide(hidden[rows] @ weight[columns].t(), head.temperature)
            here, at = _inside(local[rows], columns)
            chosen[rows] += torch.where(here, block.gather(-1, at), 0.0)
            _add_exponentials(sums[:, rows], block)
        normaliser = _normaliser(sums, head.group)
        if head.group.size() > 1:
            dist.all_reduce(chosen, group=head.group)
        ctx.weight, ctx.head = weight, head
        ctx.save_for_backward(hidden, local, normaliser)
        return chosen - normaliser.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden, local, normaliser = ctx.saved_tensors
        weight, head = ctx.weight, ctx.head
        slopes = gradients[0] / head.temperature

        def slopes_of(rows: slice, columns: slice) -> Tensor:
            block = _wide(hidden[rows] @ weight[columns].t(), head.temperature)
            block.sub_(normaliser[rows].unsqueeze(-1)).exp_().mul_(-slopes[rows].sum(-1, keepdim=True))
            here, at = _inside(local[rows], columns)
            return block.scatter_add_(-1, at, torch.where(here, slopes[rows], 0.0)).to(hidden.dtype)

        return *head.gradients(ctx, hidden, normaliser.dtype, slopes_of, _PARTS), None, None


def _inside(local: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Say which tokens lie in a block's columns, and where; 0 for the others."""
    at = local - columns.start
    here = (at >= 0) & (at < columns.stop - columns.start)
    return here, torch.where(here, at, 0)


def log_probabilities_of(hidden: Tensor, weight: Tensor, numbers: Tensor, head: LogProbabilities) -> Tensor:
    """Return the log-probabilities of the tokens `numbers` [n, tokens] of each row, differentiable in `hidden` and
    `weight`."""
    return _Chosen.apply(hidden, weight, numbers, head)
