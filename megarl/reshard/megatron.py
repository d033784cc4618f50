"""Where a Megatron rank holds each checkpoint tensor (megatron-core's local layer spec, dense decoders)."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.family import ModelShape
from megarl.reshard.boxes import Layout, Segment

# The vocabulary is padded so that every tensor rank holds the same number of rows.
VOCAB_DIVISOR = 8


def padded_vocab(shape: ModelShape, tensor: int) -> int:
    """Rows of Megatron's embedding over all tensor ranks."""
    unit = VOCAB_DIVISOR * tensor
    return -(-shape.vocab // unit) * unit


def chunk_layers(shape: ModelShape, layout: Layout, pipeline_rank: int, chunk: int) -> range:
    """Global layer numbers, from 0, of one model chunk of a pipeline stage (even chunks).

    A virtual pipeline deals the layers round: chunk 0 of every stage, then chunk 1 of every stage (Narayanan et al. 2021,
    sec. 2.2.2). Without one the stage is its only chunk.
    """
    per_chunk = shape.num_layers // (layout.pipeline * layout.virtual_pipeline)
    first = (chunk * layout.pipeline + pipeline_rank) * per_chunk
    return range(first, first + per_chunk)


def stage_layers(shape: ModelShape, layout: Layout, pipeline_rank: int) -> list[int]:
    """Global layer numbers, from 0, of one pipeline stage, chunk by chunk."""
    chunks = range(layout.virtual_pipeline)
    return [layer for chunk in chunks for layer in chunk_layers(shape, layout, pipeline_rank, chunk)]


def chunk_prefix(layout: Layout, chunk: int) -> str:
    """What stands before a parameter's name in its chunk, so that names differ between the chunks of a stage."""
    return f"chunk{chunk}." if layout.virtual_pipeline > 1 else ""


def megatron_segments(shape: ModelShape, layout: Layout, critic: bool = False) -> list[Segment]:
    """Every box that every trainer rank holds; replicas included, padding rows left out.

    `critic=True` leaves out the language-model head: a value head takes its place and no checkpoint has it.
    Parameter names are those of the rank's own `GPTModel`, where layers count from 0; under a virtual pipeline a stage has
    one for each chunk, and `chunk_prefix` comes first.
    """
    return [
        segment
        for pipeline_rank in range(layout.pipeline)
        for data_rank in range(layout.data)
        for context_rank in range(layout.context)
        for tensor_rank in range(layout.tensor)
        for segment in rank_segments(shape, layout, tensor_rank, pipeline_rank, data_rank, critic, context_rank)
    ]


def rank_segments(
    shape: ModelShape,
    layout: Layout,
    tensor_rank: int,
    pipeline_rank: int,
    data_rank: int = 0,
    critic: bool = False,
    context_rank: int = 0,
) -> Iterator[Segment]:
    """The boxes of one rank; ranks that differ in data or context only hold the same."""
    rank = layout.rank(tensor_rank, pipeline_rank, data_rank, context_rank)
    for chunk in range(layout.virtual_pipeline):
        prefix = chunk_prefix(layout, chunk)
        for segment in _chunk_segments(shape, layout, tensor_rank, pipeline_rank, chunk, rank, critic):
            yield segment._replace(parameter=prefix + segment.parameter)


def _chunk_segments(
    shape: ModelShape, layout: Layout, t: int, pipeline_rank: int, chunk: int, rank: int, critic: bool
) -> Iterator[Segment]:
    """The boxes of one chunk, by the parameter names of its own model."""
    first = pipeline_rank == 0 and chunk == 0
    last = pipeline_rank == layout.pipeline - 1 and chunk == layout.virtual_pipeline - 1
    tensor, head = layout.tensor, "output_layer.weight"
    for local, layer in enumerate(chunk_layers(shape, layout, pipeline_rank, chunk)):
        yield from _layer_segments(shape, tensor, t, rank, layer, f"decoder.layers.{local}.")
    if first:
        yield from _vocab_rows(shape, tensor, t, rank, "model.embed_tokens.weight", "embedding.word_embeddings.weight")
    if last:
        yield _whole("model.norm.weight", shape.hidden, rank, "decoder.final_layernorm.weight")
    if last and not critic and not shape.tied:
        yield from _vocab_rows(shape, tensor, t, rank, "lm_head.weight", head)
    if last and not critic and shape.tied and not first:
        # Under a pipeline the last stage keeps its own copy of the tied embedding.
        yield from _vocab_rows(shape, tensor, t, rank, "model.embed_tokens.weight", head)


def checkpoint_sizes(shape: ModelShape, critic: bool = False) -> dict[str, tuple[int, int]]:
    """(rows, columns) of every checkpoint tensor that the model reads; a vector has one column."""
    sizes: dict[str, tuple[int, int]] = {}
    for segment in rank_segments(shape, Layout(), 0, 0, critic=critic):
        rows, columns = sizes.get(segment.name, (0, 0))
        sizes[segment.name] = (max(rows, segment.row1), max(columns, segment.col1))
    return sizes


def _layer_segments(shape: ModelShape, tensor: int, t: int, rank: int, layer: int, local: str) -> Iterator[Segment]:
    name = f"model.layers.{layer}."
    yield _whole(name + "input_layernorm.weight", shape.hidden, rank, local + "input_layernorm.weight")
    yield _whole(name + "post_attention_layernorm.weight", shape.hidden, rank, local + "pre_mlp_layernorm.weight")
    if shape.qk_norm:
        for which in "qk":
            parameter = f"{local}self_attention.{which}_layernorm.weight"
            yield _whole(f"{name}self_attn.{which}_norm.weight", shape.head_dim, rank, parameter)
    yield from _qkv(shape, tensor, t, rank, name, local + "self_attention.linear_qkv.weight", "weight", shape.hidden)
    if shape.qkv_bias:
        yield from _qkv(shape, tensor, t, rank, name, local + "self_attention.linear_qkv.bias", "bias", 1)
    attention, ffn = shape.heads * shape.head_dim // tensor, shape.ffn // tensor
    projection = local + "self_attention.linear_proj.weight"
    yield Segment(
        name + "self_attn.o_proj.weight", 0, shape.hidden, t * attention, (t + 1) * attention, rank, projection, 0, 0
    )
    for position, part in enumerate(("gate_proj", "up_proj")):
        parameter = local + "mlp.linear_fc1.weight"
        yield Segment(
            f"{name}mlp.{part}.weight", t * ffn, (t + 1) * ffn, 0, shape.hidden, rank, parameter, position * ffn, 0
        )
    yield Segment(
        name + "mlp.down_proj.weight", 0, shape.hidden, t * ffn, (t + 1) * ffn, rank, local + "mlp.linear_fc2.weight", 0, 0
    )


def _whole(name: str, size: int, rank: int, parameter: str) -> Segment:
    return Segment(name, 0, size, 0, 1, rank, parameter, 0, 0)


def _vocab_rows(shape: ModelShape, tensor: int, t: int, rank: int, name: str, parameter: str) -> Iterator[Segment]:
    rows = padded_vocab(shape, tensor) // tensor
    start, stop = t * rows, min((t + 1) * rows, shape.vocab)
    if start < stop:
        yield Segment(name, start, stop, 0, shape.hidden, rank, parameter, 0, 0)


def _qkv(
    shape: ModelShape, tensor: int, t: int, rank: int, name: str, parameter: str, kind: str, columns: int
) -> Iterator[Segment]:
    """The fused order is, group by group, [queries of the group | key | value]; a rank holds an equal interval of the
    fused rows, which with fewer groups than tensor ranks cuts through groups and heads. So: intersect intervals."""
    d, queries = shape.head_dim, shape.heads // shape.groups
    rows = (shape.heads + 2 * shape.groups) * d // tensor
    start, stop = t * rows, (t + 1) * rows
    for group in range(shape.groups):
        base = group * (queries + 2) * d
        parts = (
            ("q_proj", base, queries * d, group * queries * d),
            ("k_proj", base + queries * d, d, group * d),
            ("v_proj", base + (queries + 1) * d, d, group * d),
        )
        for part, fused, size, checkpoint_row in parts:
            low, high = max(fused, start), min(fused + size, stop)
            if low < high:
                row = checkpoint_row + low - fused
                yield Segment(
                    f"{name}self_attn.{part}.{kind}", row, row + high - low, 0, columns, rank, parameter, low - start, 0
                )
