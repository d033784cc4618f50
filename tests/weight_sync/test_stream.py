"""The streams of a sync: every element travels once and alone in its place, in an order in which no two ranks wait for each
other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models import ModelShape
from megarl.models import megatron_weights as megatron
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.megatron_weights import megatron_segments
from megarl.models.quantised_blocks import BLOCK, block_bytes, check_blocks, quantised_tensors, scale_bytes
from megarl.models.vllm_weights import vllm_segments
from megarl.weight_sync.boxes import shard_bytes
from megarl.weight_sync.plan import ReshardPlan, engine_plan, sync_plan
from megarl.weight_sync.publish import Matrices
from megarl.weight_sync.stream import (
    ALIGNMENT,
    CHECKSUM_BYTES,
    Stream,
    bucket_sequence,
    copy_order,
    last_pieces,
    sync_stream,
)
from tests.models.test_table import shape_of
from tests.weight_sync.test_memory import SHAPE as DEEP

SHAPE = ModelShape.from_config(
    {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 131, "hidden_size": 96, "head_dim": 16,
        "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }
)  # fmt: skip
BLOCKS = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 131, "hidden_size": 256, "head_dim": 128,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
LAYOUTS = [Layout(), Layout(2, 3), Layout(4, 1, 2), Layout(1, 3, 2)]
ROLLOUTS = [RolloutLayout(), RolloutLayout(2), RolloutLayout(2, 3)]

cases = st.tuples(
    st.sampled_from(LAYOUTS),
    st.sampled_from(ROLLOUTS),
    st.sampled_from([2, 4]),
    st.integers(1024, 20_000),
    st.integers(0, 5),
)


def stream_of(case: tuple[Layout, RolloutLayout, int, int, int]) -> tuple[ReshardPlan, np.ndarray, Stream]:
    layout, rollout, itemsize, bucket_bytes, worker = case
    plan, worker = engine_plan(SHAPE, layout, rollout), worker % rollout.workers
    order = copy_order(plan, worker, (worker, rollout.workers))
    return plan, order, Stream.of(plan, order, itemsize, bucket_bytes)


@settings(max_examples=30, deadline=None)
@given(cases)
def test_every_row_of_every_copy_travels_once_and_in_order(case: tuple) -> None:  # type: ignore[type-arg]
    plan, order, stream = stream_of(case)
    rows = [(copy, row) for copy in order.tolist() for row in range(int(plan.rows[copy]))]
    sent = [
        (int(copy), int(first) + row)
        for copy, first, count in zip(stream.copy, stream.row, stream.rows, strict=True)
        for row in range(int(count))
    ]
    assert sent == rows
    assert stream.size.sum() == int(plan.sizes[order].sum()) * case[2]
    assert (np.diff(stream.bucket) >= 0).all()
    assert [list(stream.pieces(bucket)) for bucket in range(stream.num_buckets)] == [
        np.flatnonzero(stream.bucket == bucket).tolist() for bucket in range(stream.num_buckets)
    ]


@settings(max_examples=30, deadline=None)
@given(cases)
def test_nothing_in_a_bucket_lies_over_anything_else_and_parts_are_whole(case: tuple) -> None:  # type: ignore[type-arg]
    plan, _, stream = stream_of(case)
    assert stream.capacity <= case[3]
    for bucket in range(stream.num_buckets):
        used = np.zeros(stream.capacity, dtype=int)
        ends = 0
        for part in stream.parts[bucket]:
            assert part.start >= ends and part.start % ALIGNMENT == 0
            ends = part.end
            for piece in part.pieces:
                assert plan.source_rank[stream.copy[piece]] == part.source_rank
                start, size, check = int(stream.offset[piece]), int(stream.size[piece]), int(stream.check[piece])
                assert start % ALIGNMENT == 0 and check % CHECKSUM_BYTES == 0
                assert part.start <= start and start + size <= check and check + CHECKSUM_BYTES <= part.end
                used[start : start + size] += 1
                used[check : check + CHECKSUM_BYTES] += 1
        assert used.max() == 1 and ends <= stream.capacity
        assert sorted(np.concatenate([part.pieces for part in stream.parts[bucket]])) == list(stream.pieces(bucket))
        assert stream.part(bucket, 99) is None and stream.part(stream.num_buckets, 0) is None


def test_buckets_are_full_but_for_less_than_a_row_and_what_is_beside_the_boxes() -> None:
    """Otherwise half-empty buckets would slow a sync down."""
    plan = engine_plan(SHAPE, Layout(), RolloutLayout())
    stream = Stream.of(plan, plan.to_destination(0), 4, 16_384)
    beside = stream.num_buckets * (96 * 4 + 3 * ALIGNMENT) + len(stream.copy) * (ALIGNMENT + CHECKSUM_BYTES)
    assert stream.num_buckets * 16_384 <= stream.size.sum() + beside


def test_a_row_that_no_bucket_holds_is_refused_with_the_size_it_needs() -> None:
    plan = engine_plan(SHAPE, Layout(), RolloutLayout())
    with pytest.raises(ValueError, match=r"weight_sync\.bucket_bytes = 511 is less than a row of model\.") as caught:
        Stream.of(plan, plan.to_destination(0), 4, 511)
    needed = int(str(caught.value).split(" bytes with")[0].rsplit(" ", 1)[1])
    assert needed > 511
    assert Stream.of(plan, plan.to_destination(0), 4, 4 * needed).capacity <= 4 * needed


def test_blocks_stay_whole_and_their_scales_travel_with_them() -> None:
    """The heads of the model are blocks, and both sides have two tensor ranks: pieces of quantised tensors cover their rows
    once, begin at blocks, and have the bytes of scales and elements."""
    shape = ModelShape.from_config(BLOCKS)
    quantised = quantised_tensors(shape)
    assert len(quantised) == 2 * 7 and "model.embed_tokens.weight" not in quantised and "lm_head.weight" not in quantised
    layout, rollout = Layout(tensor=2), RolloutLayout(2)
    check_blocks(megatron_segments(shape, layout), vllm_segments(shape, rollout), quantised)
    plan = engine_plan(shape, layout, rollout)
    stream, other = (Stream.of(plan, copy_order(plan, worker), 2, 1 << 16, quantised) for worker in (0, 1))
    assert stream.size.sum() + other.size.sum() == shard_bytes(shape, rollout, 2, quantised)
    names = [plan.names[plan.name[copy]] for copy in stream.copy]
    for piece, name in enumerate(names):
        rows, cols = int(stream.rows[piece]), int(plan.cols[stream.copy[piece]])
        if name in quantised:
            assert stream.row[piece] % BLOCK == 0 and stream.size[piece] == block_bytes(rows, cols)
            assert stream.scales[piece] == scale_bytes(rows, cols) > 0
        else:
            assert stream.size[piece] == 2 * rows * cols and stream.scales[piece] == 0
    elements = stream.rows * plan.cols[stream.copy]
    assert elements.sum() == plan.sizes[plan.to_destination(0)].sum()
    assert max(elements[[name in quantised for name in names]]) > 128 * 128, "pieces of several blocks"


def test_a_plan_that_cuts_blocks_is_refused() -> None:
    shape = ModelShape.from_config(BLOCKS | {"head_dim": 64})
    quantised = quantised_tensors(shape)
    with pytest.raises(ValueError, match="trainer rank 0's part .* of model.layers.0.self_attn.k_proj.weight cuts a block"):
        check_blocks(megatron_segments(shape, Layout()), vllm_segments(shape, RolloutLayout()), quantised)
    plan = engine_plan(shape, Layout(), RolloutLayout())
    with pytest.raises(ValueError, match=r"FP8 blocks: model\.layers\.0\.self_attn\.k_proj\.weight .* starts inside one"):
        Stream.of(plan, copy_order(plan, 0), 2, 1 << 16, quantised)


def test_a_row_of_blocks_that_fits_no_bucket_is_named() -> None:
    shape = ModelShape.from_config(BLOCKS)
    plan = engine_plan(shape, Layout(), RolloutLayout())
    with pytest.raises(ValueError, match=r"bucket_bytes = 20000 is less than a row of blocks of model\.layers\.0\."):
        Stream.of(plan, copy_order(plan, 0), 2, 20000, quantised_tensors(shape))


class Merged(Mapping[str, torch.Tensor]):
    """A rank's weights, each made anew whenever it is read, without memory."""

    def __init__(self, shape: ModelShape, layout: Layout, rank: int) -> None:
        self.sizes = megatron.parameter_sizes(shape, layout, rank)
        self.reads: Counter[str] = Counter()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.reads[name] += 1
        return torch.empty(self.sizes[name], device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)


def most_layers(held: Sequence[set[str]]) -> int:
    """The most layers at any time. Weights outside the layers are never merged."""
    found = [[re.match(r".*\.layers\.\d+\.", name) for name in names] for names in held]
    return max(len({match.group() for match in matches if match}) for matches in found)


def replay(plan: ReshardPlan, streams: Sequence[Stream], by_layer: bool, parameters: Merged, rank: int) -> list[set[str]]:
    """The names that a rank holds after each of its pieces; at the end it holds none."""
    sequence = bucket_sequence(plan, streams, by_layer)
    matrices, held = Matrices(parameters, last_pieces(plan, streams, sequence, rank)), []
    for bucket, number in sequence:
        part = streams[number].part(bucket, rank)
        for piece in () if part is None else streams[number].at_source(plan, part):
            box = matrices.box(piece)
            assert tuple(box.shape) == (piece.rows, piece.cols)
            held.append(set(matrices._held))
            matrices.packed(number, piece)
    assert not matrices._held
    return held


def by_layer_streams(shape: ModelShape, plan: ReshardPlan, rollout: RolloutLayout, bucket_bytes: int) -> list[Stream]:
    form = torch.bfloat16, bucket_bytes, None
    return [sync_stream(shape, plan, worker, None, *form) for worker in range(rollout.workers)]


@pytest.mark.parametrize("bucket_bytes", [1 << 17, 1 << 22], ids=["parts of a layer", "more than a layer"])
@pytest.mark.parametrize(
    ("shape", "layout", "rollout"),
    [
        *[(DEEP, Layout(), RolloutLayout(workers)) for workers in (1, 2, 4, 8)],
        # The two stages have different layers.
        (DEEP, Layout(), RolloutLayout(2, 2)),
        (DEEP, Layout(2, 2), RolloutLayout(4)),
        (DEEP, Layout(1, 2, virtual_pipeline=2), RolloutLayout(1, 2)),
        # Workers hold different numbers of experts.
        (shape_of("qwen3_moe"), Layout(2, 1, 2, expert=2), RolloutLayout(1, 1, 3, True)),
    ],
)
def test_by_layer_a_rank_is_in_one_layer_at_a_time_and_merges_each_weight_once(
    shape: ModelShape, layout: Layout, rollout: RolloutLayout, bucket_bytes: int
) -> None:
    plan = sync_plan(shape, layout, rollout, "reshard")
    streams = by_layer_streams(shape, plan, rollout, bucket_bytes)
    for rank in range(layout.ranks):
        parameters = Merged(shape, layout, rank)
        held = replay(plan, streams, True, parameters, rank)
        assert most_layers(held) == 1, f"rank {rank} is in the middle of {most_layers(held)} layers"
        assert set(parameters.reads.values()) == {1}, f"rank {rank} merges {parameters.reads.most_common(3)}"


@pytest.mark.parametrize("by_layer", [False, True])
def test_every_bucket_comes_once_and_those_of_a_stream_in_their_order(by_layer: bool) -> None:
    """Then no two ranks wait for each other, and a worker's messages come in the order of its receives."""
    rollout = RolloutLayout(2, 2)
    plan = sync_plan(DEEP, Layout(2, 2), rollout, "reshard")
    streams = by_layer_streams(DEEP, plan, rollout, 1 << 17)
    sequence = bucket_sequence(plan, streams, by_layer)
    for number, stream in enumerate(streams):
        assert [bucket for bucket, of in sequence if of == number] == list(range(stream.num_buckets))
    assert len(sequence) == sum(stream.num_buckets for stream in streams)
