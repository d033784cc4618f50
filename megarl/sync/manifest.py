"""What a rollout engine must know to take one version of the weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from megarl.reshard.boxes import Layout, RolloutLayout

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPES = {name: dtype for dtype, name in PRECISIONS.items()}


class SyncError(RuntimeError):
    """Weights that did not arrive as they were sent."""


class SyncAborted(SyncError):
    """A sync that ended because another process failed; what happened is said by that one."""


@dataclass(frozen=True)
class WeightManifest:
    """One version on its way; plain types, so that it travels as JSON.

    `attempt` counts, from 1, how often it was sent; `session` is new with each attempt of any version. `engines` take part
    in it, of `num_engines` in all, each cut as `rollout` says; `rings` has the transport's name for the stream of each
    worker number. Checksums travel with the bytes.
    """

    version: int
    attempt: int
    session: int
    plan_hash: str
    layout: Layout
    rollout: RolloutLayout
    precision: str
    bucket_bytes: int
    timeout_s: float
    rings: tuple[str, ...]
    engines: tuple[int, ...]
    num_engines: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> WeightManifest:
        """Also takes what JSON or msgpack made of `as_dict` (lists for tuples)."""
        layout, rollout = Layout(**_tuples(values["layout"])), RolloutLayout(**values["rollout"])
        return cls(**_tuples(values) | {"layout": layout, "rollout": rollout})


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
