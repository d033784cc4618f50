"""The trainer's end of a sync: every rank lets workers map its parameters, or sends its parts of the buckets."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megarl.models import ModelShape
from megarl.models.layout import Layout
from megarl.models.megatron_weights import parameter_sizes
from megarl.models.quantised_blocks import quantised_tensors
from megarl.models.vllm_weights import has_weight_map
from megarl.platform import current as device
from megarl.telemetry.clock import span
from megarl.weight_sync.boxes import shard_bytes
from megarl.weight_sync.buckets import ALIGNMENT, LocalBox, sync_rounds, sync_stream
from megarl.weight_sync.checks import CHECKSUM_BYTES, checksum
from megarl.weight_sync.codec import blocks_in, quantise_blocks
from megarl.weight_sync.group import BucketSender, EngineGroups, open_store, present_engines
from megarl.weight_sync.manifest import SyncAborted, SyncError, SyncLate, SyncSettings, WeightManifest
from megarl.weight_sync.mapped import local_checksums, needs_of, obstacle_of, share
from megarl.weight_sync.plan import sync_plan

logger = logging.getLogger(__name__)
Value = TypeVar("Value")
Manifest = TypeVar("Manifest", contravariant=True)


class Sent(NamedTuple):
    """What a rank did in one attempt: engines that it gave up with the reasons, seconds without waits, bytes with checksums;
    where differences travel, also how many of all content bytes changed."""

    lost: dict[int, str]
    pack_s: float
    sent_bytes: int
    changed_bytes: int = 0
    content_bytes: int = 0


class SyncedEngines(Protocol[Manifest]):
    """The engines, seen from rank 0."""

    def ask(self, version: int, engines: Sequence[int]) -> None:
        """Ask some engines to pause for the first attempt at a version; does not wait."""

    def pause(self, version: int, attempt: int, engines: Sequence[int]) -> Sequence[int]:
        """Pause some engines for a version, unless they were asked already, and wait. Return for all engines how often each
        was started, -1 for an engine that is lost for good."""

    def begin(self, manifest: Manifest) -> None:
        """Have the manifest's engines start to receive; does not wait."""

    def finish(self) -> tuple[tuple[int, ...], dict[str, float]]:
        """Wait for all. Return the engines that need another attempt and are ready for it, and the metrics of the others."""


class WeightSync:
    """Sends actor weights to rollout engines. Every method but `close` is a collective of the trainer ranks.

    No version is kept: an engine that missed a version gets the weights again. Rank 0 owns the store through which
    processes join groups; it ends with rank 0.
    """

    def __init__(
        self, shape: ModelShape, layout: Layout, settings: SyncSettings, rank: int, group: dist.ProcessGroup | None
    ) -> None:
        """`rank` is the trainer rank; `group` a gloo group of all ranks, None for a single rank.

        Raises SyncError where ranks computed different plans, ValueError where a bucket is too small.
        """
        self._shape, self._layout, self._rank, self._group, self._settings = shape, layout, rank, group, settings
        self._plan = plan = sync_plan(shape, layout, settings.rollout, settings.mode)
        self._names = set(parameter_sizes(shape, layout, rank))
        # Bytes of one engine; None if no table lists what its workers hold.
        element_bytes, quantised = settings.dtype.itemsize, quantised_tensors(shape) if settings.quantization else {}
        self._shard_bytes = shard_bytes(shape, settings.rollout, element_bytes, quantised) if has_weight_map(shape) else None
        self._group_numbers = count(1)  # of all engines
        self._starts, self._groups_of = [0] * settings.num_engines, [0] * settings.num_engines
        # For `wire: delta`: the version whose bytes all ranks keep, and the version that each engine keeps.
        self._base: int | None = None
        self._kept: dict[int, int] = {}
        self._sender: BucketSender | None = None
        store = open_store(settings.host, 0, settings.timeout_s, owner=True) if rank == 0 else None
        hashes, ports = zip(*self._gather((plan.hash, store.port if store else 0)), strict=True)
        if (other := next((rank for rank, value in enumerate(hashes) if value != hashes[0]), None)) is not None:
            raise SyncError(f"weight_sync: rank {other} computed another reshard plan than rank 0")
        self._port = ports[0]
        self._store = store or open_store(settings.host, ports[0], settings.timeout_s, owner=False)
        self._groups = EngineGroups(self._store, rank)
        self._prepare()

    def publish(
        self,
        version: int,
        parameters: Mapping[str, torch.Tensor],
        engines: SyncedEngines[WeightManifest] | None = None,
        chosen: Sequence[int] | None = None,
    ) -> dict[str, float]:
        """Send a version to all engines, or to the `chosen` engines of rank 0; return the `sync/...` metrics on every rank.

        `parameters` are all parameters of this rank by Megatron's local names; only rank 0 has `engines`. Engines that died
        or took wrong bytes get further attempts, as often as `engines` asks for them. Raises SyncError on every rank, naming
        the rank or the engine that failed and why; rank 0 raises what `engines` raised.
        """
        self._engines, self._begun = engines, time.perf_counter()
        wanted = every = tuple(range(self._settings.num_engines)) if chosen is None else tuple(chosen)
        self._share(version, parameters, every)
        metrics: dict[str, float] = {}
        done: list[Sent] = []
        pack_s, attempt = 0.0, 0
        while wanted:
            attempt += 1
            manifest, present = self._from_first(partial(self._begin, version, attempt, wanted))
            every = manifest.engines if attempt == 1 else every
            if not manifest.engines:  # those that needed another attempt are lost
                break
            try:
                with span("send"):
                    sent = self._together("weight_sync: send", partial(self._send, manifest, present, parameters))
            except SyncError:
                self.close()  # every end leaves its groups
                raise
            pack_s += max(of_rank.pack_s for of_rank in sent)
            done += sent
            wanted, metrics = self._from_first(partial(self._finish, manifest, sent))
        if self._settings.wire == "delta":
            content_bytes = sum(of_rank.content_bytes for of_rank in done)
            metrics["sync/changed_share"] = sum(of_rank.changed_bytes for of_rank in done) / max(1, content_bytes)
        if self._shard_bytes is not None:
            metrics["sync/bound_bytes"] = len(every) * self._shard_bytes
        return metrics | {
            "sync/sent_bytes": sum(of_rank.sent_bytes for of_rank in done),
            "sync/pack_s": pack_s,
            "sync/attempts": attempt,
            "sync/mapped": float(self._settings.transport == "mapped"),
        }

    def close(self) -> None:
        """Leave all groups; the next sync joins new groups. Not a collective, because it also runs after a failure."""
        self._groups.leave_all()
        self._groups_of = [0] * len(self._groups_of)
        if self._sender is not None:
            self._sender.abort()

    def _prepare(self) -> None:
        """Cut what this rank sends into pieces, and make buckets for them unless they are mapped. Collective."""
        self._addresses: tuple[str, ...] = ()
        settings, plan = self._settings, self._plan
        self._streams = [sync_stream(self._shape, plan, worker, settings) for worker in range(settings.rollout.workers)]
        # By worker.
        self._pieces = [s.at_source(plan, np.flatnonzero(s.source == self._rank)) for s in self._streams]
        # Where they are mapped, the rows and columns of this rank's parameters that workers need.
        self._mapped: dict[str, tuple[int, int]] = {}
        if settings.transport == "mapped":
            for _, box, *_ in chain.from_iterable(self._pieces):
                rows, cols = self._mapped.get(box.parameter, (0, 0))
                self._mapped[box.parameter] = max(rows, box.row + box.rows), max(cols, box.col + box.cols)
            return
        self._rounds = sync_rounds(plan, self._streams, settings.by_layer)
        self._sender = BucketSender(self._streams, self._rounds, self._rank, self._groups, self._store, settings)
        handles = [(place, hand_over.handle) for place, hand_over in self._sender.served.items()]
        self._addresses = tuple(handle for _, handle in sorted(chain.from_iterable(self._gather(handles))))

    def _share(self, version: int, parameters: Mapping[str, torch.Tensor], engines: Sequence[int]) -> None:
        """Ask the engines to pause. While they do, compare this rank's parameters with the plan, and share them if workers
        map them."""

        def begin() -> tuple[int, int]:
            """Return what this rank needs before its parameters can be mapped."""
            if self._engines is not None:
                self._engines.ask(version, engines)
            if differing := sorted(self._names ^ parameters.keys()):
                raise ValueError(f"this rank's parameters are not those of the plan; {differing[:5]} differ")
            device.settle()  # the update has written the weights
            for name, (rows, cols) in self._mapped.items():
                LocalBox(name, 0, 0, rows, cols, self._settings.dtype).within(parameters[name])  # raises if it is smaller
            return needs_of(parameters, list(self._mapped))

        needs = self._together("weight_sync: begin", begin)
        if self._settings.transport != "mapped":
            return
        obstacle = self._from_first(lambda: obstacle_of(needs)) if any(num_bytes for num_bytes, _ in needs) else None
        if obstacle is None:
            self._addresses = tuple(self._together("weight_sync: share", lambda: share(parameters, list(self._mapped))))
        elif self._settings.is_final:
            raise SyncError(f"weight_sync.transport = mapped: {obstacle}; raise the limit, or use group")
        else:
            if self._rank == 0:
                logger.warning("weight_sync.transport = auto takes group, because %s", obstacle)
            self._settings = replace(self._settings, transport="group")
            self._prepare()

    def _begin(self, version: int, attempt: int, wanted: tuple[int, ...]) -> tuple[WeightManifest, list[int]]:
        """On rank 0, begin the next attempt: have the engines receive; return the engines that join new groups."""
        assert self._engines is not None, "rank 0 has engines"
        starts = self._engines.pause(version, attempt, wanted)
        wanted = tuple(engine for engine in wanted if starts[engine] >= 0)
        new = [engine for engine in wanted if not self._groups_of[engine] or starts[engine] != self._starts[engine]]
        for engine in new:
            self._groups_of[engine] = next(self._group_numbers)
        # Until this attempt has ended no version counts as kept. After a failed attempt a version travels whole.
        bases = {self._kept.pop(engine, None) if starts[engine] == self._starts[engine] else None for engine in wanted}
        base, self._base = self._base if attempt == 1 and bases == {self._base} else None, None
        for engine in wanted:
            self._starts[engine] = starts[engine]
        settings = self._settings
        manifest = WeightManifest(
            **vars(settings) | {"servers": settings.servers if settings.transport == "group" else ()},
            version=version,
            attempt=attempt,
            plan_hash=self._plan.hash,
            layout=self._layout,
            engines=wanted,
            port=self._port,
            groups=tuple(self._groups_of),
            base=base,
            addresses=self._addresses,
        )
        self._engines.begin(manifest)
        return manifest, present_engines(self._store, manifest, new)

    def _finish(self, manifest: WeightManifest, sent: Sequence[Sent]) -> tuple[tuple[int, ...], dict[str, float]]:
        """On rank 0, wait for the engines; return the engines that need another attempt, and the metrics."""
        lost = [(rank, engine, why) for rank, of_rank in enumerate(sent) for engine, why in of_rank.lost.items()]
        again: Sequence[int] = manifest.engines
        assert self._engines is not None, "rank 0 has engines"
        try:
            again, metrics = self._engines.finish()
        except Exception as error:  # raised again
            for rank, engine, why in lost:
                error.add_note(f"trainer rank {rank} gave up engine {engine}: {why}")
            raise
        finally:
            for engine in {*again, *(engine for _, engine, _ in lost)}:
                self._groups_of[engine] = 0  # it has left its group
        self._base = manifest.version
        self._kept |= {engine: manifest.version for engine in manifest.engines if engine not in again}
        metrics["sync/total_s"] = time.perf_counter() - self._begun
        return tuple(again), metrics

    def _send(self, manifest: WeightManifest, present: Sequence[int], parameters: Mapping[str, torch.Tensor]) -> Sent:
        """Give this rank's boxes to the engines."""
        try:
            self._groups.begin(manifest, present)
            send = self._confirm if manifest.transport == "mapped" else self._send_buckets
            return Sent(self._groups.lost, *send(manifest, parameters))
        except BaseException:  # SystemExit too, since engines wait for this rank; raised again
            self.close()
            raise

    def _confirm(self, manifest: WeightManifest, parameters: Mapping[str, torch.Tensor]) -> tuple[float, int]:
        """Once all workers have copied what they need from this rank, compute the checksums of what it holds, and send them
        to the workers. Return seconds, and bytes that the workers took. The checksums come last, so that they detect a
        weight that was written during the copy."""
        groups = self._groups
        places = [(engine, worker) for engine in manifest.engines for worker, pieces in enumerate(self._pieces) if pieces]
        what = "worker {1} of engine {0} did not copy the weights"
        copied = [groups.start("receive", *place, torch.zeros(1).long(), what.format(*place)) for place in places]
        with span("wait_engines"):
            takers = [place for place, message in zip(places, copied, strict=True) if groups.finish(message)]
        begun = time.perf_counter()
        sums = {
            worker: local_checksums(parameters, self._pieces[worker], manifest.version)
            for worker in {worker for _, worker in takers}
        }
        pack_s = time.perf_counter() - begun
        messages = [groups.start("send", *place, sums[place[1]], f"checksums to worker {place[1]}") for place in takers]
        with span("wait_engines"):
            for message in messages:
                groups.finish(message)
        num_bytes = sum(p.end - p.start + CHECKSUM_BYTES for _, worker in takers for p in self._pieces[worker])
        return pack_s, num_bytes

    @torch.no_grad()
    def _send_buckets(self, manifest: WeightManifest, parameters: Mapping[str, torch.Tensor]) -> tuple[float, int, int, int]:
        """Write and send all parts of this rank, round after round; return the fields of `Sent` after `lost`."""
        pack_s, sender, dtype = 0.0, self._sender, self._settings.dtype
        assert sender is not None, "the transport group has a sender"
        # Each access may compute a parameter (adapters are merged into it). So each parameter is accessed once, and kept
        # until its last piece is written.
        kept: dict[str, torch.Tensor] = {}
        missing = Counter(piece.box.parameter for piece in chain.from_iterable(self._pieces))
        sender.begin(manifest)
        for entries in self._rounds:
            with span("wait_engines"):
                written = sender.room(entries)
            begun = time.perf_counter()
            for bucket, number, part, content in written:
                for piece in self._streams[number].at_source(self._plan, part.pieces):
                    name, target = piece.box.parameter, content[piece.start - part.start : piece.end - part.start]
                    if name not in kept:
                        kept[name] = parameters[name]
                    source = piece.box.within(kept[name])
                    if piece.scale_bytes:
                        blocks, place = quantise_blocks(source.to(dtype)), blocks_in(target, *source.shape)
                        place.weight.copy_(blocks.weight)
                        place.weight_scale_inv.copy_(blocks.weight_scale_inv)
                    else:
                        target.view(dtype).view_as(source).copy_(source)
                    missing[name] -= 1
                    if not missing[name]:
                        del kept[name], source
                content[-ALIGNMENT:].view(torch.int64)[0] = checksum(content[:-ALIGNMENT], manifest.version, bucket)
            pack_s += time.perf_counter() - begun
            with span("wait_engines"):
                sender.send(entries, written)
        with span("wait_engines"):
            sender.finish()
        return pack_s, sender.sent_bytes, *sender.changed

    def _together(self, call: str, step: Callable[[], Value]) -> list[Value]:
        """Run a step on every rank and wait for all; return the results in rank order. A failure is raised on every rank and
        names the first rank that did not fail because of another process."""
        value, failure, error = outcome_of(step)
        answers = self._gather((value, failure))
        failures = [(rank, failure) for rank, (_, failure) in enumerate(answers) if failure is not None]
        if failures:
            rank, failure = min(failures, key=lambda ranked: isinstance(ranked[1], SyncAborted))
            raise type(failure)(f"{call} failed on rank {rank}: {failure}") from error
        return [value for value, _ in answers]

    def _from_first(self, step: Callable[[], Value]) -> Value:
        return from_first(step, self._rank, self._group)

    def _gather(self, value: Any) -> list[Any]:
        """Gather one object from each rank, in rank order; bounded by the group's timeout."""
        if self._group is None:
            return [value]
        everyone: list[Any] = [None] * self._layout.ranks
        with span("wait_ranks"):
            dist.all_gather_object(everyone, value, group=self._group)
        return everyone


def outcome_of(step: Callable[[], Value]) -> tuple[Value | None, SyncError | None, Exception | None]:
    """Run a step; return its result, or the error that the other ranks raise and the error that this rank caught."""
    try:
        return step(), None, None
    except Exception as error:  # raised by the caller, once the other ranks know
        kind = SyncAborted if isinstance(error, SyncAborted) else SyncLate if isinstance(error, TimeoutError) else SyncError
        return None, kind(f"{type(error).__name__}: {error}"), error


def from_first(step: Callable[[], Value], rank: int, group: dist.ProcessGroup | None) -> Value:
    """Run a step on rank 0; return its result on every rank. A failure is raised unchanged on rank 0, and as SyncError on
    the other ranks (SyncLate where a deadline has passed)."""
    with span("wait_engines"):  # rank 0 waits for engines, and the other ranks for rank 0
        value, failure, error = outcome_of(step) if rank == 0 else (None, None, None)
        box: list[Any] = [value, failure]
        if group is not None:
            dist.broadcast_object_list(box, src=0, group=group)
        # Raised inside the span, which says that the rank waited for engines.
        if error is not None:
            raise error
        if box[1] is not None:
            raise type(box[1])(f"weight_sync ended on rank 0: {box[1]}")
    return box[0]
