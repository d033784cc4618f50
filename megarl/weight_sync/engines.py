"""The plans of a weight sync: what each of several engines that are alike gets from which trainer ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from megarl.models import ModelShape, Weight
from megarl.models.layout import Layout, RolloutLayout, Segment
from megarl.models.megatron_weights import checkpoint_sizes
from megarl.models.vllm_weights import fixed_tensors
from megarl.models.weight_table import head
from megarl.weight_sync.columns import Boxes
from megarl.weight_sync.match import Match, match_boxes
from megarl.weight_sync.plan import ReshardPlan, plan_match, plan_reshard
from megarl.weight_sync.sides import megatron_boxes, vllm_boxes


def engine_plan(
    shape: ModelShape,
    layout: Layout,
    rollout: RolloutLayout,
    engine: int = 0,
    source_nodes: Sequence[int] | None = None,
    worker_nodes: Sequence[int] | None = None,
) -> ReshardPlan:
    """The plan of one engine by its number; the trainer's ranks and the engine's workers compute the same.

    `source_nodes` [trainer ranks] and `worker_nodes` [workers of this engine] number the machines, None for no preference.
    No engine's plan depends on another engine. Raises ValueError for a rollout layout that does not cut the model.
    """
    return plan_match(engine_match(shape, layout, rollout), source_nodes, worker_nodes, turn=engine)


# All engines of a run have the same one; a second is there while a test or a benchmark compares two.
@lru_cache(maxsize=2)
def engine_match(shape: ModelShape, layout: Layout, rollout: RolloutLayout) -> Match:
    """What the plans of all engines have in common: everything but who sends.

    Left out are the tensors that no update moves, and what no engine has: a critic's value head takes the place of a head
    that this is never asked for, and layers for multi-token prediction are in no weight table.
    """
    return match_boxes(sent_boxes(shape, layout), vllm_boxes(shape, rollout, lambda weight: not weight.fixed))


def checkpoint_plan(shape: ModelShape, layout: Layout, rollout: RolloutLayout) -> ReshardPlan:
    """The plan of checkpoint mode: every worker gets all of every tensor, in a parameter of the checkpoint's own name.

    It asks nothing of vLLM's parameters, and moves the whole model to each worker.
    """
    fixed = fixed_tensors(shape)
    wholes = [
        Segment(name, 0, rows, 0, columns, worker, name, 0, 0)
        for worker in range(rollout.workers)
        for name, (rows, columns) in checkpoint_sizes(shape).items()
        if name not in fixed
    ]
    return plan_reshard(sent_boxes(shape, layout), wholes)


def sent_boxes(shape: ModelShape, layout: Layout) -> Boxes:
    """What trainer ranks may send: no tensor that no update moves. Under a pipeline the last stage keeps a copy of a tied
    embedding; the first stage owns it, so it alone sends."""

    def is_sent(weight: Weight) -> bool:
        copied = shape.tied and weight.megatron.parameter == head(shape).megatron.parameter
        return not weight.fixed and not copied

    return megatron_boxes(shape, layout, is_sent)
