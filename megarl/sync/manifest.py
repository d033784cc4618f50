"""What a rollout engine must know to take one version of the weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from megarl.family import ModelShape
from megarl.reshard.boxes import Layout, RolloutLayout, Segment
from megarl.reshard.megatron import megatron_segments
from megarl.reshard.plan import ReshardPlan, plan_reshard
from megarl.reshard.vllm import fixed_tensors, vllm_segments

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPES = {name: dtype for dtype, name in PRECISIONS.items()}


class SyncError(RuntimeError):
    """Weights that did not arrive as they were sent."""


@dataclass(frozen=True)
class WeightManifest:
    """One published version; plain types, so that it travels as JSON.

    `segments`, `checksums` and `num_bytes` have one entry for each destination (tensor rank of an engine).
    """

    version: int
    plan_hash: str
    tensor: int
    pipeline: int
    data: int
    virtual_pipeline: int
    context: int
    expert: int
    expert_tensor: int | None
    stages: tuple[int, ...]
    precision: str
    segments: tuple[str, ...]
    checksums: tuple[str, ...]
    num_bytes: tuple[int, ...]

    @property
    def layout(self) -> Layout:
        """The trainer layout that published."""
        return Layout(
            self.tensor,
            self.pipeline,
            self.data,
            virtual_pipeline=self.virtual_pipeline,
            context=self.context,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
            stages=self.stages,
        )

    @property
    def rollout_tensor(self) -> int:
        """Tensor ranks of an engine that can take this version."""
        return len(self.segments)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> WeightManifest:
        """Also takes what JSON or msgpack made of `as_dict` (lists for tuples)."""
        exact: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return cls(**exact)


def sync_plan(shape: ModelShape, layout: Layout, rollout_tensor: int) -> ReshardPlan:
    """The plan of a weight sync; both ends compute it and compare `plan.hash`."""
    fixed = fixed_tensors(shape)
    sources, destinations = trainer_sources(shape, layout), vllm_segments(shape, RolloutLayout(rollout_tensor))
    # Both ends of a plan must know the same tensors.
    moving = ([segment for segment in end if segment.name not in fixed] for end in (sources, destinations))
    return plan_reshard(*moving)


def trainer_sources(shape: ModelShape, layout: Layout) -> list[Segment]:
    """What the trainer ranks may send.

    Under a pipeline the last stage keeps a copy of a tied embedding; the first stage owns it, so it alone sends.
    """
    sources = megatron_segments(shape, layout)
    if not shape.tied:
        return sources
    # Of a virtual pipeline the name has its chunk before it.
    return [segment for segment in sources if not segment.parameter.endswith("output_layer.weight")]
