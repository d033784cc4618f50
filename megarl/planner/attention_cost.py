"""What attention costs, whichever kind a model has: weights and operations of its matrices, pairs of tokens that meet.

With h = hidden, H heads, d = head_dim, G groups: grouped-query attention has h (2 H d + 2 G d) weights. Latent attention
(DeepSeek-V2, sec. 2.1), with ranks q of queries and c of keys and values, and heads of p plain, r rotary and v value
dimensions:

    down-projections    h (q + c + r)           whole on every tensor rank, as are the two norms, q + c
    up-projections      (q or h) H (p + r) + c H (p + v)
    output              H v h
"""

from __future__ import annotations

from megarl.models import ModelShape
from megarl.schedule.cost import pairs


def attention_weights(shape: ModelShape, tensor: int) -> int:
    """Weights of one layer's attention on one of `tensor` ranks, its norms and biases included."""
    return replicated_weights(shape) + cut_weights(shape) // tensor


def replicated_weights(shape: ModelShape) -> int:
    """Those that every tensor rank holds."""
    latent = shape.latent
    if latent is None:
        return 2 * shape.head_dim if shape.qk_norm else 0
    narrow = latent.query_rank + latent.key_value_rank
    return shape.hidden * (narrow + latent.rotary_dim) + narrow


def cut_weights(shape: ModelShape) -> int:
    """Those that are cut over the tensor ranks, on all of them."""
    latent, heads = shape.latent, shape.heads
    if latent is None:
        qkv = (heads + 2 * shape.groups) * shape.head_dim
        return shape.hidden * (qkv + heads * shape.head_dim) + (qkv if shape.qkv_bias else 0)
    return up_projection_weights(shape) + heads * latent.value_dim * shape.hidden


def up_projection_weights(shape: ModelShape) -> int:
    """Weights of latent attention's up-projections in one layer, on all ranks together; 0 for other attention."""
    latent, heads = shape.latent, shape.heads
    if latent is None:
        return 0
    queries = (latent.query_rank or shape.hidden) * heads * latent.key_dim
    return queries + latent.key_value_rank * heads * (latent.plain_dim + latent.value_dim)


def matrix_weights(shape: ModelShape) -> int:
    """Weights of one layer's attention matrices on all ranks together, without replicas, norms and biases: what a token is
    multiplied with."""
    latent = shape.latent
    if latent is None:
        return shape.hidden * 2 * (shape.heads + shape.groups) * shape.head_dim
    narrow = latent.query_rank + latent.key_value_rank
    return replicated_weights(shape) - narrow + cut_weights(shape)


def cache_width(shape: ModelShape, tensor: int) -> int:
    """Elements that one of `tensor` ranks of a rollout engine caches of a token in one layer: keys and values of its groups,
    or the latent vector and the rotary key, which every rank keeps whole."""
    latent = shape.latent
    if latent is not None:
        return latent.key_value_rank + latent.rotary_dim
    return 2 * -(-shape.groups // tensor) * shape.head_dim


def product_flops(shape: ModelShape, layer: int, length: int) -> int:
    """Operations of queries with keys and of weights with values, in one layer for one sequence of `length` tokens: two for
    each dimension of each pair of tokens that meet."""
    return pair_flops(shape) * pairs(length, shape.windows[layer] if shape.windows else 0)


def pair_flops(shape: ModelShape) -> int:
    """Operations of one pair of tokens that meet in one layer."""
    latent = shape.latent
    dims = 2 * shape.head_dim if latent is None else latent.key_dim + latent.value_dim
    return 2 * shape.heads * dims
