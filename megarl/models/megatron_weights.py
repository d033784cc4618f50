"""The boxes of checkpoint tensors that each Megatron rank holds, from the family's weight table."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.models import FAMILIES, ModelShape, Weight
from megarl.models.layout import Box, Layout
from megarl.models.weight_table import MEGATRON_VOCABULARY, embedding, final_norm, head


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
    return [
        box
        for pipeline_rank in range(layout.pipeline)
        for data_rank in range(layout.data)
        for context_rank in range(layout.context)
        for tensor_rank in range(layout.tensor)
        for box in rank_boxes(shape, layout, tensor_rank, pipeline_rank, data_rank, critic, context_rank)
    ]


def rank_boxes(
    shape: ModelShape,
    layout: Layout,
    tensor_rank: int,
    pipeline_rank: int,
    data_rank: int = 0,
    critic: bool = False,
    context_rank: int = 0,
) -> Iterator[Box]:
    """Yield the boxes of a rank; ranks that differ only in data or context rank hold the same boxes."""
    rank = layout.rank(tensor_rank, pipeline_rank, data_rank, context_rank)
    for chunk in range(layout.virtual_pipeline):
        prefix = chunk_prefix(layout, chunk)
        for name_prefix, parameter_prefix, weight in chunk_weights(shape, layout, pipeline_rank, chunk, critic):
            yield from weight_boxes(layout, rank, name_prefix, prefix + parameter_prefix, weight)


def chunk_weights(
    shape: ModelShape, layout: Layout, pipeline_rank: int, chunk: int, critic: bool
) -> Iterator[tuple[str, str, Weight]]:
    """Yield (prefix of the checkpoint's name, prefix of the parameter's name, row) for the rows that a chunk holds."""
    first = pipeline_rank == 0 and chunk == 0
    last = pipeline_rank == layout.pipeline - 1 and chunk == layout.virtual_pipeline - 1
    for local, layer in enumerate(chunk_layers(shape, layout, pipeline_rank, chunk)):
        for weight in FAMILIES[shape.family].layer(shape, layer):
            yield f"model.layers.{layer}.", f"decoder.layers.{local}.", weight
    if first:
        yield "", "", embedding(shape)
    if last:
        yield "", "", final_norm(shape)
    # Under a pipeline the last stage keeps its own copy of the tied embedding.
    if last and not critic and not (shape.tied and first):
        yield "", "", head(shape)


def weight_boxes(layout: Layout, rank: int, name_prefix: str, parameter_prefix: str, weight: Weight) -> Iterator[Box]:
    """Yield a rank's boxes of a row of the table, with the prefixes of its two names."""
    parameter, sharding = weight.megatron
    if not weight.experts:
        t = layout.coordinates(rank)[0]
        for row0, row1, col0, col1, local_row, local_col in sharding.pieces(weight.rows, weight.columns, layout.tensor, t):
            yield Box(
                name_prefix + weight.name, row0, row1, col0, col1, rank, parameter_prefix + parameter, local_row, local_col
            )
        return
    tensor_rank, expert_rank, _ = layout.expert_coordinates(rank)
    pieces = list(sharding.pieces(weight.rows, weight.columns, layout.expert_tensor_size, tensor_rank))
    held = weight.experts // layout.expert
    for local in range(held):
        name = name_prefix + weight.name.format(expert=expert_rank * held + local)
        local_parameter = parameter_prefix + parameter.format(expert=local)
        for row0, row1, col0, col1, local_row, local_col in pieces:
            yield Box(name, row0, row1, col0, col1, rank, local_parameter, local_row, local_col)


def parameter_sizes(shape: ModelShape, layout: Layout, rank: int, critic: bool = False) -> dict[str, tuple[int, int]]:
    """Return (rows, columns) of every parameter of a rank, with padding, except the value head; a vector has one column."""
    _, pipeline_rank, _, _ = layout.coordinates(rank)
    sizes: dict[str, tuple[int, int]] = {}
    for chunk in range(layout.virtual_pipeline):
        for _, prefix, weight in chunk_weights(shape, layout, pipeline_rank, chunk, critic):
            parameter, sharding = weight.megatron
            ranks = layout.expert_tensor_size if weight.experts else layout.tensor
            extent = sharding.extent(weight.rows, weight.columns, ranks)
            for local in range(weight.experts // layout.expert if weight.experts else 1):
                sizes[chunk_prefix(layout, chunk) + prefix + parameter.format(expert=local)] = extent
    return sizes


def checkpoint_sizes(shape: ModelShape, critic: bool = False) -> dict[str, tuple[int, int]]:
    """Return (rows, columns) of every checkpoint tensor that the model reads; a vector has one column."""
    sizes: dict[str, tuple[int, int]] = {}
    for prefix, _, weight in chunk_weights(shape, Layout(), 0, 0, critic):
        for expert in range(max(1, weight.experts)):
            sizes[prefix + weight.name.format(expert=expert)] = (weight.rows, weight.columns)
    return sizes
