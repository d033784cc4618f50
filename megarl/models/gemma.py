"""What Gemma 3 adds to megatron-core's layers: norms of what they return, a rotary base for windows, a scaled embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megarl import platform  # noqa: F401  # before megatron.core: on a machine without CUDA it makes it importable
from megarl.models.layers import RMSNorm
from megarl.models.rotary import own_angles

from megatron.core.transformer.attention import SelfAttention  # isort: skip
from megatron.core.transformer.transformer_layer import TransformerLayer  # isort: skip

# By the names of `ModelShape.activation`.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


class SandwichLayer(TransformerLayer):
    """A layer that norms what attention and the feed-forward network return, before the residual is added."""

    def __init__(self, config: Any, *args: Any, norm: type[nn.Module] = RMSNorm, **more: Any) -> None:
        super().__init__(config, *args, **more)
        sizes = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_self_attn_layernorm = norm(config, **sizes)
        self.post_mlp_layernorm = norm(config, **sizes)
        # The two places where megatron-core (0.16 and 0.19) adds the residual, whatever made the output.
        self.self_attn_bda: Any = _normed(self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda: Any = _normed(self.post_mlp_layernorm, self.mlp_bda)


def _normed(norm: nn.Module, make_add: Callable[..., Any]) -> Callable[..., Any]:
    """megatron-core's bias-dropout-add, with a norm before it."""

    def make(training: bool, fused: bool) -> Callable[..., Tensor]:
        add = make_add(training, fused)

        def norm_then_add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            assert bias is None, "it would have to be added before the norm"
            return add((norm(output), None), residual, dropout)

        return norm_then_add

    return make


class WindowedSelfAttention(SelfAttention):
    """Self-attention of a model whose layers with a window have a rotary base of their own."""

    def __init__(self, *args: Any, windows: Sequence[int], layer_number: int, **more: Any) -> None:
        super().__init__(*args, layer_number=layer_number, **more)
        self.is_local = windows[layer_number - 1] > 0

    def forward(self, hidden_states: Tensor, attention_mask: Any, *, rotary_pos_emb: Tensor, **more: Any) -> Any:
        return super().forward(
            hidden_states, attention_mask, rotary_pos_emb=own_angles(rotary_pos_emb, self.is_local), **more
        )


def scale_embedding(embedding: nn.Module, scale: float, dtype: torch.dtype) -> None:
    """Multiply what the embedding returns. In its own type: rounded to bf16 the factor is another one, and the model was
    trained with that."""
    rounded = float(torch.tensor(scale, dtype=dtype))

    def scaled(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * rounded

    embedding.register_forward_hook(scaled)
