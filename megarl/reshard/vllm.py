"""Where a vLLM tensor rank holds each checkpoint tensor (dense decoders, vLLM 0.32's fused parameters)."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.family import ModelShape
from megarl.reshard.boxes import Segment

# vLLM pads the vocabulary to a multiple of this before it cuts it over the tensor ranks.
VOCAB_UNIT = 64


def padded_vocab(shape: ModelShape) -> int:
    """Rows of vLLM's embedding over all tensor ranks; rows from `shape.vocab` on are padding."""
    return -(-shape.vocab // VOCAB_UNIT) * VOCAB_UNIT


def vllm_segments(shape: ModelShape, tensor: int) -> list[Segment]:
    """Every box that every tensor rank of one engine holds; padding rows left out.

    Raises ValueError for a `tensor` that does not cut the model.
    """
    _check(shape, tensor)
    return [segment for rank in range(tensor) for segment in rank_segments(shape, tensor, rank)]


def parameter_sizes(shape: ModelShape, tensor: int) -> dict[str, tuple[int, int]]:
    """(rows, columns) of each parameter of one tensor rank, padding included; a vector has one column."""
    sizes: dict[str, tuple[int, int]] = {}
    for segment in rank_segments(shape, tensor, 0):
        rows, cols = sizes.get(segment.parameter, (0, 0))
        end_row, end_col = (
            segment.local_row + segment.row1 - segment.row0,
            segment.local_col + segment.col1 - segment.col0,
        )
        sizes[segment.parameter] = (max(rows, end_row), max(cols, end_col))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in sizes:
            sizes[name] = (padded_vocab(shape) // tensor, shape.hidden)
    return sizes


def rank_segments(shape: ModelShape, tensor: int, rank: int) -> Iterator[Segment]:
    """The boxes of one tensor rank, in the order of the model's forward pass."""
    yield from _vocab_rows(shape, tensor, rank, "model.embed_tokens.weight")
    for layer in range(shape.num_layers):
        yield from _layer_segments(shape, tensor, rank, f"model.layers.{layer}.")
    yield _whole("model.norm.weight", shape.hidden, rank)
    if not shape.tied:
        yield from _vocab_rows(shape, tensor, rank, "lm_head.weight")


def _check(shape: ModelShape, tensor: int) -> None:
    rules = {
        f"divide the {shape.heads} attention heads": shape.heads % tensor == 0,
        f"divide the {shape.groups} key-value groups or be a multiple of them": (
            shape.groups % tensor == 0 or tensor % shape.groups == 0
        ),
        f"divide the {shape.ffn} feed-forward rows": shape.ffn % tensor == 0,
        f"divide the {padded_vocab(shape)} padded vocabulary rows": padded_vocab(shape) % tensor == 0,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(f"rollout.tensor = {tensor} must {rule}; 1 always does")


def _layer_segments(shape: ModelShape, tensor: int, rank: int, layer: str) -> Iterator[Segment]:
    yield _whole(layer + "input_layernorm.weight", shape.hidden, rank)
    yield from _qkv(shape, tensor, rank, layer, "weight", shape.hidden)
    if shape.qkv_bias:
        yield from _qkv(shape, tensor, rank, layer, "bias", 1)
    if shape.qk_norm:
        for which in "qk":
            yield _whole(f"{layer}self_attn.{which}_norm.weight", shape.head_dim, rank)
    attention, ffn = shape.heads * shape.head_dim // tensor, shape.ffn // tensor
    name = layer + "self_attn.o_proj.weight"
    yield Segment(name, 0, shape.hidden, rank * attention, (rank + 1) * attention, rank, name, 0, 0)
    yield _whole(layer + "post_attention_layernorm.weight", shape.hidden, rank)
    fused = layer + "mlp.gate_up_proj.weight"
    for position, part in enumerate(("gate_proj", "up_proj")):
        rows = (rank * ffn, (rank + 1) * ffn)
        yield Segment(f"{layer}mlp.{part}.weight", *rows, 0, shape.hidden, rank, fused, position * ffn, 0)
    name = layer + "mlp.down_proj.weight"
    yield Segment(name, 0, shape.hidden, rank * ffn, (rank + 1) * ffn, rank, name, 0, 0)


def _qkv(shape: ModelShape, tensor: int, rank: int, layer: str, kind: str, columns: int) -> Iterator[Segment]:
    """Fused rows are [queries | keys | values] of the rank; with fewer groups than ranks a group has replicas."""
    d = shape.head_dim
    queries = shape.heads // tensor
    groups, replicas = max(1, shape.groups // tensor), max(1, tensor // shape.groups)
    group = rank // replicas * groups
    fused = f"{layer}self_attn.qkv_proj.{kind}"
    parts = (
        ("q_proj", rank * queries, queries, 0),
        ("k_proj", group, groups, queries),
        ("v_proj", group, groups, queries + groups),
    )
    for part, start, count, local in parts:
        name = f"{layer}self_attn.{part}.{kind}"
        yield Segment(name, start * d, (start + count) * d, 0, columns, rank, fused, local * d, 0)


def _whole(name: str, size: int, rank: int) -> Segment:
    return Segment(name, 0, size, 0, 1, rank, name, 0, 0)


def _vocab_rows(shape: ModelShape, tensor: int, rank: int, name: str) -> Iterator[Segment]:
    rows = padded_vocab(shape) // tensor
    start, stop = rank * rows, min((rank + 1) * rows, shape.vocab)
    if start < stop:
        yield Segment(name, start, stop, 0, shape.hidden, rank, name, 0, 0)
