"""Weights of a role that training leaves as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from megarl.megatron.model import DecoderModel
from megarl.recipe.role_sections import FreezeSection


def freeze(chunks: Sequence[DecoderModel], frozen: FreezeSection) -> None:
    """Take the gradient from the frozen weights of this rank's chunks, before gradient buffers and optimizer are made."""
    for model in chunks:
        for parameter in _frozen(model, frozen):
            parameter.requires_grad_(False)


def _frozen(model: DecoderModel, frozen: FreezeSection) -> list[nn.Parameter]:
    found: list[nn.Parameter] = []
    tied = bool(model.share_embeddings_and_output_weights)
    if frozen.embedding and model.pre_process:
        found += model.embedding.parameters()
    # Of a tied model the last stage of a pipeline has a copy of the embedding.
    if model.post_process and (frozen.head or (frozen.embedding and tied)):
        found += model.output_layer.parameters()
    if frozen.norms:  # a part of a name under every spec: Transformer Engine calls a fused one `layer_norm_weight`
        found += [parameter for name, parameter in model.named_parameters() if "norm" in name]
    for layer in model.decoder.layers:
        if layer.layer_number <= frozen.layers:  # counted from 1, over all stages
            found += layer.parameters()
    return found


def keep_gradients_through_recompute(chunks: Sequence[DecoderModel]) -> None:
    """What is recomputed gives its weights and adapters gradients only where its input asks for one, and what a frozen
    embedding puts out does not (megatron-core's checkpoint is a torch.autograd.Function, as torch's reentrant one)."""
    for model in chunks:
        if model.config.recompute_granularity is None or not model.pre_process:
            continue
        if not any(parameter.requires_grad for parameter in model.embedding.parameters()):
            model.embedding.register_forward_hook(_ask_for_gradient)


def _ask_for_gradient(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    # output [slots, 1, hidden], a leaf
    return output.requires_grad_() if module.training else output
