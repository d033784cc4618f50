"""Log-probabilities and entropy from hidden rows and the head's weight, without all logits at once.

A rank holds the rows [first, first + width) of the vocabulary. The logits of a micro-batch would be its largest tensor, so
they are made in blocks (`megarl/schedule/logit_blocks.py`): an fp32 block takes at most 256 MiB (24 on a CPU), and with
what is computed from it 2.5 times that, for any micro-batch and vocabulary. Forward keeps the hidden rows and a few numbers
a token; backward makes each block again, which costs one more product of the head.

Columns are divided first, so that one product over a block's rows completes the weight gradient of its columns, and only the
smaller gradient, of the rows, is summed over blocks.

Logits are in the model's precision, as in the rollout engine, and everything computed from them in fp32. Products of the
backward pass are in the model's precision, as in any linear layer, and their sums over blocks in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.schedule import logit_blocks as blocks

_NO_LOGIT = -1e30  # below every logit; -inf minus itself would be NaN


class LogProbabilities:
    """Turns a rank's hidden rows into log-probabilities and entropy of the sampling distribution.

    `vocab` is the vocabulary without padding, `temperature` divides the logits as in the rollout engine, and the ranks of
    `group` share the vocabulary. With `compile` torch.compile compiles the arithmetic of a block.
    """

    def __init__(self, vocab: int, temperature: float, group: dist.ProcessGroup, compile: bool = False) -> None:
        self.vocab, self.temperature, self.group = vocab, temperature, group
        self.compiled: Callable[[Any], Any] = partial(torch.compile, dynamic=True) if compile else lambda function: function
        functions = map(self.compiled, (sums, sums_with_entropy, slopes, slopes_with_entropy))
        self.sums, self.sums_with_entropy, self.slopes, self.slopes_with_entropy = functions

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool) -> dict[str, Tensor]:
        """Return "logprobs" in the shape of `targets`, and "entropy" [n] if asked, of hidden [n, hidden] and weight [width,
        hidden]. Targets are one token of each row, [n], or several, [n, targets]. Results are fp32, or fp64 of fp64 rows.

        A weight with a `main_grad` (megatron-core's fp32 buffer) gets its gradient there, any other by autograd.
        """
        columns = targets if targets.dim() == 2 else targets.unsqueeze(-1)
        logprobs, entropies = _Head.apply(hidden, weight, columns, self, entropy)
        logprobs = logprobs.view(targets.shape)
        return {"logprobs": logprobs, "entropy": entropies} if entropy else {"logprobs": logprobs}

    def reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Join the values of the tensor ranks in place."""
        if self.group.size() > 1:
            dist.all_reduce(values, op=op, group=self.group)
        return values

    @contextmanager
    def at(self, temperature: float) -> Iterator[None]:
        """Use another temperature inside the block."""
        before, self.temperature = self.temperature, temperature
        try:
            yield
        finally:
            self.temperature = before

    def first_column(self, weight: Tensor) -> int:
        return self.group.rank() * len(weight)

    def blocks(self, num_rows: int, weight: Tensor, parts: int = 1) -> Iterator[tuple[slice, slice]]:
        """Yield rows and columns (of this rank) of each block, without the padding; `parts` are held at once."""
        columns = max(0, min(len(weight), self.vocab - self.first_column(weight)))
        return blocks.cut(num_rows, columns, weight.device.type == "cpu", parts)

    def gradients(
        self, ctx: Any, hidden: Tensor, dtype: torch.dtype, slopes_of: Callable[[slice, slice], Tensor], parts: int = 1
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the hidden rows and of the head's weight `ctx.weight`, summed in `dtype` over the blocks.
        `slopes_of` makes the gradient of the logits of some rows and columns, in the type of `hidden`.

        The weight's gradient goes to megatron-core's buffer if the weight has one. Autograd then gets what megatron-core's
        linear layers with fused accumulation return: no gradient if the weight has `zero_out_wgrad`, because the embedding's
        gradient still comes; otherwise an empty one, which `grad_added_to_main_grad` keeps from being added.
        """
        weight, has_buffer = ctx.weight, hasattr(ctx.weight, "main_grad")
        grad_hidden, grad_weight = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device), None
        if ctx.needs_input_grad[1]:
            grad_weight = weight.main_grad if has_buffer else torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        for rows, columns in self.blocks(len(hidden), weight, parts):
            block = slopes_of(rows, columns)
            add_product(grad_hidden[rows], block, weight[columns])
            if grad_weight is not None:
                add_product(grad_weight[columns], block.t(), hidden[rows])
            del block  # before the next block is made
        grad_hidden = self.reduce(grad_hidden.to(hidden.dtype))
        if grad_weight is None or (has_buffer and hasattr(weight, "zero_out_wgrad")):
            return grad_hidden, None
        if not has_buffer:
            return grad_hidden, grad_weight.to(weight.dtype)
        weight.grad_added_to_main_grad = True
        return grad_hidden, torch.empty_like(weight)


class _Head(torch.autograd.Function):
    """log p(target) = l_t - log Z and entropy H = log Z - sum p l of softmax(l), where l = hidden weight^T / temperature and
    Z = sum exp(l). One MAX and one SUM all-reduce forward, one SUM backward.

    Gradients: d log p_t / d l_j = 1[j = t] - p_j and d H / d l_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: LogProbabilities, entropy: bool) -> Any:
        local = targets - head.first_column(weight)  # [n, targets]
        highest, total, weighted, at_target = _over_blocks(hidden, weight, local, head, entropy)
        overall = head.reduce(highest.clone(), dist.ReduceOp.MAX)
        total, weighted = _shift(highest, overall, total, weighted)
        # Only the rank that has a target contributes.
        at_target = torch.where((local >= 0) & (local < len(weight)), at_target.t() - overall.unsqueeze(-1), 0.0)
        whole = head.reduce(torch.cat([torch.stack([total, weighted] if entropy else [total]), at_target.t()]))
        log_total = whole[0].log()
        entropies = log_total - whole[1] / whole[0] if entropy else None
        at_target = whole[2 if entropy else 1 :].t()
        # Not saved as a tensor: offloading saved tensors would return a copy without main_grad.
        ctx.weight, ctx.head = weight, head
        ctx.save_for_backward(hidden, local, overall + log_total, entropies)
        ctx.set_materialize_grads(False)  # an entropy that no loss reads costs nothing
        return at_target - log_total.unsqueeze(-1), entropies

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None) -> Any:
        hidden, local, normaliser, entropies = ctx.saved_tensors
        head, weight = ctx.head, ctx.weight
        slope = (normaliser.new_zeros(local.shape) if of_logprobs is None else of_logprobs) / head.temperature
        bonus = None if of_entropy is None else of_entropy / head.temperature

        def slopes_of(rows: slice, columns: slice) -> Tensor:
            logits, targets = hidden[rows] @ weight[columns].t(), local[rows] - columns.start
            if bonus is None:
                return head.slopes(logits, targets, normaliser[rows], head.temperature, slope[rows])
            more = (entropies[rows], bonus[rows])
            return head.slopes_with_entropy(logits, targets, normaliser[rows], head.temperature, slope[rows], *more)

        return *head.gradients(ctx, hidden, normaliser.dtype, slopes_of), None, None, None


def _over_blocks(hidden: Tensor, weight: Tensor, local: Tensor, head: LogProbabilities, entropy: bool) -> tuple[Tensor, ...]:
    """Return, over this rank's columns, the highest logit m, the sums of exp(l - m) and of exp(l - m) (l - m), [n] each, and
    the targets' logits [targets, n]."""
    function = head.sums_with_entropy if entropy else head.sums
    by_rows: dict[int, list[Tensor]] = {}
    for rows, columns in head.blocks(len(hidden), weight):
        block = function(hidden[rows] @ weight[columns].t(), local[rows] - columns.start, head.temperature)
        by_rows.setdefault(rows.start, []).append(block)
    if not by_rows:  # no rows, or a rank that has padding alone
        empty = scaled(hidden.new_zeros(3 + local.shape[1], len(hidden)), 1.0)
        empty[0] = _NO_LOGIT
        return *empty[:3], empty[3:]
    merged = []
    for parts_of_rows in by_rows.values():  # together, because block by block a GPU would wait for the host
        parts = torch.stack(parts_of_rows, 1)  # [3 + targets, blocks, rows]
        highest = parts[0].amax(0)
        sums = [part.sum(0) for part in _shift(parts[0], highest, parts[1], parts[2])]
        merged.append(torch.cat([torch.stack([highest, *sums]), parts[3:].sum(1)]))
    joined = torch.cat(merged, 1)
    return *joined[:3], joined[3:]


def _shift(highest: Tensor, to: Tensor, total: Tensor, weighted: Tensor) -> tuple[Tensor, Tensor]:
    """Make sums that are relative to the logit `highest` relative to the logit `to`."""
    difference = highest - to
    scale = difference.exp()
    return scale * total, scale * (weighted + difference * total)


# The arithmetic of one block, which torch.compile may compile; it overwrites the logits ------------------------------------


def sums(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """logits [rows, columns], targets [rows, targets] (may lie outside of the columns) -> [3 + targets, rows] in fp32: the
    highest logit, the sum of the exponentials relative to it, zeros, the targets' logits."""
    wide, highest, at_target = _relative(logits, targets, temperature)
    total = wide.exp_().sum(-1)
    return torch.cat([torch.stack([highest, total, torch.zeros_like(total)]), at_target.t()])


def sums_with_entropy(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """As `sums`, with the sum of exponential times logit, both relative, instead of the zeros."""
    wide, highest, at_target = _relative(logits, targets, temperature)
    exponentials = wide.exp()
    return torch.cat([torch.stack([highest, exponentials.sum(-1), exponentials.mul_(wide).sum(-1)]), at_target.t()])


def slopes(logits: Tensor, targets: Tensor, normaliser: Tensor, temperature: float, slope: Tensor) -> Tensor:
    """Return the gradient of the logits [rows, columns]; `slope` [rows, targets] is that of the log-probabilities over the
    temperature."""
    wide = scaled(logits, temperature)
    wide.sub_(normaliser.unsqueeze(-1)).exp_().mul_(-slope.sum(-1, keepdim=True))
    return logits.copy_(_add_at_target(wide, targets, slope))


def slopes_with_entropy(
    logits: Tensor, targets: Tensor, normaliser: Tensor, temperature: float, slope: Tensor, entropy: Tensor, bonus: Tensor
) -> Tensor:
    """As `slopes`, plus the gradient through the entropy; `bonus` is the gradient of the entropy over the temperature."""
    logs = scaled(logits, temperature).sub_(normaliser.unsqueeze(-1))
    probabilities = logs.exp()
    logs.add_(entropy.unsqueeze(-1)).mul_(bonus.unsqueeze(-1)).add_(slope.sum(-1, keepdim=True))
    probabilities.mul_(logs).neg_()
    return logits.copy_(_add_at_target(probabilities, targets, slope))


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Return logits over the temperature in fp32, or in fp64 if they are; a wide tensor is overwritten."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide.div_(temperature)


def _relative(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return scaled logits relative to their row's highest [rows, columns], the highest [rows], and the targets' or 0 [rows,
    targets]."""
    wide = scaled(logits, temperature)
    last = wide.shape[-1] - 1
    at_target = torch.where((targets >= 0) & (targets <= last), wide.gather(-1, targets.clamp(0, last)), 0.0)
    highest = wide.amax(-1)
    return wide.sub_(highest.unsqueeze(-1)), highest, at_target


def _add_at_target(wide: Tensor, targets: Tensor, slope: Tensor) -> Tensor:
    last = wide.shape[-1] - 1
    return wide.scatter_add_(-1, targets.clamp(0, last), torch.where((targets >= 0) & (targets <= last), slope, 0.0))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right, total in fp32 or wider."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
