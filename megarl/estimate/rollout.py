"""Bytes that one vLLM rank holds."""

from __future__ import annotations

from megarl.estimate.memory import Memory
from megarl.estimate.roles import BYTES, layer_weights
from megarl.reshard.boxes import ModelShape


def engine_memory(shape: ModelShape, tensor: int, precision: str, kv_cache_bytes: int, max_concurrent: int) -> Memory:
    """One vLLM rank: its weights, its KV cache (in `engine`) and the working memory of a decoding step."""
    rows = -(-shape.vocab // tensor) * shape.hidden
    weights = shape.num_layers * layer_weights(shape, tensor) + shape.hidden + rows * (1 if shape.tied else 2)
    return Memory(
        weights=weights * BYTES[precision],
        activations=max_concurrent * (4 * shape.hidden + 4 * shape.ffn // tensor) * BYTES[precision],
        logits=4 * 3 * max_concurrent * shape.vocab,
        engine=kv_cache_bytes,
    )
