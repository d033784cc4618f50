"""Laws of the reshard plan: exact bytes, exact cover, exact contents, over wide grids of shapes and cuts."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.family import ModelShape
from megarl.reshard.boxes import Layout, RolloutLayout, Segment
from megarl.reshard.megatron import megatron_segments
from megarl.reshard.plan import plan_reshard
from megarl.reshard.vllm import parameter_sizes, vllm_segments


def model(family: str, layers: int, heads: int, groups: int, head_dim: int, ffn: int, vocab: int, tied: bool) -> ModelShape:
    return ModelShape(
        family,
        layers,
        8,
        heads,
        groups,
        head_dim,
        ffn,
        vocab,
        tied,
        family == "qwen2",
        family == "qwen3",
        1e-6,
        1e4,
        (),
        64,
        0.02,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelShape, Layout, int]:
    """A model with a trainer layout and a rollout tensor size that both cut it."""
    tensor, rollout = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4, 8]))
    groups = draw(
        st.sampled_from([1, 2, 3, 4, 8]).filter(lambda g: all(g % cut == 0 or cut % g == 0 for cut in (tensor, rollout)))
    )
    unit = np.lcm.reduce([groups, tensor, rollout])
    heads = int(unit) * draw(st.integers(1, 2))
    pipeline = draw(st.sampled_from([1, 2, 3]))
    chunks = draw(st.sampled_from([1, 2, 3])) if pipeline > 1 else 1
    shape = model(
        draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        pipeline * chunks * draw(st.integers(1, 2)),
        heads,
        groups,
        draw(st.sampled_from([1, 2, 6])),
        8 * draw(st.integers(1, 3)),
        draw(st.integers(1, 300)),
        draw(st.booleans()),
    )
    # Megatron cuts the fused qkv rows evenly
    if (shape.heads + 2 * shape.groups) * shape.head_dim % tensor:
        shape = model(shape.family, shape.num_layers, heads, groups, 4, shape.ffn, shape.vocab, shape.tied)
    return (
        shape,
        Layout(tensor, pipeline, draw(st.integers(1, 2)), virtual_pipeline=chunks, context=draw(st.integers(1, 2))),
        rollout,
    )


def size(segment: Segment) -> int:
    return (segment.row1 - segment.row0) * (segment.col1 - segment.col0)


def checkpoint(segments: list[Segment]) -> dict[str, np.ndarray]:
    """A checkpoint in which no two elements are equal."""
    shapes: dict[str, tuple[int, int]] = {}
    for segment in segments:
        rows, cols = shapes.get(segment.name, (0, 0))
        shapes[segment.name] = (max(rows, segment.row1), max(cols, segment.col1))
    start, tensors = 1, {}
    for name, (rows, cols) in shapes.items():
        tensors[name] = np.arange(start, start + rows * cols).reshape(rows, cols)
        start += rows * cols
    return tensors


def cut(segments: list[Segment], tensors: dict[str, np.ndarray]) -> dict[tuple[int, str], np.ndarray]:
    """The local parameters that segments describe; what no segment covers stays 0."""
    sizes: dict[tuple[int, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for s in segments:
        rows, cols = sizes[s.rank, s.parameter]
        sizes[s.rank, s.parameter] = (
            max(rows, s.local_row + s.row1 - s.row0),
            max(cols, s.local_col + s.col1 - s.col0),
        )
    parameters = {key: np.zeros(shape, dtype=np.int64) for key, shape in sizes.items()}
    for s in segments:
        end_row, end_col = s.local_row + s.row1 - s.row0, s.local_col + s.col1 - s.col0
        target = parameters[s.rank, s.parameter][s.local_row : end_row, s.local_col : end_col]
        assert not target.any(), f"two boxes on one place: {s}"
        target[...] = tensors[s.name][s.row0 : s.row1, s.col0 : s.col1]
    return parameters


@settings(max_examples=300)
@given(cases())
def test_replayed_plan_gives_the_shards_cut_directly_and_moves_no_byte_more(
    case: tuple[ModelShape, Layout, int],
) -> None:
    shape, layout, rollout = case
    sources, destinations = megatron_segments(shape, layout), vllm_segments(shape, RolloutLayout(rollout))
    plan = plan_reshard(sources, destinations)
    for rank in range(rollout):
        received = int(plan.sizes[plan.to_destination(rank)].sum())
        assert received == sum(size(segment) for segment in destinations if segment.rank == rank)

    tensors = checkpoint(sources)
    held, expected = cut(sources, tensors), cut(destinations, tensors)
    replayed = {key: np.zeros_like(parameter) for key, parameter in expected.items()}
    for i in range(len(plan)):
        source = held[int(plan.source_rank[i]), plan.source_parameters[plan.source_parameter[i]]]
        target = replayed[int(plan.destination_rank[i]), plan.destination_parameters[plan.destination_parameter[i]]]
        rows, cols = int(plan.rows[i]), int(plan.cols[i])
        source_row, source_col = int(plan.source_row[i]), int(plan.source_col[i])
        row, col = int(plan.destination_row[i]), int(plan.destination_col[i])
        box = target[row : row + rows, col : col + cols]
        assert not box.any(), f"written twice: {plan.describe(i)}"
        box[...] = source[source_row : source_row + rows, source_col : source_col + cols]
    for key, parameter in expected.items():
        np.testing.assert_array_equal(replayed[key], parameter, err_msg=str(key))


@settings(max_examples=60)
@given(cases())
def test_both_ends_compute_the_same_plan_and_another_cut_another_hash(
    case: tuple[ModelShape, Layout, int],
) -> None:
    shape, layout, rollout = case
    first = plan_reshard(megatron_segments(shape, layout), vllm_segments(shape, RolloutLayout(rollout)))
    again = plan_reshard(megatron_segments(shape, layout), vllm_segments(shape, RolloutLayout(rollout)))
    assert first.hash == again.hash
    other = model(
        shape.family,
        shape.num_layers,
        shape.heads,
        shape.groups,
        shape.head_dim,
        shape.ffn,
        shape.vocab + 1,
        shape.tied,
    )
    assert plan_reshard(megatron_segments(other, layout), vllm_segments(other, RolloutLayout(rollout))).hash != first.hash


def test_the_sending_is_shared_by_the_replicas() -> None:
    shape = model("llama", 4, 4, 4, 4, 16, 64, False)
    plan = plan_reshard(megatron_segments(shape, Layout(1, 1, 4)), vllm_segments(shape, RolloutLayout()))
    sent = [int(plan.sizes[plan.source_rank == rank].sum()) for rank in range(4)]
    assert max(sent) - min(sent) <= int(plan.sizes.max())


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_a_rank_and_its_coordinates_are_each_other_s_inverse(tensor: int, pipeline: int, data: int, context: int) -> None:
    layout = Layout(tensor, pipeline, data, context=context)
    assert [layout.rank(*layout.coordinates(rank)) for rank in range(layout.ranks)] == list(range(layout.ranks))


def test_parameter_sizes_hold_every_segment() -> None:
    shape = model("qwen2", 2, 4, 2, 4, 16, 65, True)
    sizes = parameter_sizes(shape, RolloutLayout(2), 0)
    assert sizes["model.embed_tokens.weight"] == (64, 8) and "lm_head.weight" not in sizes
    for segment in vllm_segments(shape, RolloutLayout(2)):
        rows, cols = sizes[segment.parameter]
        assert (
            segment.local_row + segment.row1 - segment.row0 <= rows
            and segment.local_col + segment.col1 - segment.col0 <= cols
        )


def test_what_cannot_be_planned_is_refused() -> None:
    box = Segment("a", 0, 4, 0, 2, 0, "p", 0, 0)
    with pytest.raises(ValueError, match="only one end knows"):
        plan_reshard([box], [box._replace(name="b")])
    with pytest.raises(ValueError, match="only one end knows"):
        plan_reshard([box, box._replace(name="b")], [box])
    with pytest.raises(ValueError, match="held by no source"):
        plan_reshard([box], [box._replace(row1=5)])
    with pytest.raises(ValueError, match="overlap"):
        plan_reshard([box, box._replace(row0=2, row1=6)], [box])


@pytest.mark.parametrize(("tensor", "rule"), [(3, "attention heads"), (8, "attention heads")])
def test_a_rollout_tensor_size_that_cuts_nothing_is_named(tensor: int, rule: str) -> None:
    with pytest.raises(ValueError, match=rf"rollout\.tensor = {tensor} must divide the 4 {rule}"):
        vllm_segments(model("llama", 1, 4, 2, 4, 16, 64, False), RolloutLayout(tensor))
