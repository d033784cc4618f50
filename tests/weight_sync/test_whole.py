"""In checkpoint mode every worker puts together the checkpoint that the trainer ranks hold in parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.megatron_weights import checkpoint_sizes
from megarl.models.vllm_weights import fixed_tensors
from megarl.weight_sync.copies import Box
from megarl.weight_sync.plan import ReshardPlan, checkpoint_plan
from megarl.weight_sync.read import whole_tensors
from megarl.weight_sync.stream import copy_order
from tests.rollout_cases import checkpoint, megatron_shards, save_model

pytestmark = pytest.mark.sync


def boxes_of(plan: ReshardPlan, shards: dict[int, dict[str, torch.Tensor]], worker: int) -> Iterator[Box]:
    """What a worker takes by a plan, in two pieces a box, the later rows first."""
    for copy in copy_order(plan, worker):
        source = shards[int(plan.source_rank[copy])][plan.source_parameters[plan.source_parameter[copy]]]
        row, col = int(plan.source_row[copy]), int(plan.source_col[copy])
        content = source[row : row + int(plan.rows[copy]), col : col + int(plan.cols[copy])]
        parameter = plan.destination_parameters[plan.destination_parameter[copy]]
        row, col, half = int(plan.destination_row[copy]), int(plan.destination_col[copy]), len(content) // 2
        yield Box(parameter, row + half, col, content[half:])
        if half:
            yield Box(parameter, row, col, content[:half])


@pytest.mark.parametrize(
    ("family", "tied", "layout"),
    [
        ("llama", True, Layout(2, 2, 2)),
        ("qwen2", False, Layout(4)),  # more tensor ranks than key-value heads
        ("qwen3_moe", False, Layout(tensor=2, data=2, expert=4, expert_tensor=1)),
        ("deepseek_v3", False, Layout(2, 2)),
        ("gemma3", True, Layout(1, 2)),
    ],
)
def test_every_worker_gets_the_checkpoint_that_the_trainer_ranks_hold(
    tmp_path: Path, family: str, tied: bool, layout: Layout
) -> None:
    model = save_model(tmp_path, family, tied, seed=0)
    shape, rollout = ModelShape.from_directory(model), RolloutLayout(tensor=2)
    plan, fixed = checkpoint_plan(shape, layout, rollout), fixed_tensors(shape)
    expected = {name: tensor for name, tensor in checkpoint(model).items() if name not in fixed}
    assert plan.hash == checkpoint_plan(shape, layout, rollout).hash
    for worker in range(rollout.workers):
        got = list(whole_tensors(boxes_of(plan, megatron_shards(model, layout), worker), checkpoint_sizes(shape)))
        assert len(got) == len(expected) and dict(got).keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in got)


def test_a_tensor_with_a_gap_is_not_given() -> None:
    boxes = [Box("whole", 0, 0, torch.ones(2, 3)), Box("gap", 0, 0, torch.ones(1, 3))]
    assert [name for name, _ in whole_tensors(boxes, {"whole": (2, 3), "gap": (2, 3)})] == ["whole"]
