"""Floating-point operations of a forward pass, counting matrix products (a multiplication and an addition are two)."""

from __future__ import annotations

from megarl.reshard.boxes import ModelShape


def forward_flops(shape: ModelShape, length: int, head_tokens: int, critic: bool = False) -> float:
    """Operations of one sequence of `length` tokens with `head_tokens` rows of the head; an update takes 3 times that."""
    attention = shape.heads * shape.head_dim
    qkv = attention + 2 * shape.groups * shape.head_dim
    weights = shape.num_layers * shape.hidden * (qkv + attention + 3 * shape.ffn)
    # Two products of [length, length] per head, of which causality needs half.
    scores = shape.num_layers * 2 * attention * length**2
    head = shape.hidden * (1 if critic else shape.vocab)
    return float(2 * weights * length + scores + 2 * head * head_tokens)
