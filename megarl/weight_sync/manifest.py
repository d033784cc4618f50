"""The manifest of a weight version, which tells a rollout engine all that it must know to take it; the errors of a sync."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
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

    report_waits = 1  # how many times `timeout_s` rank 0 waits for an engine's report

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.files.values()))

    def check(self) -> None:
        """Check that the files are those that were sent as this version. Raises SyncError."""
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
    """Describes one version to the engines; plain types, so that it travels as JSON.

    `attempt` counts from 1 how often this version was sent. `engines` take part,
    each sharded as `rollout` says; `mode` is the recipe's. `precision` is the engine's; with `quantization` "fp8" linear
    weights travel as FP8 blocks.

    Each engine has a process group with the trainer ranks, over the store at `store` (host and port); by engine number,
    `groups` changes when the group must be made anew. With `transport` "mapped" the workers read the parameters of the
    trainer ranks at `addresses`, by rank. With "group" buckets travel, and `on_device` says that they lie in the memory of
    devices. `servers` are, by engine and worker, the trainer ranks that receive for the worker and hand the buckets over;
    without servers a worker receives from all ranks.

    With `wire` "delta" messages are differences to version `base`, which every receiver has; without a base they are whole.
    `by_layer` all workers take the first layer, then the second.
    """

    version: int
    attempt: int
    plan_hash: str
    layout: Layout
    rollout: RolloutLayout
    mode: str
    precision: str
    bucket_bytes: int
    timeout_s: float
    engines: tuple[int, ...]
    transport: str
    on_device: bool
    store: tuple[str, int]
    groups: tuple[int, ...]
    wire: str = "full"
    base: int | None = None
    quantization: str | None = None
    by_layer: bool = False
    addresses: tuple[str, ...] = ()
    servers: tuple[tuple[int, ...], ...] = ()

    def ranks_of(self, engine: int) -> Sequence[int]:
        """Return the trainer ranks in an engine's group: in two legs those that serve its workers, otherwise all."""
        return sorted(set(self.servers[engine])) if self.servers else range(self.layout.ranks)

    @property
    def worker_waits(self) -> int:
        """Return how many times `timeout_s` a worker waits for a trainer rank, which may itself wait for an engine, or in
        two legs for a rank that does."""
        return 3 if self.servers else 2

    @property
    def report_waits(self) -> int:
        """Return how many times `timeout_s` rank 0 waits for an engine's report, from the begin of the attempt."""
        return self.worker_waits + 1

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> WeightManifest:
        """Build a manifest from `as_dict`, also after JSON or msgpack, which turn tuples into lists."""
        values = _tuples(values)
        return cls(**values | {"layout": Layout(**values["layout"]), "rollout": RolloutLayout(**values["rollout"])})


def _tuples(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _tuples(value) for key, value in values.items()}
    return tuple(map(_tuples, values)) if isinstance(values, list) else values
