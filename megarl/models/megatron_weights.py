"""The boxes of checkpoint tensors that each Megatron rank holds, from the family's weight table."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.models import FAMILIES, ModelShape, Weight
from megarl.models.layout import Box, Layout
from megarl.models.weight_table import MEGATRON_VOCABULARY, Share, boxes_of


def padded_vocab(shape: ModelShape, tensor: int) -> int:
    """Return the rows of Megatron's embedding over all tensor ranks."""
    return MEGATRON_VOCABULARY.padded(shape.vocab, tensor)


def chunk_layers(shape: ModelShape, layout: Layout, pipeline_rank: int, chunk: int) -> range:
    """Return the global layer numbers, from 0, of a model chunk of a pipeline stage.

    Chunk 0 of every stage comes first, then chunk 1 of every stage (Narayanan et al. 2021, sec. 2.2.2). `layout.stages`
    gives uneven chunks in that order.
    """
    position, chunks = chunk * layout.pipeline + pipeline_rank, layout.pipeline * layout.virtual_pipeline
    sizes = layout.stages or (shape.num_layers // chunks,) * chunks
    first = sum(sizes[:position])
    return range(first, first + sizes[position])


def stage_layers(shape: ModelShape, layout: Layout, pipeline_rank: int) -> list[int]:
    """Return the global layer numbers, from 0, of a pipeline stage, chunk by chunk."""
    chunks = range(layout.virtual_pipeline)
    return [layer for chunk in chunks for layer in chunk_layers(shape, layout, pipeline_rank, chunk)]


def chunk_prefix(layout: Layout, chunk: int) -> str:
    """Return the prefix that makes parameter names differ between the chunks of a stage."""
    return f"chunk{chunk}." if layout.virtual_pipeline > 1 else ""


def megatron_boxes(shape: ModelShape, layout: Layout, critic: bool = False) -> list[Box]:
    """Return the boxes of all trainer ranks, with replicas and without padding rows.

    `critic=True` leaves out the language-model head. Parameter names are those of the rank's `GPTModel`, where layers count
    from 0, after the `chunk_prefix`.
    """
    return [box for rank in range(layout.ranks) for box in rank_boxes(shape, layout, rank, critic)]


def rank_boxes(shape: ModelShape, layout: Layout, rank: int, critic: bool = False) -> Iterator[Box]:
    """Yield the boxes of a rank; ranks that differ only in data or context rank hold the same boxes."""
    for chunk in range(layout.virtual_pipeline):
        for prefix, parameter_prefix, weight in chunk_weights(shape, layout, layout.coordinates(rank)[1], chunk, critic):
            yield from weight_boxes(layout, rank, prefix, chunk_prefix(layout, chunk) + parameter_prefix, weight)


def chunk_weights(
    shape: ModelShape, layout: Layout, pipeline_rank: int, chunk: int, critic: bool
) -> Iterator[tuple[str, str, Weight]]:
    """Yield (prefix of the checkpoint's name, prefix of the parameter's name, row) for the rows that a chunk holds."""
    first = pipeline_rank == 0 and chunk == 0
    last = pipeline_rank == layout.pipeline - 1 and chunk == layout.virtual_pipeline - 1
    layers = chunk_layers(shape, layout, pipeline_rank, chunk)
    for layer, weight in FAMILIES[shape.family].weights(shape, layers, first, last, critic):
        if layer is None:
            yield "", "", weight
        else:
            yield f"model.layers.{layer}.", f"decoder.layers.{layer - layers.start}.", weight


def weight_share(weight: Weight, layout: Layout, rank: int) -> Share:
    """Return a rank's share of a weight of its stage."""
    if not weight.experts:
        return Share(layout.tensor, layout.coordinates(rank)[0], range(1))
    tensor_rank, expert_rank, _ = layout.expert_coordinates(rank)
    count = weight.experts // layout.expert
    return Share(layout.expert_tensor_size, tensor_rank, range(expert_rank * count, (expert_rank + 1) * count))


def weight_boxes(layout: Layout, rank: int, name_prefix: str, parameter_prefix: str, weight: Weight) -> Iterator[Box]:
    """Yield a rank's boxes of a row of the table, with the prefixes of its two names."""
    return boxes_of(weight, weight.megatron, weight_share(weight, layout, rank), rank, name_prefix, parameter_prefix)


def parameter_sizes(shape: ModelShape, layout: Layout, rank: int, critic: bool = False) -> dict[str, tuple[int, int]]:
    """Return (rows, columns) of every parameter of a rank, with padding, except the value head; a vector has one column."""
    sizes: dict[str, tuple[int, int]] = {}
    for chunk in range(layout.virtual_pipeline):
        for _, prefix, weight in chunk_weights(shape, layout, layout.coordinates(rank)[1], chunk, critic):
            (parameter, sharding), share = weight.megatron, weight_share(weight, layout, rank)
            extent = sharding.extent(weight.rows, weight.columns, share.ranks)
            for local in range(len(share.experts)):
                sizes[chunk_prefix(layout, chunk) + prefix + parameter.format(expert=local)] = extent
    return sizes


def checkpoint_sizes(shape: ModelShape, critic: bool = False) -> dict[str, tuple[int, int]]:
    """Return (rows, columns) of every checkpoint tensor that the model reads; a vector has one column."""
    sizes: dict[str, tuple[int, int]] = {}
    for prefix, _, weight in chunk_weights(shape, Layout(), 0, 0, critic):
        for expert in range(max(1, weight.experts)):
            sizes[prefix + weight.name.format(expert=expert)] = (weight.rows, weight.columns)
    return sizes
