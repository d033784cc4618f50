"""Floating-point operations of a forward pass: its matrix products, a multiplication and an addition counting as two.

For a sequence of n tokens and a layer with hidden size h, a = heads * head_dim, k = groups * head_dim (terms as in
Narayanan et al. 2021, appendix; here with grouped queries, SwiGLU and a causal mask that is not computed):

    linear layers     2 n h (a + 2 k + a + 3 ffn)       with experts, the ffn of those that a token takes, and the router
    attention         2 a n (n + 1)       queries with keys and weights with values, 2 a each for n (n + 1) / 2 pairs; in a
                                          layer with a window, for the pairs inside it
    head, per row     2 h vocabulary, or 2 h for a critic; only rows that predict a completion token have one

Latent attention has matrices and dimensions of its own (`attention.py`). A backward pass takes twice that. Norms, rotary
embedding, softmax and SwiGLU's product are left out, as is what a fused backward pass computes again of attention's weights.
"""

from __future__ import annotations

from megarl.estimate.attention import matrix_weights, product_flops
from megarl.family import ModelShape


def forward_flops(shape: ModelShape, length: int, head_tokens: int, critic: bool = False) -> float:
    """Operations of one sequence of `length` tokens, `head_tokens` of which pass the head, over all ranks; an update takes
    three times as many."""
    rows = sum(shape.active_rows(layer) for layer in range(shape.num_layers))
    matrices = shape.num_layers * matrix_weights(shape) + shape.hidden * rows
    attention = sum(product_flops(shape, layer, length) for layer in range(shape.num_layers))
    head = 2 * shape.hidden * (1 if critic else shape.vocab)
    return float(2 * length * matrices + attention + head * head_tokens)
