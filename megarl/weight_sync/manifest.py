"""How weights travel; the manifest of a version, which tells an engine all that it must know to take it; a sync's errors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from pydantic import TypeAdapter

from megarl.models.layout import Layout, RolloutLayout

# How many times `weight_sync.timeout_s` each end waits, counted from the begin of an attempt. An end must wait longer for a
# process that may itself be waiting. Otherwise both give up at the same time, and the error names the wrong process.
RANK_WAITS = 2  # a trainer rank for another rank, in two legs; for an engine it waits once
REPORT_WAITS = 4  # rank 0 at most for an engine's report (`WeightManifest.report_waits`)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
class SyncSettings:
    """How weights travel to at most `num_engines` engines, each sharded as `rollout` says and computing in `precision`.

    With `transport` "mapped" the workers read the parameters of the trainer ranks; it may become "group" where shared memory
    is too small, unless it `is_final`. With "group" buckets travel, and `on_device` says that they lie in the memory of
    devices. `servers` are, by engine and worker, the trainer ranks that receive for the worker and hand the buckets over;
    without servers a worker receives from all ranks. With `wire` "delta" messages are differences to an older version. With
    `quantization` "fp8" linear weights travel as FP8 blocks.
    """

    precision: str
    rollout: RolloutLayout
    num_engines: int
    bucket_bytes: int
    timeout_s: float
    mode: str = "reshard"  # or "checkpoint"
    transport: str = "mapped"  # or "group"
    is_final: bool = True
    on_device: bool = False
    servers: tuple[tuple[int, ...], ...] = ()
    host: str = "127.0.0.1"  # of rank 0, as engines reach it
    wire: str = "full"  # or "delta", with transport "group"
    quantization: str | None = None  # or "fp8", with mode "reshard" and transport "group"
    merges: bool = False  # adapters are merged into weights while these are sent

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype to which weights are cast."""
        return DTYPES[self.precision]

    @property
    def by_layer(self) -> bool:
        """Return whether all workers take the first layer, then the second."""
        return self.merges or self.mode == "checkpoint"


@dataclass(frozen=True, kw_only=True)
class WeightManifest(SyncSettings):
    """Describes one version to the engines; plain types, so that it travels as JSON.

    `attempt` counts from 1 how often this version was sent, to the given `engines`. Each engine has a process group with the
    trainer ranks, over the store at `port` of `host`; by engine number, `groups` changes when the group must be made anew.
    `addresses` are, by rank, those of mapped parameters, or those of the servers' buckets by engine and worker. With `wire`
    "delta" messages are differences to version `base`, which every receiver has; without a base they are whole.
    """

    version: int
    attempt: int
    plan_hash: str
    layout: Layout
    engines: tuple[int, ...]
    port: int
    groups: tuple[int, ...]
    base: int | None = None
    addresses: tuple[str, ...] = ()

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
        return _MANIFESTS.validate_python(values)


_MANIFESTS = TypeAdapter(WeightManifest)
