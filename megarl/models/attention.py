"""Causal attention over packed sequences: one call of a varlen kernel if the device has one, else one call per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megarl import platform  # before megatron.core: on a machine without CUDA it makes it importable

from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # isort: skip


@dataclass(frozen=True)
class Parts:
    """Which keys the queries of a micro-batch see, on the host.

    A part is a run of this rank's rows of one sequence. The part's queries are the last rows of the keys that the part sees.
    `order` lists the pieces of all ranks' keys that each part sees; it is empty if each part sees only its own rows.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    pieces: tuple[int, ...] = ()  # lengths of the pieces of the keys
    order: tuple[tuple[int, ...], ...] = ()

    @property
    def query_bounds(self) -> list[int]:
        return list(accumulate(self.query_lengths, initial=0))

    @property
    def key_bounds(self) -> list[int]:
        return list(accumulate(self.key_lengths, initial=0))


@dataclass
class Packing(PackedSeqParams):
    """The packing of a micro-batch for megarl's own attention.

    `cu_seqlens_q` is missing, because megatron-core's rotation would then loop over the sequences in Python. Without it
    megatron-core rotates all rows at once, by the angle of each token (`DecoderModel._preprocess`).
    """

    parts: Parts | None = None
    query_bounds: Tensor | None = None  # [parts + 1] int32 on the device, cumulative lengths
    key_bounds: Tensor | None = None  # [parts + 1] int32

    def __post_init__(self) -> None:
        # megatron-core makes a table of this many angles, which no code reads.
        self.qkv_format, self.max_seqlen_q, self.max_seqlen_kv = "thd", 1, 1


# Queries that share one mask. A larger block costs memory, a smaller block costs calls.
BLOCK = 256
# torch's memory-efficient kernel reads this many elements of a mask's row at once. torch copies a mask whose strides are no
# multiples of it, but does not check its address (2.11, 2.13).
ALIGNED = 16


class PackedAttention(nn.Module):
    """Causal attention over sequences laid end to end.

    The cost is the sum of the squared lengths; in a layer with a window it is the sum of length x (window + `BLOCK`).
    `windows` has the window of each layer of the model: how many of the last tokens a token sees, itself included; 0 for
    all. Values may be narrower than queries and keys.

    Under context parallelism a rank has two chunks of each sequence, from the front and from the back, so that all ranks
    have the same work. The forward pass gathers the keys and values of all ranks; the backward pass sums and scatters their
    gradients.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
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
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        # query [tokens, heads, head_dim], key [tokens, groups, head_dim], value [tokens, groups, value_dim]
        # -> [tokens, heads * value_dim]
        packing = packed_seq_params
        assert isinstance(packing, Packing) and packing.parts is not None, "every micro-batch of megarl is packed"
        parts, value_dim = packing.parts, value.shape[-1]
        if value_dim < query.shape[-1]:
            # Block-wise kernels need one width; other kernels would store the square of each sequence's length.
            value = F.pad(value, (0, query.shape[-1] - value_dim))
        if self.context_group.size() > 1:
            key, value = (
                gather_from_sequence_parallel_region(rows.contiguous(), group=self.context_group) for rows in (key, value)
            )
        attend = platform.current.varlen_attention(query.dtype, query.shape[-1])
        if attend is None:
            # Use `split`: the backward pass of a slice would write zeros for all other tokens of the micro-batch.
            queries, keys, values = query.split(parts.query_lengths), _seen(key, parts), _seen(value, parts)
            output = torch.cat([self._attend(*rows) for rows in zip(queries, keys, values, strict=True)])
        else:
            if parts.order:
                key, value = (torch.cat(_pieces(rows, parts)) for rows in (key, value))
            output = attend(
                query,
                key,
                value,
                packing.query_bounds,
                packing.key_bounds,
                max(parts.query_lengths),
                max(parts.key_lengths),
                scale=self.scale,
                # Number of keys to the left and to the right of the query's own key; -1 for all.
                window_size=(self.window - 1, 0),
                enable_gqa=True,
            )
        return output[..., :value_dim].flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with the queries [rows, heads, head_dim] of a sequence's last rows to its keys and values."""
        rows, length = len(query), len(key)
        blocks, first = [], 0
        # torch aligns its causal mask to the first key, so the mask fits only if the queries are all rows.
        if rows == length:
            first = min(rows, self.window or rows)
            if first == rows:  # without a slice, because the backward pass of a slice would copy
                return self._product(query, key, value, is_causal=True)
            blocks.append(self._product(query[:first], key[:first], value[:first], is_causal=True))
        num_earlier, start_row = length - rows, first  # keys before the first query's own
        while start_row < rows:
            # Blocks end at round keys, and see a round number of them, so that masks are aligned (`seen_keys`).
            last = min((num_earlier + start_row) // BLOCK * BLOCK + BLOCK - num_earlier, rows)
            stop, start = num_earlier + last, 0
            if self.window:
                num_seen = self.window + last - start_row - 1
                start = max(0, stop - -(-num_seen // ALIGNED) * ALIGNED)
            mask = seen_keys(last - start_row, stop - start, self.window, query.dtype, query.device)
            blocks.append(self._product(query[start_row:last], key[start:stop], value[start:stop], attn_mask=mask))
            start_row = last
        return torch.cat(blocks)

    def _product(self, query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> Tensor:
        if not platform.current.attention_shares_keys:
            key, value = (rows.repeat_interleave(query.shape[1] // rows.shape[1], 1) for rows in (key, value))
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        shared = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=shared, **mask)
        return out.squeeze(0).transpose(0, 1)


def _pieces(rows: Tensor, parts: Parts) -> list[Tensor]:
    """Return the pieces of keys or values that the parts see, part by part."""
    pieces = rows.split(parts.pieces)
    return [pieces[number] for seen in parts.order for number in seen]


def _seen(rows: Tensor, parts: Parts) -> Sequence[Tensor]:
    """Return the keys or values that each part sees."""
    if not parts.order:
        return rows.split(parts.key_lengths)
    pieces = rows.split(parts.pieces)
    return [torch.cat([pieces[number] for number in seen]) if len(seen) > 1 else pieces[seen[0]] for seen in parts.order]


def seen_keys(rows: int, keys: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [rows, keys]: 0 where a token of the last `rows` tokens sees a key, -inf elsewhere.

    The result is a corner of one mask that all blocks, sequences and layers share, because autograd keeps the mask of each
    block; on a GPU a copy if the corner is not aligned, as where a sequence ends.
    """
    width = window + BLOCK + ALIGNED if window else 1 << (keys - 1).bit_length()
    mask = _last_rows(-(-width // ALIGNED) * ALIGNED, window, dtype, device)[-rows:, -keys:]
    is_aligned = device.type == "cpu" or mask.storage_offset() % ALIGNED == 0
    return mask if is_aligned else mask.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=8)
def _last_rows(keys: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask of the last `BLOCK` of `keys` tokens."""
    token = torch.arange(keys - BLOCK, keys, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device)
    seen = key <= token
    if window:
        seen &= key > token - window
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
