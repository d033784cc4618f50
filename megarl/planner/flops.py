"""Floating-point operations of a forward pass: its matrix products, a multiplication and an addition counting as two.

For a sequence of n tokens and a layer with hidden size h, a = heads * head_dim, k = groups * head_dim (terms as in
Narayanan et al. 2021, appendix; here with grouped queries, SwiGLU and a causal mask that is not computed):

    linear layers     2 n h (a + 2 k + a + 3 ffn)       with experts, the ffn of those that a token takes, and the router
    attention         2 a n (n + 1)       queries with keys and weights with values, 2 a each for n (n + 1) / 2 pairs; in a
                                          layer with a window, for the pairs inside it
    head, per row     2 h vocabulary, or 2 h for a critic; only rows that predict a completion token have one

Latent attention has matrices and dimensions of its own (`roles.py`). A backward pass takes twice that. Norms, rotary
embedding, softmax and SwiGLU's product are left out, as is what a fused backward pass computes again of attention's weights.

`sequence_cost` gives plans the same counts: model FLOPs utilisation, plans and their times have one formula.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

from megarl.models import ModelShape
from megarl.planner.roles import PlannedRole, layer_adapters, matrix_weights, up_projection_weights
from megarl.schedule.cost import Cost, pairs

if TYPE_CHECKING:
    from megarl.recipe.role_sections import FreezeSection, LoraSection


def forward_flops(shape: ModelShape, length: int, head_tokens: int, critic: bool = False) -> float:
    """Operations of one sequence of `length` tokens, `head_tokens` of which pass the head, over all ranks; an update takes
    three times as many."""
    windows = shape.windows or (0,) * shape.num_layers
    attention = sum(count * pair_flops(shape) * pairs(length, window) for window, count in Counter(windows).items())
    return float(2 * length * _passed_weights(shape, 0) + attention + _head_flops(shape, head_tokens, critic))


def sequence_cost(shape: ModelShape) -> Cost:
    """What sequences cost a model's layers, for `plan_phase`: `forward_flops` over those of one token without attention.

    The head is left out: it runs on completion tokens alone and adds the same to each of them.
    """
    per_pair = pair_flops(shape) / (2 * _passed_weights(shape, 0))
    layers_of = Counter(shape.windows or (0,) * shape.num_layers)
    windows = tuple((window, per_pair * layers) for window, layers in layers_of.items() if window)
    return Cost(per_pair * layers_of[0], windows=windows)


def update_flops(
    shape: ModelShape,
    length: int,
    head_tokens: int,
    critic: bool = False,
    lora: LoraSection | None = None,
    freeze: FreezeSection | None = None,
    num_passed_over: int | None = None,
) -> float:
    """Operations that an update of one sequence needs, however it is computed: recomputed operations do not count (PaLM,
    appendix B). A weight that is not trained, as all but adapters with `lora`, takes 4 operations a token instead of 6.
    The first `num_passed_over` layers have no backward pass; by default frozen layers behind a frozen embedding."""
    forward, head = forward_flops(shape, length, head_tokens, critic), _head_flops(shape, head_tokens, critic)
    weights = _passed_weights(shape, 0)
    if lora is not None:
        added = shape.num_layers * layer_adapters(shape, lora, tensor=1)
        return 3 * forward - 2 * length * weights - head + 3 * 2 * length * added
    if freeze is None:
        return 3 * forward
    if num_passed_over is None:
        num_passed_over = min(freeze.layers, shape.num_layers) if freeze.embedding else 0
    spared = 2 * length * (weights - _passed_weights(shape, freeze.layers))
    spared += 2 * length * (weights - _passed_weights(shape, num_passed_over))
    spared += 2 * sum(product_flops(shape, layer, length) for layer in range(num_passed_over))
    frozen_head = freeze.embedding if shape.tied else freeze.head
    return 3 * forward - spared - (head if frozen_head and not critic else 0)


def executed_flops(role: PlannedRole, length: int, head_tokens: int) -> float:
    """Operations that an update of one sequence runs: those that it needs, and those that its backward pass runs again for
    `recompute`, for the actor's blocks of logits (`megatron/logprobs.py`) and through frozen layers that pass a gradient."""
    shape, critic = role.shape, role.has_value_head
    head = 0 if critic else _head_flops(shape, head_tokens, False)
    if role.divergence_alone:  # the log-probabilities are metrics, without a backward pass
        head *= -2 if role.trains_head else -1
    weights, windows = _computed_again(role)
    again = 2 * length * weights + sum(count * pair_flops(shape) * pairs(length, window) for window, count in windows)
    num_passed_over = sum(role.passes_nothing_back(layer, 0) for layer in range(shape.num_layers))
    needed = update_flops(shape, length, head_tokens, critic, role.lora, role.freeze, num_passed_over)
    return needed + again + head + _divergence_flops(role, head_tokens)


def _divergence_flops(role: PlannedRole, tokens: int) -> float:
    """Products of the actor's and a teacher's head in `megatron/divergence.py`: each block of logits is made forward, with
    Jensen-Shannon twice, and backward, and then multiplied for the gradients of rows and, unless it is frozen, weight."""
    section = role.distillation
    if section is None:
        return 0.0
    made = 3 if section.over == "vocabulary" and section.divergence == "jensen_shannon" else 2
    gradients = 2 if role.trains_head else 1
    # As if all teachers judged as many tokens; 0 where their likeliest tokens travel.
    teacher = sum(role.teacher_widths) / max(1, len(role.teacher_widths))
    return 2 * role.shape.vocab * tokens * ((made + gradients) * role.shape.hidden + made * teacher)


@lru_cache
def _computed_again(role: PlannedRole) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Weights that a token passes again in the backward pass for `recompute`, and the windows of the layers whose attention
    runs again, with how many layers have each."""
    shape, modules = role.shape, role.recomputed_modules
    weights, windows = 0, Counter[int]()
    for layer in range(shape.num_layers):
        experts = shape.experts if shape.has_experts(layer) else None
        feed_forward = shape.hidden * shape.active_rows(layer)
        window = shape.windows[layer] if shape.windows else 0
        if role.recomputes_whole:
            weights += matrix_weights(shape) + feed_forward
            weights += 0 if role.lora is None else layer_adapters(shape, role.lora, tensor=1)
            windows[window] += 1
        windows[window] += "core_attn" in modules
        if "mla_up_proj" in modules:
            weights += up_projection_weights(shape)
        if ("mlp" if experts is None else "moe") in modules:
            weights += feed_forward
        elif experts is not None and "shared_experts" in modules:
            weights += 3 * shape.hidden * experts.shared_ffn
    return weights, tuple(windows.items())


def _head_flops(shape: ModelShape, tokens: int, critic: bool) -> int:
    return 2 * shape.hidden * (1 if critic else shape.vocab) * tokens


@lru_cache
def _passed_weights(shape: ModelShape, first: int) -> int:
    """Weights of the matrices that a token passes from layer `first` on."""
    layers = range(min(first, shape.num_layers), shape.num_layers)
    return len(layers) * matrix_weights(shape) + shape.hidden * sum(shape.active_rows(layer) for layer in layers)


def product_flops(shape: ModelShape, layer: int, length: int) -> int:
    """Operations of queries with keys and of weights with values, in one layer for one sequence of `length` tokens."""
    return pair_flops(shape) * pairs(length, shape.windows[layer] if shape.windows else 0)


def pair_flops(shape: ModelShape) -> int:
    """Operations of one pair of tokens that meet in one layer: two for each dimension."""
    latent = shape.latent
    dims = 2 * shape.head_dim if latent is None else latent.key_dim + latent.value_dim
    return 2 * shape.heads * dims
