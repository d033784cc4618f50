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

from collections import Counter
from functools import lru_cache

from megarl.estimate.adapters import Adapters, layer_adapters
from megarl.estimate.attention import matrix_weights, product_flops
from megarl.family import ModelShape


def forward_flops(shape: ModelShape, length: int, head_tokens: int, critic: bool = False) -> float:
    """Operations of one sequence of `length` tokens, `head_tokens` of which pass the head, over all ranks; an update takes
    three times as many."""
    attention = sum(layers * product_flops(shape, layer, length) for layer, layers in _kinds(shape))
    return float(2 * length * _passed_weights(shape, 0) + attention + _head_flops(shape, head_tokens, critic))


def update_flops(
    shape: ModelShape,
    length: int,
    head_tokens: int,
    critic: bool = False,
    adapters: Adapters | None = None,
    frozen_layers: int = 0,
    frozen_head: bool = False,
) -> float:
    """Operations that an update of one sequence needs, however it is computed: what is recomputed does not count (PaLM,
    appendix B). A weight that is not trained, as all but adapters are with `adapters`, has no gradient to compute: it takes
    4 operations a token, and the others 6."""
    forward = forward_flops(shape, length, head_tokens, critic)
    if adapters is not None:
        added = shape.num_layers * layer_adapters(shape, adapters, tensor=1)
        frozen = 2 * length * _passed_weights(shape, 0) + _head_flops(shape, head_tokens, critic)
        return 3 * forward - frozen + 3 * 2 * length * added
    frozen = 2 * length * (_passed_weights(shape, 0) - _passed_weights(shape, frozen_layers))
    return 3 * forward - frozen - (_head_flops(shape, head_tokens, critic) if frozen_head else 0)


def _head_flops(shape: ModelShape, tokens: int, critic: bool) -> int:
    return 2 * shape.hidden * (1 if critic else shape.vocab) * tokens


@lru_cache
def _passed_weights(shape: ModelShape, first: int) -> int:
    """Weights of the matrices that a token passes from layer `first` on."""
    layers = range(min(first, shape.num_layers), shape.num_layers)
    return len(layers) * matrix_weights(shape) + shape.hidden * sum(shape.active_rows(layer) for layer in layers)


@lru_cache
def _kinds(shape: ModelShape) -> tuple[tuple[int, int], ...]:
    """Layers whose attention differs by its window: one of each kind, and how many there are."""
    windows = shape.windows or (0,) * shape.num_layers
    return tuple((windows.index(window), count) for window, count in Counter(windows).items())
