"""The modules megarl puts into megatron-core's local layer spec, where Transformer Engine is absent."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, output in the input's type (Zhang & Sennrich 2019, eq. 4).

    megatron-core's own torch wrapper refuses sequence parallelism; this one marks its weight instead, so that
    `finalize_model_grads` sums its gradient over the tensor group. Under `layernorm_zero_centered_gamma` the factor is
    1 + weight, applied in fp32 (Gemma).
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

    Under sequence parallelism each rank runs its own rows, so its weight is marked like a norm's; without it the gradient
    that comes back must be whole on every rank.
    """

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        # x [..., inputs] -> [..., outputs]
        return F.linear(x, self.weight)


class ValueHead(nn.Module):
    """A critic's output layer: one value a token, replicated over the tensor group.

    Every tensor rank sees all rows, under sequence parallelism too: its gradient is whole and is not summed.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        # hidden [tokens, 1, hidden] -> [tokens, 1, 1]
        return F.linear(hidden, self.weight), None
