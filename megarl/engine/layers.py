"""The modules megarl puts into megatron-core's local layer spec, where Transformer Engine is absent."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megarl import platform  # noqa: F401  # before megatron.core: on a machine without CUDA it makes it importable

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # isort: skip


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, output in the input's type (Zhang & Sennrich 2019, eq. 4).

    megatron-core's own torch wrapper refuses sequence parallelism; this one marks its weight instead, so that
    `finalize_model_grads` sums its gradient over the tensor group.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        # x [..., hidden]
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class PackedAttention(nn.Module):
    """Causal attention over sequences laid end to end, through torch's scaled-dot-product attention.

    Each sequence attends to itself only, so the cost is the sum of the squared lengths, not the square of the sum.

    Under context parallelism a rank has two chunks of each sequence, its own from the front and its own from the back, so
    that every rank has the same work under a causal mask. Keys and values of all ranks are gathered, and their gradient is
    summed and scattered. Bounds are those of the whole sequences.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.context_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        # query [tokens, heads, head_dim], key and value [tokens, groups, head_dim] -> [tokens, heads * head_dim]
        assert packed_seq_params is not None, "every micro-batch of megarl is packed"
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        if self.context_group.size() > 1:
            return self._over_context(query, key, value, bounds)
        outputs = []
        for start, stop in zip(bounds, bounds[1:], strict=False):
            outputs.append(self._attend(query[start:stop], key[start:stop], value[start:stop], is_causal=True))
        return torch.cat(outputs).flatten(1)

    def _over_context(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
        # query [tokens / context, heads, head_dim], key and value alike
        size, rank = self.context_group.size(), self.context_group.rank()
        everyone = [
            gather_from_sequence_parallel_region(part.contiguous(), group=self.context_group).unflatten(0, (size, -1))
            for part in (key, value)
        ]
        outputs = []
        for start, stop in zip(bounds, bounds[1:], strict=False):
            own = slice(start // size, stop // size)
            k, v = (in_order(part[:, own]) for part in everyone)
            chunk = (stop - start) // (2 * size)
            for number, q in zip((rank, 2 * size - 1 - rank), query[own].split(chunk), strict=True):
                # Not is_causal: torch aligns that mask to the first key, and here the last query is at the last key.
                seen = torch.ones(chunk, (number + 1) * chunk, dtype=torch.bool, device=q.device).tril(number * chunk)
                outputs.append(self._attend(q, k[: seen.shape[1]], v[: seen.shape[1]], attn_mask=seen))
        return torch.cat(outputs).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> Tensor:
        # one sequence: query [tokens, heads, head_dim], key and value [tokens, groups, head_dim]
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=True, **mask)
        return out.squeeze(0).transpose(0, 1)


def in_order(parts: Tensor) -> Tensor:
    """One sequence from the two chunks that each context rank has of it: [context, 2 chunks, ...] -> [tokens, ...]."""
    front, back = parts.chunk(2, dim=1)
    return torch.cat([front.flatten(0, 1), back.flip(0).flatten(0, 1)])


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
