"""Laws of the reshard plan: both ends compute the same, who sends, and in which order a worker receives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout, Segment
from megarl.models.megatron_weights import megatron_segments
from megarl.models.vllm_weights import vllm_segments
from megarl.weight_sync.boxes import vllm_boxes
from megarl.weight_sync.plan import ReshardPlan, engine_plan, plan_reshard
from megarl.weight_sync.stream import copy_order, layer_starts, start_share


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


@settings(max_examples=60)
@given(cases())
def test_both_ends_compute_the_same_plan_and_another_cut_another_hash(case: tuple[ModelShape, Layout, int]) -> None:
    shape, layout, rollout = case
    first = plan_reshard(megatron_segments(shape, layout), vllm_segments(shape, RolloutLayout(rollout)))
    again = plan_reshard(megatron_segments(shape, layout), vllm_segments(shape, RolloutLayout(rollout)))
    assert first.hash == again.hash
    other = model(
        shape.family, shape.num_layers, shape.heads, shape.groups, shape.head_dim, shape.ffn, shape.vocab + 1, shape.tied
    )
    assert plan_reshard(megatron_segments(other, layout), vllm_segments(other, RolloutLayout(rollout))).hash != first.hash


def test_the_sending_is_shared_by_the_replicas() -> None:
    shape = model("llama", 4, 4, 4, 4, 16, 64, False)
    plan = plan_reshard(megatron_segments(shape, Layout(1, 1, 4)), vllm_segments(shape, RolloutLayout()))
    elements = sent(plan, 4)
    assert max(elements) - min(elements) <= int(plan.sizes.max())


def sent(plan: ReshardPlan, ranks: int) -> list[int]:
    """Elements that each trainer rank sends."""
    return [int(plan.sizes[plan.source_rank == rank].sum()) for rank in range(ranks)]


def test_an_engine_with_another_turn_burdens_another_rank() -> None:
    """Ten rows that four ranks hold whole are one box: what cannot be shared in one sync is shared over the engines."""
    sources = [Segment("a", 0, 10, 0, 2, rank, "p", 0, 0) for rank in range(4)]
    senders = [plan_reshard(sources, [sources[0]], turn=engine).source_rank.tolist() for engine in range(5)]
    assert senders == [[0], [1], [2], [3], [0]]


def test_a_box_comes_from_a_rank_on_the_same_node_where_there_is_one() -> None:
    shape, layout, rollout = model("llama", 4, 4, 4, 4, 16, 64, False), Layout(2, 1, 4), RolloutLayout(2)
    source_nodes, worker_nodes = [rank // 2 for rank in range(8)], [1, 9]
    plan = engine_plan(shape, layout, rollout, source_nodes=source_nodes, worker_nodes=worker_nodes)
    nodes = np.array(source_nodes)[plan.source_rank]
    assert set(nodes[plan.destination_rank == 0]) == {1}
    # Nobody is on the other worker's node: everyone sends, those of node 1 less of it.
    away = np.bincount(nodes[plan.destination_rank == 1], plan.sizes[plan.destination_rank == 1], 4)
    assert away.min() == away[1] < away.max() and (away[[0, 2, 3]] > 0).all()
    assert plan.hash != engine_plan(shape, layout, rollout).hash


@settings(max_examples=60)
@given(cases(), st.integers(1, 6))
def test_readers_go_round_from_the_layer_of_their_share(case: tuple[ModelShape, Layout, int], readers: int) -> None:
    shape, layout, tensor = case
    plan = engine_plan(shape, layout, RolloutLayout(tensor))
    own = plan.to_destination(0)
    starts, total = layer_starts(plan, own), int(plan.sizes[own].sum())
    largest = max(int(part.sum()) for part in np.split(plan.sizes[own], starts[1:]))
    assert len(starts) == shape.num_layers + 2
    for reader in range(readers):
        order = copy_order(plan, 0, (reader, readers))
        first = int(np.flatnonzero(own == order[0])[0])
        assert first in starts and order.tolist() == np.roll(own, -first).tolist()
        assert 0 <= total * start_share(reader, readers) - int(plan.sizes[own[:first]].sum()) < largest


KIMI_K2 = ModelShape.from_config(
    {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432,
        "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1,
        "n_routed_experts": 384, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "moe_intermediate_size": 2048, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    }
)  # fmt: skip


def test_a_model_of_a_trillion_weights_is_planned_like_a_small_one() -> None:
    """512 trainer ranks to 16 engines of 32 workers. What a worker of these needs is 1/32 of the experts of 60 layers, 1/8
    of what tensor ranks cut, and the rest; the ranks of a stage send the same, within a hundredth."""
    layout = Layout(8, 8, 8, expert=32, expert_tensor=1, stages=(7, 8, 8, 8, 8, 8, 7, 7))
    rollout = RolloutLayout(8, data=4, expert_parallel=True)
    boxes = vllm_boxes(KIMI_K2, rollout, lambda weight: not weight.fixed)
    bound = np.bincount(boxes.rank, boxes.sizes)
    assert bound.min() == bound.max() > 60 * 12 * 3 * 2048 * 7168
    total = np.zeros(layout.ranks)
    for engine in range(16):
        plan = engine_plan(KIMI_K2, layout, rollout, engine)
        assert (np.bincount(plan.destination_rank, plan.sizes) == bound).all()
        total += np.bincount(plan.source_rank, plan.sizes, layout.ranks)
    stages = total.reshape(8, 64)
    assert (stages.max(axis=1) < 1.01 * stages.mean(axis=1)).all()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_a_rank_and_its_coordinates_are_each_other_s_inverse(tensor: int, pipeline: int, data: int, context: int) -> None:
    layout = Layout(tensor, pipeline, data, context=context)
    assert [layout.rank(*layout.coordinates(rank)) for rank in range(layout.ranks)] == list(range(layout.ranks))


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
