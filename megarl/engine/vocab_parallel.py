"""Log-probabilities and entropy from logits that are cut over the vocabulary, without gathering them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _VocabParallel(torch.autograd.Function):
    """log p(target) and entropy of softmax(logits), rows [n], each rank holding columns [first, first + width).

    With Z = sum exp(l): log p_t = l_t - log Z and H = log Z - sum p l. Gradients: d log p_t / d l_j = 1[j = t] - p_j and
    d H / d l_j = -p_j (log p_j + H). One MAX and one SUM all-reduce.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup, terms: Any) -> Any:
        # logits [n, width] fp32 (overwritten), targets [n] -> log-probabilities [n], entropy [n]
        highest = logits.max(dim=-1).values
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        logits -= highest.unsqueeze(-1)
        local = targets - first
        mine = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        # Not a product: a rank of padding columns only holds -inf.
        gathered = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        at_target = torch.where(mine, gathered, torch.zeros_like(gathered))
        exponentials, total, weighted = terms(logits)
        sums = torch.stack([total, weighted, at_target])
        dist.all_reduce(sums, group=group)
        total, weighted, at_target = sums
        log_total = total.log()
        logprobs = at_target - log_total
        entropy = log_total - weighted / total
        probabilities = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probabilities, local, mine, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        grad_logprobs, grad_entropy = gradients
        probabilities, local, mine, entropy = ctx.saved_tensors
        result = probabilities * -grad_logprobs.unsqueeze(-1)
        result.scatter_add_(-1, local.unsqueeze(-1), (grad_logprobs * mine).unsqueeze(-1))
        if ctx.needs_input_grad[0] and grad_entropy.any():
            logs = probabilities.clamp_min(1e-38).log()
            result -= grad_entropy.unsqueeze(-1) * probabilities * (logs + entropy.unsqueeze(-1))
        return result, None, None, None, None


def _terms(shifted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(l), its row sums, and the row sums of exp(l) * l; a padded column (-inf) adds nothing."""
    exponentials = shifted.exp()
    weighted = (exponentials * shifted.clamp_min(-1e30)).sum(-1)
    return exponentials, exponentials.sum(-1), weighted


class LogProbabilities:
    """Turns one rank's vocabulary-parallel logits into log-probabilities and entropy of the sampling distribution.

    `temperature` divides the logits, as the rollout engine does. `compile` compiles the local part with torch.compile:
    off by default, because a compiled entropy has hung runs at their first step.
    """

    def __init__(self, vocab: int, temperature: float, group: dist.ProcessGroup, compile: bool) -> None:
        self.vocab, self.temperature, self.group = vocab, temperature, group
        self.terms = torch.compile(_terms, dynamic=True) if compile else _terms

    def __call__(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """logits [n, width] in any precision, targets [n] -> log-probabilities [n], entropy [n] in fp32."""
        width = logits.shape[-1]
        first = self.group.rank() * width
        scaled = logits.float() / self.temperature  # a copy: the function below overwrites it
        valid = self.vocab - first
        if valid < width:  # the vocabulary's padding rows are no tokens
            keep = torch.arange(width, device=logits.device) < valid
            scaled = scaled.masked_fill(~keep, float("-inf"))
        return _VocabParallel.apply(scaled, targets, first, self.group, self.terms)
