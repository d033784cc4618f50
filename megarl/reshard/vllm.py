"""Where a vLLM tensor rank holds each checkpoint tensor, by the weight table of its family."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.family import FAMILIES, ModelShape, Weight
from megarl.family.blocks import VLLM_VOCABULARY, embedding, final_norm, head
from megarl.reshard.boxes import Segment


def padded_vocab(shape: ModelShape) -> int:
    """Rows of vLLM's embedding over all tensor ranks; rows from `shape.vocab` on are padding."""
    return VLLM_VOCABULARY.padded(shape.vocab, 1)


def vllm_segments(shape: ModelShape, tensor: int) -> list[Segment]:
    """Every box that every tensor rank of one engine holds; padding rows left out.

    Raises ValueError for a `tensor` that does not cut the model.
    """
    _check(shape, tensor)
    return [segment for rank in range(tensor) for segment in rank_segments(shape, tensor, rank)]


def parameter_sizes(shape: ModelShape, tensor: int) -> dict[str, tuple[int, int]]:
    """(rows, columns) of each parameter of one tensor rank, padding included; a vector has one column, and the experts of a
    layer stand one below the other."""
    sizes: dict[str, tuple[int, int]] = {}
    for prefix, weight in _weights(shape):
        parameter, cut = weight.vllm
        rows, columns = cut.extent(weight.rows, weight.columns, tensor)
        sizes[prefix + parameter] = (max(1, weight.experts) * rows, columns)
    return sizes


def rank_segments(shape: ModelShape, tensor: int, rank: int) -> Iterator[Segment]:
    """The boxes of one tensor rank, in the order of the model's forward pass."""
    for prefix, weight in _weights(shape):
        parameter, cut = weight.vllm
        pieces = list(cut.pieces(weight.rows, weight.columns, tensor, rank))
        stride, _ = cut.extent(weight.rows, weight.columns, tensor)
        for expert in range(max(1, weight.experts)):
            name = prefix + weight.name.format(expert=expert)
            for row0, row1, col0, col1, local_row, local_col in pieces:
                local_row += expert * stride
                yield Segment(name, row0, row1, col0, col1, rank, prefix + parameter, local_row, local_col)


def fixed_tensors(shape: ModelShape) -> set[str]:
    """Checkpoint names of the tensors that no update moves."""
    return {prefix + weight.name for prefix, weight in _weights(shape) if weight.fixed}


def _weights(shape: ModelShape) -> Iterator[tuple[str, Weight]]:
    """The table's rows, with what stands before their names."""
    yield "", embedding(shape)
    for layer in range(shape.num_layers):
        for weight in FAMILIES[shape.family].layer(shape, layer):
            yield f"model.layers.{layer}.", weight
    yield "", final_norm(shape)
    if not shape.tied:
        yield "", head(shape)


def feed_forward_rows(shape: ModelShape) -> list[int]:
    """Rows of every kind of feed-forward network of the model; vLLM cuts each over all tensor ranks, experts too."""
    dense = not all(shape.has_experts(layer) for layer in range(shape.num_layers))
    experts = (
        [] if shape.experts is None else [shape.experts.ffn, *([shape.experts.shared_ffn] * bool(shape.experts.shared_ffn))]
    )
    return [shape.ffn] * dense + experts


def _check(shape: ModelShape, tensor: int) -> None:
    rows = feed_forward_rows(shape)
    rules = {
        f"divide the {shape.heads} attention heads": shape.heads % tensor == 0,
        f"divide the {shape.groups} key-value groups or be a multiple of them": (
            shape.groups % tensor == 0 or tensor % shape.groups == 0
        ),
        f"divide the {' and '.join(map(str, rows))} feed-forward rows": all(row % tensor == 0 for row in rows),
        "be at most the number of experts": shape.experts is None or tensor <= shape.experts.count,
        f"divide the {padded_vocab(shape)} padded vocabulary rows": padded_vocab(shape) % tensor == 0,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(f"rollout.tensor = {tensor} must {rule}; 1 always does")
