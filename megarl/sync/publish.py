"""The trainer's end: every rank writes its boxes into the shared memory of their destinations."""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megarl.family import ModelShape
from megarl.reshard.boxes import Layout
from megarl.reshard.megatron import megatron_segments
from megarl.sync.manifest import PRECISIONS, SyncError, WeightManifest, sync_plan
from megarl.sync.segment import SharedSegment, sweep
from megarl.sync.wire import WireLayout, box_checksum, destination_checksum


class WeightSync:
    """Publishes actor weights to rollout engines on the same machine. Every method is a collective over `group`.

    One segment for each tensor rank of an engine; all engines read the same segments. The last published version
    stays in them, so a restarted engine can take it again. Rank 0 owns them, so they are gone when it ends.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        rollout_tensor: int,
        dtype: torch.dtype,
        run_id: str,
        rank: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        """`rank` is the trainer rank; `group` a gloo group of all of them, None for a single rank without one.

        `dtype` is what engines compute in; weights are cast to it before they are written. Raises SyncError where
        ranks computed different plans or run on different machines, ValueError where shared memory is too small.
        """
        if (group is None) != (layout.ranks == 1):
            raise ValueError(f"a layout of {layout.ranks} ranks needs a group of as many")
        if dtype not in PRECISIONS:
            raise ValueError(f"weight sync in {dtype} is not supported; one of {list(PRECISIONS.values())} is")
        self._layout, self._rank, self._group, self._dtype = layout, rank, group, dtype
        self._plan = sync_plan(shape, layout, rollout_tensor)
        self._held = {s.parameter for s in megatron_segments(shape, layout) if s.rank == rank}
        self._wires = [WireLayout.of(self._plan, s, dtype.itemsize) for s in range(rollout_tensor)]
        names = self._agree_on_names(run_id)
        self._segments: list[SharedSegment] = []
        self._together("weight_sync: allocate shared memory", lambda: self._map_segments(names, owner=True))
        self._together("weight_sync: map shared memory", lambda: self._map_segments(names, owner=False))

    def publish(self, version: int, parameters: Mapping[str, torch.Tensor]) -> WeightManifest | None:
        """Write this rank's boxes of a new version; the manifest on rank 0, None on the others.

        `parameters` are all of the rank's own, by Megatron's local names. Engines must have taken the last version
        before rank 0 comes here. Raises SyncError, on every rank, naming the rank that failed and why.
        """
        # Nobody overwrites the last version before rank 0, which watches the engines, has come here.
        self._together("weight_sync: begin publish", lambda: self._check_names(parameters))
        self._together("weight_sync: write shards", lambda: self._write(parameters))
        if self._rank != 0:
            return None
        tables = [wire.checksums(s.data) for wire, s in zip(self._wires, self._segments, strict=True)]
        return WeightManifest(
            version=version,
            plan_hash=self._plan.hash,
            tensor=self._layout.tensor,
            pipeline=self._layout.pipeline,
            data=self._layout.data,
            virtual_pipeline=self._layout.virtual_pipeline,
            context=self._layout.context,
            expert=self._layout.expert,
            expert_tensor=self._layout.expert_tensor,
            stages=self._layout.stages,
            precision=PRECISIONS[self._dtype],
            segments=tuple(segment.name for segment in self._segments),
            checksums=tuple(destination_checksum(table, version) for table in tables),
            num_bytes=tuple(int(wire.sizes.sum()) for wire in self._wires),
        )

    def close(self) -> None:
        """Give the shared memory back. Not a collective: it also runs on the way out of a failure."""
        for segment in self._segments:
            segment.close()
        self._segments = []

    def _agree_on_names(self, run_id: str) -> list[str]:
        """Rank 0 chooses names that no other run has; everyone must be on its machine and have its plan."""
        mine: dict[str, Any] = {"names": None, "machine": _machine(), "plan": self._plan.hash}
        if self._rank == 0:
            unique = f"{run_id}-{os.getpid()}-{secrets.token_hex(4)}"
            mine["names"] = [f"{unique}-{s}" for s in range(len(self._wires))]
        everyone = self._gather(mine)
        for rank, other in enumerate(everyone):
            if other["plan"] != everyone[0]["plan"]:
                raise SyncError(f"weight_sync: rank {rank} computed another reshard plan than rank 0")
            if other["machine"] != everyone[0]["machine"]:
                raise SyncError(f"weight_sync.transport = shared_memory: rank {rank} is on another machine than rank 0")
        return everyone[0]["names"]

    def _map_segments(self, names: list[str], owner: bool) -> None:
        if owner != (self._rank == 0):
            return
        if owner:
            sweep()
        for name, wire in zip(names, self._wires, strict=True):
            self._segments.append(SharedSegment.create(name, wire.num_bytes) if owner else SharedSegment.open(name))

    def _check_names(self, parameters: Mapping[str, torch.Tensor]) -> None:
        odd = sorted(self._held ^ parameters.keys())
        if odd:
            raise ValueError(f"rank holds {len(self._held)} parameters, was given {len(parameters)}; differ in {odd[:5]}")

    @torch.no_grad()
    def _write(self, parameters: Mapping[str, torch.Tensor]) -> None:
        plan = self._plan
        for wire, segment in zip(self._wires, self._segments, strict=True):
            table = wire.checksums(segment.data)
            for position, copy in enumerate(wire.copies):
                if plan.source_rank[copy] != self._rank:
                    continue
                source = parameters[plan.source_parameters[plan.source_parameter[copy]]]
                source = source.view(source.shape[0], -1)  # a vector is one column
                row, col = int(plan.source_row[copy]), int(plan.source_col[copy])
                box = source[row : row + int(plan.rows[copy]), col : col + int(plan.cols[copy])]
                wire.matrix(segment.data, position, plan, self._dtype).copy_(box)
                table[position] = box_checksum(wire.box(segment.data, position))

    def _together(self, call: str, step: Any) -> None:
        """Run a step on every rank and wait for all; a failure of one is raised on every rank, naming it."""
        error: Exception | None = None
        try:
            step()
        except Exception as caught:  # raised below, once the others know
            error = caught
        failures = self._gather(None if error is None else f"{type(error).__name__}: {error}")
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise SyncError(f"{call} failed on rank {rank}: {failure}") from error

    def _gather(self, value: Any) -> list[Any]:
        """One object of each rank, in rank order; bounded by the group's timeout."""
        if self._group is None:
            return [value]
        everyone: list[Any] = [None] * self._layout.ranks
        dist.all_gather_object(everyone, value, group=self._group)
        return everyone


def _machine() -> str:
    """The same for processes that share memory: host name and boot, as containers may share neither."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{platform.node()} {boot.read().strip()} {os.stat('/dev/shm').st_dev}"
