"""Both sides of a whole model as columns. Apart from the tables' walks, which `megarl check` reads without numpy."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache

import numpy as np

from megarl.models import ModelShape, Weight
from megarl.models import megatron_weights as megatron
from megarl.models import vllm_weights as vllm
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.quantised_blocks import block_bytes
from megarl.weight_sync.columns import Boxes, Repeat, stack


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


def shard_bytes(shape: ModelShape, rollout: RolloutLayout, itemsize: int, quantised: Collection[str] = ()) -> int:
    """Bytes of what all workers of an engine hold of the weights that updates move: the least that bring it a version,
    whatever a plan sends. `itemsize` is bytes of an element, but for the tensors that are `quantised` to FP8 blocks. Raises
    ValueError as `vllm_boxes` does."""
    boxes = vllm_boxes(shape, rollout, lambda weight: not weight.fixed)
    in_blocks = np.isin(boxes.name, [number for number, name in enumerate(boxes.names) if name in quantised])
    sizes = np.stack([in_blocks, boxes.row1 - boxes.row0, boxes.col1 - boxes.col0])
    kinds, counts = np.unique(sizes, axis=1, return_counts=True)
    return sum(
        count * (block_bytes(rows, cols) if blocks else itemsize * rows * cols)
        for (blocks, rows, cols), count in zip(kinds.T.tolist(), counts.tolist(), strict=True)
    )
