"""The manifest of one weight version: all that a rollout engine must know to take it. And the errors of a sync."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megarl.models.layout import Layout, RolloutLayout

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPES = {name: dtype for dtype, name in PRECISIONS.items()}


class SyncError(RuntimeError):
    """The weights did not arrive as they were sent."""


class SyncLate(SyncError, TimeoutError):
    """The weights, or an answer about them, did not come by a deadline; raised on every rank."""


class SyncAborted(SyncError):
    """The sync ended because another process failed; that process reports the cause."""


@dataclass(frozen=True)
class AdapterManifest:
    """The adapters of one version, for the engines with the given numbers: a PEFT directory as `files` by name, and the
    digest of version and files (`digest_of`)."""

    version: int
    engines: tuple[int, ...]
    timeout_s: float
    files: dict[str, bytes]
    digest: str

    @property
    def leaders(self) -> range:
        """By engine, the engine that receives for it: each for itself."""
        return range(max(self.engines) + 1)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.files.values()))

    def check(self) -> None:
        """Raises SyncError if the files are not those that were sent as this version."""
        if digest_of(self.version, self.files) != self.digest:
            raise SyncError(f"wrong bytes in the adapters of version {self.version}")


def digest_of(version: int, files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256(str(version).encode())
    for name, content in files.items():
        digest.update(f"{name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()


@dataclass(frozen=True)
class WeightManifest:
    """One version on its way; plain types, so that it travels as JSON.

    `attempt` counts from 1 how often this version was sent; `session` is new with each attempt of any version. `engines` of
    all `num_engines` take part, each sharded as `rollout` says; `mode`, `transport` and `verify` are the recipe's. `rings`
    names the buckets of each worker number in shared memory. `precision` is the engine's; with `quantization` "fp8" linear
    weights travel as FP8 blocks.

    Point-to-point, engines meet the trainer ranks over the store at `store` (host and port). By engine number, `leaders` is
    the engine of the same node that receives for it, and `meetings` a number that changes when the engine has to meet the
    ranks again. With `wire` "delta" messages are differences to version `base`, which every leading engine has; without a
    base they are whole.

    Weights travel in `orders` orders, each to its own engine, or in one order to all. Within an order the workers of an
    engine begin with different layers; `by_layer`, which needs one order, all workers take the first layer, then the second.

    `homes` says by trainer rank where its parameters are read in place (`in_place.share`); without, they come in buckets.
    """

    version: int
    attempt: int
    session: int
    plan_hash: str
    layout: Layout
    rollout: RolloutLayout
    mode: str
    precision: str
    bucket_bytes: int
    timeout_s: float
    rings: tuple[str, ...]
    engines: tuple[int, ...]
    num_engines: int
    transport: str
    verify: str
    store: tuple[str, int]
    leaders: tuple[int, ...]
    meetings: tuple[int, ...]
    wire: str
    base: int | None
    quantization: str | None
    homes: tuple[str, ...] = ()
    orders: int = 1
    by_layer: bool = False

    @property
    def leading(self) -> tuple[int, ...]:
        """Engines that receive from the trainer ranks directly."""
        return tuple(sorted({self.leaders[engine] for engine in self.engines}))

    @property
    def followers(self) -> dict[int, tuple[int, ...]]:
        """By leading engine, the other engines that read what it receives."""
        return {
            leader: tuple(engine for engine in self.engines if self.leaders[engine] == leader != engine)
            for leader in self.leading
        }

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> WeightManifest:
        """Build a manifest from `as_dict`, also after JSON or msgpack, which turn tuples into lists."""
        layout, rollout = Layout(**_tuples(values["layout"])), RolloutLayout(**values["rollout"])
        return cls(**_tuples(values) | {"layout": layout, "rollout": rollout})


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
