"""Modules for megatron-core's layer specs: norms, replicated layers, and Gemma 3's additions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megarl import platform  # noqa: F401  # before megatron.core: on a machine without CUDA it makes it importable
from megarl.models.rotary import own_angles

from megatron.core.transformer.attention import SelfAttention  # isort: skip
from megatron.core.transformer.transformer_layer import TransformerLayer  # isort: skip

# By the names of `ModelShape.activation`.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, output in the input's type (Zhang & Sennrich 2019, eq. 4).

    megatron-core's torch wrapper refuses sequence parallelism; this norm marks its weight, so that `finalize_model_grads`
    sums its gradient over the tensor group. Under `layernorm_zero_centered_gamma` the factor is 1 + weight in fp32 (Gemma).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        # x [..., hidden]
        wide = x.float()
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.zero_centered:
            return (normalised * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * normalised.to(x.dtype)


class ReplicatedLinear(nn.Module):
    """A linear layer without bias that every tensor rank holds whole.

    Under sequence parallelism each rank runs its own rows, so the weight is marked like a norm's weight; otherwise every
    rank has the whole gradient.
    """

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        # x [..., inputs] -> [..., outputs]
        return F.linear(x, self.weight)


class ValueHead(nn.Module):
    """A critic's output layer: one value per token, replicated over the tensor group.

    Every tensor rank sees all rows, also under sequence parallelism, so every rank has the whole gradient.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        # hidden [tokens, 1, hidden] -> [tokens, 1, 1]
        return F.linear(hidden, self.weight), None


class SandwichLayer(TransformerLayer):
    """A layer that norms the outputs of attention and feed-forward network before the residual is added."""

    def __init__(self, config: Any, *args: Any, norm: type[nn.Module] = RMSNorm, **more: Any) -> None:
        super().__init__(config, *args, **more)
        sizes = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_self_attn_layernorm = norm(config, **sizes)
        self.post_mlp_layernorm = norm(config, **sizes)
        # megatron-core (0.16 and 0.19) adds the residual in these two functions.
        self.self_attn_bda: Any = _normed(self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda: Any = _normed(self.post_mlp_layernorm, self.mlp_bda)


def _normed(norm: nn.Module, make_add: Callable[..., Any]) -> Callable[..., Any]:
    """Put a norm before megatron-core's bias-dropout-add."""

    def make(training: bool, fused: bool) -> Callable[..., Tensor]:
        add = make_add(training, fused)

        def norm_then_add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            assert bias is None, "a bias would have to be added before the norm"
            return add((norm(output), None), residual, dropout)

        return norm_then_add

    return make


class WindowedSelfAttention(SelfAttention):
    """Self-attention of a model in which layers with a window have another rotary base."""

    def __init__(self, *args: Any, windows: Sequence[int], layer_number: int, **more: Any) -> None:
        super().__init__(*args, layer_number=layer_number, **more)
        self.is_local = windows[layer_number - 1] > 0

    def forward(self, hidden_states: Tensor, attention_mask: Any, *, rotary_pos_emb: Tensor, **more: Any) -> Any:
        return super().forward(
            hidden_states, attention_mask, rotary_pos_emb=own_angles(rotary_pos_emb, self.is_local), **more
        )


def scale_embedding(embedding: nn.Module, scale: float, dtype: torch.dtype) -> None:
    """Multiply the embedding's output by a factor that is rounded to the output's type, as in the model's training."""
    rounded = float(torch.tensor(scale, dtype=dtype))
    embedding.register_forward_hook(lambda module, inputs, output: output * rounded)
