"""Both sides of a whole model as columns. Apart from the tables' walks, which `megarl check` reads without numpy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from megarl.family import ModelShape, Weight
from megarl.reshard import megatron, vllm
from megarl.reshard.boxes import Layout, RolloutLayout
from megarl.reshard.columns import Boxes, Repeat, stack


def megatron_boxes(shape: ModelShape, layout: Layout, keep: Callable[[Weight], bool] = lambda weight: True) -> Boxes:
    """`megatron_segments` of a language model as columns, those of the weights to keep."""
    first = [
        layout.rank(t, 0, d, c) for d in range(layout.data) for c in range(layout.context) for t in range(layout.tensor)
    ]
    held = cache(lambda weight: Boxes.of(box for r in first for box in megatron.weight_segments(layout, r, "", "", weight)))
    return stack(
        [
            Repeat(held(weight), name_prefix, megatron.chunk_prefix(layout, chunk) + prefix, layout.rank(0, stage))
            for stage in range(layout.pipeline)
            for chunk in range(layout.virtual_pipeline)
            for name_prefix, prefix, weight in megatron.chunk_weights(shape, layout, stage, chunk, critic=False)
            if keep(weight)
        ]
    )


def vllm_boxes(shape: ModelShape, rollout: RolloutLayout, keep: Callable[[Weight], bool] = lambda weight: True) -> Boxes:
    """`vllm_segments` as columns, those of the weights to keep. Raises ValueError as that does."""
    vllm.check_layout(shape, rollout)
    first = [rollout.worker(t, 0, d) for d in range(rollout.data) for t in range(rollout.tensor)]
    held = cache(lambda weight: Boxes.of(box for w in first for box in vllm.weight_segments("", weight, rollout, w)))
    return stack(
        [
            Repeat(held(weight), prefix, prefix, rollout.worker(0, stage))
            for stage in range(rollout.pipeline)
            for prefix, weight in vllm.stage_weights(shape, rollout, stage)
            if keep(weight)
        ]
    )
