"""Floating-point operations of a forward pass: its matrix products, a multiplication and an addition counting as two.

For a sequence of n tokens and a layer with hidden size h, a = heads * head_dim, k = groups * head_dim (terms as in
Narayanan et al. 2021, appendix; here with grouped queries, SwiGLU and a causal mask that is not computed):

    linear layers     2 n h (a + 2 k + a + 3 ffn)       with experts, the ffn of those that a token takes, and the router
    attention         2 a n (n + 1)       queries with keys and weights with values, 2 a each for n (n + 1) / 2 pairs; in a
                                          layer with a window, for the pairs inside it
    head, per row     2 h vocabulary, or 2 h for a critic; only rows that predict a completion token have one

Latent attention has matrices and dimensions of its own (`roles.py`). A backward pass takes twice that. Norms, rotary
embedding, softmax and SwiGLU's product are left out, as is what a fused backward pass computes again of attention's weights.

`sequence_cost` gives the planner the same counts: there is one formula for model FLOPs utilisation, plans and their times.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from megarl.models import ModelShape
from megarl.planner.roles import Adapters, Frozen, Role, layer_adapters, matrix_weights, up_projection_weights
from megarl.schedule.cost import Cost, pairs


def forward_flops(shape: ModelShape, length: int, head_tokens: int, critic: bool = False) -> float:
    """Operations of one sequence of `length` tokens, `head_tokens` of which pass the head, over all ranks; an update takes
    three times as many."""
    attention = sum(layers * product_flops(shape, layer, length) for layer, layers in _kinds(shape))
    return float(2 * length * _passed_weights(shape, 0) + attention + _head_flops(shape, head_tokens, critic))


def sequence_cost(shape: ModelShape) -> Cost:
    """What sequences cost a model's layers, for `plan_phase`: `forward_flops` over those of one token without attention.

    The head is left out: it runs on completion tokens alone and adds the same to each of them.
    """
    per_pair = pair_flops(shape) / (2 * _passed_weights(shape, 0))
    kinds = Counter(shape.windows or (0,) * shape.num_layers)
    windows = tuple((window, per_pair * layers) for window, layers in kinds.items() if window)
    return Cost(per_pair * kinds[0], windows=windows)


def update_flops(
    shape: ModelShape,
    length: int,
    head_tokens: int,
    critic: bool = False,
    adapters: Adapters | None = None,
    frozen: Frozen = Frozen(),  # noqa: B008 (frozen)
) -> float:
    """Operations that an update of one sequence needs, however it is computed: what is recomputed does not count (PaLM,
    appendix B). A weight that is not trained, as all but adapters are with `adapters`, has no gradient to compute: it takes
    4 operations a token, and the others 6. Frozen layers behind a frozen embedding have no backward pass at all."""
    passed_over = min(frozen.layers, shape.num_layers) if frozen.embedding else 0
    return _update_flops(shape, length, head_tokens, critic, adapters, frozen, passed_over)


def executed_flops(role: Role, length: int, head_tokens: int) -> float:
    """Operations that an update of one sequence runs: those that it needs, and those that its backward pass runs again for
    `recompute`, for the actor's blocks of logits (`megatron/logprobs.py`) and through frozen layers that pass a gradient."""
    shape, head = role.shape, 0 if role.critic else _head_flops(role.shape, head_tokens, False)
    weights, windows = _computed_again(role)
    again = 2 * length * weights + sum(count * pair_flops(shape) * pairs(length, window) for window, count in windows)
    passed_over = sum(role.passes_nothing_back(layer, 0) for layer in range(shape.num_layers))
    needed = _update_flops(shape, length, head_tokens, role.critic, role.adapters, role.frozen, passed_over)
    return needed + again + head


def _update_flops(
    shape: ModelShape,
    length: int,
    head_tokens: int,
    critic: bool,
    adapters: Adapters | None,
    frozen: Frozen,
    passed_over: int,
) -> float:
    """`passed_over`: first layers without a backward pass."""
    forward, head = forward_flops(shape, length, head_tokens, critic), _head_flops(shape, head_tokens, critic)
    every = _passed_weights(shape, 0)
    if adapters is not None:
        added = shape.num_layers * layer_adapters(shape, adapters, tensor=1)
        return 3 * forward - 2 * length * every - head + 3 * 2 * length * added
    spared = 2 * length * (every - _passed_weights(shape, frozen.layers))
    spared += 2 * length * (every - _passed_weights(shape, passed_over))
    spared += 2 * sum(product_flops(shape, layer, length) for layer in range(passed_over))
    frozen_head = frozen.embedding if shape.tied else frozen.head
    return 3 * forward - spared - (head if frozen_head and not critic else 0)


@lru_cache
def _computed_again(role: Role) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Weights that a token passes once more in the backward pass for `recompute`, and of the layers whose attention runs
    once more (window, how many)."""
    shape, savings = role.shape, role.savings
    weights, windows = 0, Counter[int]()
    for layer in range(shape.num_layers):
        experts = shape.experts if shape.has_experts(layer) else None
        feed_forward = shape.hidden * shape.active_rows(layer)
        window = shape.windows[layer] if shape.windows else 0
        if role.recomputes_whole(layer):
            weights += matrix_weights(shape) + feed_forward
            weights += 0 if role.adapters is None else layer_adapters(shape, role.adapters, tensor=1)
            windows[window] += 1
        if savings.recompute != "selective":
            continue
        windows[window] += "core_attn" in savings.modules
        if "mla_up_proj" in savings.modules:
            weights += up_projection_weights(shape)
        if ("mlp" if experts is None else "moe") in savings.modules:
            weights += feed_forward
        elif experts is not None and "shared_experts" in savings.modules:
            weights += 3 * shape.hidden * experts.shared_ffn
    return weights, tuple(windows.items())


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


def product_flops(shape: ModelShape, layer: int, length: int) -> int:
    """Operations of queries with keys and of weights with values, in one layer for one sequence of `length` tokens: two for
    each dimension of each pair of tokens that meet."""
    return pair_flops(shape) * pairs(length, shape.windows[layer] if shape.windows else 0)


def pair_flops(shape: ModelShape) -> int:
    """Operations of one pair of tokens that meet in one layer."""
    latent = shape.latent
    dims = 2 * shape.head_dim if latent is None else latent.key_dim + latent.value_dim
    return 2 * shape.heads * dims
