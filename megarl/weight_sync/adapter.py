"""The trainer's end of a sync with `actor.lora.send: adapter`: each engine gets a version as one small object.

Engines load the base model from `model.path` at their start and keep it, so no rank sends or gathers a weight of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megarl.megatron.export import Factors, adapter_factors, peft_files, peft_tensors
from megarl.megatron.lora import MergedShards
from megarl.models import ModelShape
from megarl.models.layout import Layout
from megarl.recipe.role_sections import LoraSection
from megarl.telemetry.clock import span
from megarl.weight_sync.manifest import AdapterManifest, SyncError, SyncLate, WeightManifest, digest_of
from megarl.weight_sync.publish import Engines


class AdapterEngines(Engines, Protocol):
    """The engines, seen from rank 0."""

    def begin(self, manifest: WeightManifest | AdapterManifest) -> None:
        """As `Engines.begin`."""


class AdapterSync:
    """Sends the actor's adapters to the rollout engines. `publish` is a collective of the trainer ranks."""

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        lora: LoraSection,
        base: str,
        num_engines: int,
        timeout_s: float,
        rank: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        """`base` names the base model; `rank` is the trainer rank; `group` a gloo group of all ranks, None for a single
        rank."""
        self._shape, self._layout, self._lora, self._base = shape, layout, lora, base
        self._num_engines, self._timeout_s, self._rank, self._group = num_engines, timeout_s, rank, group

    def publish(
        self,
        version: int,
        parameters: Mapping[str, torch.Tensor],
        engines: AdapterEngines | None = None,
        chosen: Sequence[int] | None = None,
    ) -> dict[str, float]:
        """Send a version to all engines, or to the `chosen` engines of rank 0; as `WeightSync.publish`.

        `parameters` are `Role.shards()`, of which only the adapters are read."""
        assert isinstance(parameters, MergedShards), "a model with adapters"
        begun, wanted = time.perf_counter(), tuple(range(self._num_engines) if chosen is None else chosen)
        if engines is not None:
            engines.ask(version, wanted)
        factors = self._gather(adapter_factors(parameters.adapters) if self._holds_first_copy() else {})
        outcome: list[Any] = [{}, None, False]  # metrics; the error message, and whether a deadline has passed
        error: Exception | None = None
        with span("wait_engines"):  # rank 0 waits for engines, and the other ranks for rank 0
            if engines is not None:
                try:
                    files = peft_files(peft_tensors(self._shape, self._layout, factors), self._lora, self._base)
                    pack_s = time.perf_counter() - begun
                    outcome[0] = self._send(version, files, engines, wanted)
                    outcome[0] |= {"sync/pack_s": pack_s, "sync/total_s": time.perf_counter() - begun}
                except Exception as caught:  # raised below, once the other ranks know
                    error = caught
                    outcome[1:] = f"{type(caught).__name__}: {caught}", isinstance(caught, TimeoutError)
            if self._group is not None:
                dist.broadcast_object_list(outcome, src=0, group=self._group)
        if error is not None:
            raise error
        if outcome[1] is not None:
            raise (SyncLate if outcome[2] else SyncError)(f"weight_sync ended on rank 0: {outcome[1]}")
        metrics: dict[str, float] = outcome[0]
        return metrics

    def close(self) -> None:
        """Nothing is open between two syncs."""

    def _holds_first_copy(self) -> bool:
        """Whether this rank is the first of those that hold the same shards."""
        _, _, data_rank, context_rank = self._layout.coordinates(self._rank)
        return data_rank == context_rank == 0

    def _gather(self, factors: Factors) -> list[Factors]:
        """Return the factors of every rank on rank 0, in rank order, and nothing on other ranks."""
        if self._group is None:
            return [factors]
        everyone: list[Any] | None = [None] * self._layout.ranks if self._rank == 0 else None
        with span("wait_ranks"):
            dist.gather_object(factors, everyone, dst=0, group=self._group)
        return everyone or []

    def _send(
        self, version: int, files: dict[str, bytes], engines: AdapterEngines, wanted: tuple[int, ...]
    ) -> dict[str, float]:
        """On rank 0, send the files until every engine has verified and applied them; returns the metrics."""
        metrics: dict[str, float] = {}
        sent_bytes = attempt = 0
        digest = digest_of(version, files)
        while wanted:
            attempt += 1
            facts = engines.pause(version, attempt, wanted)
            manifest = AdapterManifest(version, wanted, self._timeout_s, files, digest)
            engines.begin(manifest)
            sent_bytes += manifest.num_bytes * len({facts[engine].node for engine in wanted})
            wanted, metrics = engines.finish()
        return metrics | {"sync/sent_bytes": sent_bytes, "sync/attempts": attempt, "sync/in_place": 0.0}
