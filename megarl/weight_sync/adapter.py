"""The trainer's end of a sync with `actor.lora.send: adapter`: each engine gets a version as one small object.

Engines load the base model from `model.path` at their start and keep it, so no rank sends or gathers a weight of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megarl.megatron.export import Factors, adapter_factors, peft_files, peft_tensors
from megarl.megatron.lora import MergedShards
from megarl.models import ModelShape
from megarl.models.layout import Layout
from megarl.recipe import Recipe
from megarl.telemetry.clock import span
from megarl.weight_sync.manifest import AdapterManifest, digest_of
from megarl.weight_sync.publish import SyncedEngines, from_first


class AdapterSync:
    """Sends the actor's adapters to the rollout engines. `publish` is a collective of the trainer ranks."""

    def __init__(
        self, recipe: Recipe, shape: ModelShape, layout: Layout, rank: int, group: dist.ProcessGroup | None
    ) -> None:
        """`recipe` has `sent_adapter`; `rank` is the trainer rank; `group` a gloo group of all ranks, None for one rank."""
        self._recipe, self._shape, self._layout, self._rank, self._group = recipe, shape, layout, rank, group

    def publish(
        self,
        version: int,
        parameters: Mapping[str, torch.Tensor],
        engines: SyncedEngines[AdapterManifest] | None = None,
        chosen: Sequence[int] | None = None,
    ) -> dict[str, float]:
        """Send a version to all engines, or to the `chosen` engines of rank 0; as `WeightSync.publish`.

        `parameters` are `Role.shards()`, of which only the adapters are read."""
        assert isinstance(parameters, MergedShards), "a model with adapters"
        recipe, begun = self._recipe, time.perf_counter()
        every = tuple(range(recipe.rollout.engines) if chosen is None else chosen)
        if engines is not None:
            engines.ask(version, every)
        _, _, data_rank, context_rank = self._layout.coordinates(self._rank)
        # Of replicas only one rank sends its factors.
        factors = adapter_factors(parameters.adapters) if data_rank == context_rank == 0 else {}
        gathered: list[Factors] = [factors] * self._layout.ranks  # by rank, on rank 0
        if self._group is not None:
            with span("wait_ranks"):
                dist.gather_object(factors, gathered if self._rank == 0 else None, dst=0, group=self._group)

        def send() -> dict[str, float]:
            """On rank 0, send the version until every engine has verified and applied it; return the metrics."""
            lora, wanted = recipe.sent_adapter, every
            assert lora is not None and engines is not None, "rank 0 has engines, and the recipe's syncs send adapters"
            files = peft_files(peft_tensors(self._shape, self._layout, gathered), lora, recipe.model.path)
            pack_s, digest = time.perf_counter() - begun, digest_of(version, files)
            metrics: dict[str, float] = {}
            sent_bytes = attempt = 0
            while wanted:
                attempt += 1
                starts = engines.pause(version, attempt, wanted)
                wanted = tuple(engine for engine in wanted if starts[engine] >= 0)  # others are lost for good
                manifest = AdapterManifest(version, wanted, recipe.weight_sync.timeout_s, files, digest)
                engines.begin(manifest)
                sent_bytes += manifest.num_bytes * len(wanted)
                wanted, metrics = engines.finish()
            metrics |= {"sync/sent_bytes": sent_bytes, "sync/attempts": attempt, "sync/mapped": 0.0}
            return metrics | {"sync/pack_s": pack_s, "sync/total_s": time.perf_counter() - begun}

        return from_first(send, self._rank, self._group)

    def close(self) -> None:
        """Do nothing: nothing is open between two syncs."""
