"""The reshard plan over a wide grid: every family, every trainer and engine layout.

A worker receives exactly the bytes of its own shard, each element once; the replicas share the sending; and the order in
which a worker receives begins with its reader's layer.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models import FAMILIES, ModelShape
from megarl.models.layout import Box, Layout, RolloutLayout
from megarl.models.megatron_weights import checkpoint_sizes, rank_boxes
from megarl.models.vllm_weights import (
    fixed_tensors,
    held_experts,
    idle_parameters,
    parameter_sizes,
    stage_layers,
    vllm_boxes,
)
from megarl.weight_sync.boxes import shard_bytes, vllm_columns
from megarl.weight_sync.plan import ReshardPlan, plan_reshard, sync_plan
from tests.cluster_cases import MODELS
from tests.models.test_table import fill, layouts, shape_of
from tests.rollout_cases import cut

Parameters = dict[int, dict[str, torch.Tensor]]  # by rank


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """Every family with key-value groups fewer and more than tensor ranks, odd vocabularies, tied heads or not."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    edits: dict[str, Any] = {"vocab_size": draw(st.integers(1, 300))}
    if family == "deepseek_v3":  # vLLM gives it a head of its own
        edits["q_lora_rank"] = draw(st.sampled_from([None, 12]))
    else:
        edits["num_key_value_heads"] = draw(st.sampled_from([1, 2, 4, 8]))
        edits["tie_word_embeddings"] = draw(st.booleans())
    return shape_of(family, **edits)


@st.composite
def rollouts(draw: st.DrawFn, shape: ModelShape) -> RolloutLayout:
    """Cuts of an engine into few workers; stages may be uneven, and experts not a multiple of their ranks."""
    tensor, pipeline = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 3, 4]))
    dealt = shape.experts is not None and draw(st.booleans())
    most = min(8 // (tensor * pipeline), 8 // tensor if shape.experts is not None else 4)
    sizes = [size for size in ((1, 2, 3, 4) if dealt else (1, 2, 4)) if size <= most]
    return RolloutLayout(tensor, pipeline, draw(st.sampled_from(sizes or [1])), dealt)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelShape, Layout, RolloutLayout]:
    shape = draw(shapes())
    return shape, draw(layouts().filter(lambda layout: layout.ranks <= 8)), draw(rollouts(shape))


@cache
def checkpoint(shape: ModelShape) -> dict[str, torch.Tensor]:
    """A checkpoint in which no two elements are equal."""
    start, tensors = 1, dict[str, torch.Tensor]()
    for name, size in checkpoint_sizes(shape).items():
        tensors[name] = torch.arange(start, start + size[0] * size[1]).view(size)
        start += size[0] * size[1]
    return tensors


def assert_received(plan: ReshardPlan, shape: ModelShape, layout: Layout, expected: Parameters) -> None:
    """Every worker holds the expected parameters once every copy is made, and no place is written twice."""
    boxes = [box for rank in set(plan.source_rank.tolist()) for box in rank_boxes(shape, layout, rank)]
    held = cut(boxes, checkpoint(shape))
    written = {rank: {name: torch.zeros_like(tensor) for name, tensor in of.items()} for rank, of in expected.items()}
    source = (plan.source_rank, plan.source_parameter, plan.source_row, plan.source_col)
    target = (plan.destination_rank, plan.destination_parameter, plan.destination_row, plan.destination_col)
    table = np.stack((*source, *target, plan.rows, plan.cols)).T.tolist()
    for copy, (rank, parameter, row, col, worker, place, to_row, to_col, rows, cols) in enumerate(table):
        box = written[worker][plan.destination_parameters[place]][to_row : to_row + rows, to_col : to_col + cols]
        assert not box.any(), f"written twice: {plan.describe(copy)}"
        box[...] = held[rank][plan.source_parameters[parameter]][row : row + rows, col : col + cols]
    for worker, parameters in written.items():
        assert all(torch.equal(parameter, expected[worker][name]) for name, parameter in parameters.items()), worker


@settings(max_examples=320)
@given(st.data())
def test_a_worker_receives_its_own_shard_and_not_a_byte_more(data: st.DataObject) -> None:
    shape, layout, rollout = data.draw(cases())
    plan = sync_plan(shape, layout, rollout)
    fixed = fixed_tensors(shape)
    boxes = [box for box in vllm_boxes(shape, rollout) if box.name not in fixed]
    assert_received(plan, shape, layout, cut(boxes, checkpoint(shape)))
    assert shard_bytes(shape, rollout, 2) == 2 * int(plan.sizes.sum()), "what a sync is measured by"
    assert sync_plan.__wrapped__(shape, layout, rollout).hash == plan.hash, "both ends compute the same plan"


@settings(max_examples=40)
@given(st.data())
def test_in_checkpoint_mode_a_worker_receives_every_tensor_that_updates_move(data: st.DataObject) -> None:
    shape, layout, rollout = data.draw(cases())
    plan = sync_plan(shape, layout, rollout, "checkpoint")
    fixed = fixed_tensors(shape)
    whole = {name: tensor for name, tensor in checkpoint(shape).items() if name not in fixed}
    assert_received(plan, shape, layout, dict.fromkeys(range(rollout.workers), whole))


@settings(max_examples=100)
@given(st.data())
def test_boxes_of_workers_fill_their_parameters(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    rollout = data.draw(rollouts(shape))
    boxes = vllm_boxes(shape, rollout)
    for worker in range(rollout.workers):
        sizes = parameter_sizes(shape, rollout, worker)
        fill([box for box in boxes if box.rank == worker], sizes)
        assert not idle_parameters(shape, rollout, worker) & sizes.keys()


@settings(max_examples=200)
@given(st.integers(1, 200), st.integers(1, 16))
def test_stages_and_experts_are_split_as_vllm_splits_them(total: int, ranks: int) -> None:
    """vLLM's own functions say which layers a stage has and which experts a rank."""
    from vllm.distributed.utils import get_pp_indices
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    ranks = min(ranks, total)
    for rank in range(ranks):
        start, stop = get_pp_indices(total, rank, ranks)
        assert stage_layers(total, ranks, rank) == range(start, stop)
        count, places, _ = determine_expert_map(ranks, rank, total)
        held = list(range(total)) if places is None else [e for e in range(total) if places[e] >= 0]
        assert list(held_experts(total, ranks, rank)) == held and len(held) == count
        assert places is None or [int(places[expert]) for expert in held] == list(range(count))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_heads_of_critics_and_layers_for_several_tokens_are_in_no_plan(family: str) -> None:
    """A plan names the tensors of the decoder, whatever else the checkpoint or the trainer has."""
    shape = shape_of(family, num_nextn_predict_layers=1)
    plan = sync_plan(shape, Layout(pipeline=2), RolloutLayout())
    for name in (*plan.names, *plan.source_parameters, *plan.destination_parameters):
        assert not any(part in name for part in ("value_head", "score", "mtp", "nextn", "eh_proj", "enorm", "layers.4."))
    layers = {name.split(".")[2] for name in plan.names if name.startswith("model.layers.")}
    assert layers == {"0", "1", "2", "3"}


def test_the_replicas_share_the_sending() -> None:
    plan = sync_plan(shape_of("llama"), Layout(data=4), RolloutLayout())
    elements = np.bincount(plan.source_rank, plan.sizes, 4)
    assert max(elements) - min(elements) <= int(plan.sizes.max())


# DeepSeek-V3 with more experts and fewer heads.
KIMI_K2 = ModelShape.from_config(MODELS["unsloth/DeepSeek-V3-bf16"] | {
    "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840, "first_k_dense_replace": 1,
    "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
})  # fmt: skip


def test_a_model_of_a_trillion_weights_is_planned_like_a_small_one() -> None:
    """512 trainer ranks to engines of 32 workers. A worker needs 1/32 of the experts of 60 layers, 1/8 of what tensor ranks
    shard, and the rest; the ranks of a stage send the same, within a hundredth."""
    layout = Layout(8, 8, 8, expert=32, expert_tensor=1, stages=(7, 8, 8, 8, 8, 8, 7, 7))
    rollout = RolloutLayout(8, data=4, expert_parallel=True)
    boxes = vllm_columns(KIMI_K2, rollout, lambda weight: not weight.fixed)
    bound = np.bincount(boxes.rank, boxes.sizes)
    assert bound.min() == bound.max() > 60 * 12 * 3 * 2048 * 7168
    plan = sync_plan(KIMI_K2, layout, rollout)
    assert (np.bincount(plan.destination_rank, plan.sizes) == bound).all()
    stages = np.bincount(plan.source_rank, plan.sizes, layout.ranks).reshape(8, 64)
    assert (stages.max(axis=1) < 1.01 * stages.mean(axis=1)).all()


def test_what_cannot_be_planned_is_refused() -> None:
    box = Box("a", 0, 4, 0, 2, 0, "p", 0, 0)
    with pytest.raises(ValueError, match="only one end knows"):
        plan_reshard([box], [box._replace(name="b")])
    with pytest.raises(ValueError, match="only one end knows"):
        plan_reshard([box, box._replace(name="b")], [box])
    with pytest.raises(ValueError, match="held by no source"):
        plan_reshard([box], [box._replace(row1=5)])
    with pytest.raises(ValueError, match="overlap"):
        plan_reshard([box, box._replace(row0=2, row1=6)], [box])
