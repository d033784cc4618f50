"""Bytes of activations in a layer with experts, beside its attention and norms.

Derived from megatron-core's modules without Transformer Engine, as `activations.py` is. Routing is taken as balanced: every
rank's experts get the same number of tokens. With b the bytes of the precision, h = hidden, E experts of which a token takes
k, f the feed-forward rows of an expert on a rank and x the ranks that share an expert's tensors, a rank with 1 / s of the
micro-batch's tokens (s as in `activations.py`) has c = k x / s rows of expert input for each of them, and keeps

    router              (9 + 4 + 5) E / s   probabilities and their transpose in fp32, the map and its transpose, masks
    expert input        c h b               a token's hidden state for each of its experts, where it was sent
    expert              c (6 f b + 4)       SwiGLU as in a dense layer, its product by the token's weight, and the weight
    order               8 c                 which token each row is
    shared experts      5 f b               as a dense layer of their rows
"""

from __future__ import annotations

from megarl.planner.roles import Role

_FP32 = 4


def rows_per_token(role: Role) -> float:
    """Rows of expert input on a rank for each token of its micro-batch."""
    assert role.shape.experts is not None, "a layer with experts"
    layout = role.layout
    return role.shape.experts.per_token * layout.expert_tensor_size / _cut(role)


def saved_per_token(role: Role) -> int:
    """Bytes that the experts of one layer keep of each token until their backward pass."""
    experts, width = role.shape.experts, role.bytes_per_weight
    assert experts is not None, "a layer with experts"
    ffn, rows = experts.ffn // role.layout.expert_tensor_size, rows_per_token(role)
    router = (2 * _FP32 + 2 * _FP32 + 2) * experts.count / _cut(role)
    routed = rows * (role.shape.hidden * width + 6 * ffn * width + _FP32 + 8)
    return int(router + routed) + shared_per_token(role)


def shared_per_token(role: Role) -> int:
    """Bytes that the shared experts of one layer keep of each token: a dense layer's of their rows."""
    assert role.shape.experts is not None, "a layer with experts"
    return 5 * (role.shape.experts.shared_ffn // role.layout.tensor) * role.bytes_per_weight


def activation_per_token(role: Role) -> int:
    """Bytes of each token that the experts' activation keeps besides its input, gate and up: what Megatron's `moe_act`
    makes again."""
    assert role.shape.experts is not None, "a layer with experts"
    ffn = role.shape.experts.ffn // role.layout.expert_tensor_size
    return int(rows_per_token(role) * 4 * ffn * role.bytes_per_weight)


def backward_per_token(role: Role) -> int:
    """Bytes of each token on top of what is saved, where the backward pass of the experts is largest: gradients of the rows
    that the experts gave back, before and after they are sent."""
    hidden, width = role.shape.hidden, role.bytes_per_weight
    return int(2 * rows_per_token(role) * hidden * width + hidden // _cut(role) * width)


def forward_per_token(role: Role) -> int:
    """Bytes of each token where a forward pass that keeps nothing is largest: rows before and after they are sent, and the
    experts' outputs."""
    return int(3 * rows_per_token(role) * role.shape.hidden * role.bytes_per_weight)


def _cut(role: Role) -> int:
    """Ranks that the tokens of a micro-batch are cut over, context parallelism aside."""
    return role.layout.tensor if role.layout.sequence_parallel else 1
