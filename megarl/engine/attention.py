"""Causal attention over packed sequences, through torch's scaled-dot-product attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megarl import platform  # noqa: F401  # before megatron.core: on a machine without CUDA it makes it importable

from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # isort: skip


@dataclass
class Packing(PackedSeqParams):
    """What megarl's own attention is told of a micro-batch. To megatron-core it is one sequence, whose every token has an
    angle of its own (`DecoderModel._preprocess`): its rotation would go through sequence after sequence in Python."""

    bounds: tuple[int, ...] = ()
    # Of each part between bounds the rows that it sees in front of its own; empty where each part is a whole sequence.
    continues: tuple[tuple[int, int], ...] = ()


# Queries that share one mask. More of them cost memory, fewer cost calls.
BLOCK = 256


class PackedAttention(nn.Module):
    """Causal attention over sequences laid end to end.

    Each sequence attends to itself only, so the cost is the sum of the squared lengths, not the square of the sum; in a
    layer with a window it is the sum of length x (window + `BLOCK`). `windows` are those of all layers of the model: how
    many of the last tokens each token sees, itself included; 0 for all. Values may be narrower than queries and keys.

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
        windows: Sequence[int] = (),
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.context_group = pg_collection.cp
        self.window = windows[layer_number - 1] if windows else 0  # megatron-core counts layers from 1

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
        # query [tokens, heads, head_dim], key [tokens, groups, head_dim], value [tokens, groups, value_dim]
        # -> [tokens, heads * value_dim]
        assert packed_seq_params is not None, "every micro-batch of megarl is packed"
        own = isinstance(packed_seq_params, Packing)
        bounds = packed_seq_params.bounds if own else packed_seq_params.cu_seqlens_q.tolist()
        value_dim = value.shape[-1]
        if value_dim < query.shape[-1]:
            # torch's blocked attention wants one width; any other would write out the square of each sequence.
            value = F.pad(value, (0, query.shape[-1] - value_dim))
        if self.context_group.size() > 1:
            outputs = self._over_context(query, key, value, bounds)
        else:
            # Not slice by slice: each slice's backward pass would write zeros for all other tokens of the micro-batch.
            queries, keys, values = (part.split(np.diff(bounds).tolist()) for part in (query, key, value))
            if own and packed_seq_params.continues:
                keys, values = (_behind_prompts(parts, bounds, packed_seq_params.continues) for parts in (keys, values))
            outputs = [self._attend(*parts) for parts in zip(queries, keys, values, strict=True)]
        return torch.cat(outputs)[..., :value_dim].flatten(1)

    def _over_context(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> list[Tensor]:
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
                seen = (number + 1) * chunk
                outputs.append(self._attend(q, k[:seen], v[:seen]))
        return outputs

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries [rows, heads, head_dim] of the last rows of one sequence, whose keys and values are given."""
        rows, length = len(query), len(key)
        # Not is_causal for the last rows: torch aligns that mask to the first key.
        if rows == length and (self.window == 0 or length <= self.window):
            return self._product(query, key, value, is_causal=True)
        blocks = []
        for first in range(0, rows, BLOCK):
            last = min(first + BLOCK, rows)
            stop = length - rows + last
            start = max(0, stop - (self.window + last - first - 1)) if self.window else 0
            mask = seen_keys(last - first, stop - start, self.window, query.dtype, query.device)
            blocks.append(self._product(query[first:last], key[start:stop], value[start:stop], attn_mask=mask))
        return torch.cat(blocks)

    def _product(self, query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> Tensor:
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=True, **mask)
        return out.squeeze(0).transpose(0, 1)


def _behind_prompts(parts: Sequence[Tensor], bounds: Sequence[int], continues: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Rows of keys or values that each part sees: those of the prompt that it continues, and its own."""
    by_start = dict(zip(bounds, parts, strict=False))
    return [
        torch.cat([by_start[start], part]) if stop > start else part
        for part, (start, stop) in zip(parts, continues, strict=True)
    ]


def seen_keys(rows: int, keys: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, keys]: 0 where one of the last `rows` tokens sees a key, minus infinity elsewhere.

    A corner of one mask that all blocks, sequences and layers share: autograd keeps each block's mask, and so keeps one.
    """
    corner = _last_rows(window + BLOCK if window else 1 << (keys - 1).bit_length(), window, dtype, device)
    return corner[-rows:, -keys:]


@lru_cache(maxsize=8)
def _last_rows(keys: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What the last `BLOCK` of `keys` tokens see."""
    token = torch.arange(keys - BLOCK, keys, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device)
    seen = key <= token
    if window:
        seen &= key > token - window
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))


def in_order(parts: Tensor) -> Tensor:
    """One sequence from the two chunks that each context rank has of it: [context, 2 chunks, ...] -> [tokens, ...]."""
    front, back = parts.chunk(2, dim=1)
    return torch.cat([front.flatten(0, 1), back.flip(0).flatten(0, 1)])
