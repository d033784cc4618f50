"""The trainer's end: every rank writes its boxes into the buckets of their destinations, while the engines read them."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.megatron_weights import chunk_prefix, parameter_sizes
from megarl.models.quantised_blocks import quantised_tensors
from megarl.models.vllm_weights import is_mapped
from megarl.models.weight_table import embedding
from megarl.platform import current as device
from megarl.telemetry.clock import span
from megarl.weight_sync.checks import DeviceChecks, HostChecks
from megarl.weight_sync.codec import quantise_blocks, write_blocks
from megarl.weight_sync.delta import Bases, SentParts
from megarl.weight_sync.in_place import (
    Pieces,
    has_room,
    hashed_parts,
    identity,
    own_box,
    piece_checksum,
    private_bytes,
    share,
    words_of,
)
from megarl.weight_sync.manifest import (
    PRECISIONS,
    SyncAborted,
    SyncError,
    SyncLate,
    WeightManifest,
    sync_plan,
    sync_stream,
    turn_order,
)
from megarl.weight_sync.point_to_point import PointToPointSender, open_store
from megarl.weight_sync.ring import Ring, RingSender
from megarl.weight_sync.segment import machine, sweep
from megarl.weight_sync.sequence import Matrices, bucket_sequence, last_pieces
from megarl.weight_sync.sides import shard_bytes
from megarl.weight_sync.stream import CHECKSUM_BYTES, Part, Piece
from megarl.weight_sync.transport import NUM_BUCKETS, TRANSPORTS, Sender

Value = TypeVar("Value")
# What a transfer is measured by: at most so many copies into buckets, each begun within so many seconds.
MEMCPY_COPIES, MEMCPY_S = 7, 0.003


@dataclass(frozen=True)
class SyncSettings:
    """How weights travel; `num_engines` may take them, in `dtype`."""

    dtype: torch.dtype
    rollout: RolloutLayout
    num_engines: int
    bucket_bytes: int
    timeout_s: float
    mode: str = "reshard"
    transport: str = "shared_memory"
    host: str = "127.0.0.1"  # of rank 0, as engines reach it
    wire: str = "full"  # or "delta", with transport "gloo"
    verify: str = "all"  # or "sampled", where buckets lie on a device
    quantization: str | None = None  # or "fp8", with mode "reshard"
    merges: bool = False  # adapters into weights, whenever these are sent; then weights go by layer


class Streamed(NamedTuple):
    """What one rank did in one attempt: seconds without waits, bytes with checksums, engines that it gave up and why; and
    where differences travel, how many of the bytes before that were others than the last time."""

    pack_s: float
    sent_bytes: int
    lost: dict[int, str]
    changed_bytes: int = 0
    content_bytes: int = 0


class EngineFacts(NamedTuple):
    """Where an engine runs, and how often it was started; of the same `node` are those that share memory."""

    node: str
    starts: int


class Engines(Protocol):
    """The engines, seen from rank 0."""

    def ask(self, version: int, engines: Sequence[int]) -> None:
        """Have some engines begin to pause for the first attempt at a version; does not wait."""

    def pause(self, version: int, attempt: int, engines: Sequence[int]) -> Sequence[EngineFacts]:
        """Have some engines pause for a version, where they were not asked to yet, and wait; the facts of all."""

    def begin(self, manifest: WeightManifest) -> None:
        """Have the manifest's engines receive; does not wait for them."""

    def failed(self) -> Sequence[int]:
        """Those that ended without success so far; does not wait."""

    def finish(self) -> tuple[tuple[int, ...], dict[str, float]]:
        """Wait for all; those that must be served again, ready to be, and the figures of the others."""


class WeightSync:
    """Streams actor weights to rollout engines. Every method but `close` is a collective of the trainer ranks.

    No version is kept: an engine that missed one is streamed to again. What rank 0 owns of a transport, shared memory or a
    store, is gone when it ends.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        settings: SyncSettings,
        run_id: str,
        rank: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        """`rank` is the trainer rank; `group` a gloo group of all of them, None for a single rank without one.

        Weights are cast to the settings' dtype before they are written. Raises SyncError where ranks computed different
        plans or run on different machines, ValueError where shared memory or a bucket is too small.
        """
        if (group is None) != (layout.ranks == 1):
            raise ValueError(f"a layout of {layout.ranks} ranks needs a group of as many")
        if settings.dtype not in PRECISIONS:
            raise ValueError(f"weight sync in {settings.dtype} is not supported; one of {list(PRECISIONS.values())} is")
        self._layout, self._rank, self._group, self._settings = layout, rank, group, settings
        self._plan = sync_plan(shape, layout, settings.rollout, settings.mode)
        self._held = set(parameter_sizes(shape, layout, rank))
        # What rank 0, a rank of the first stage, has for certain, and what no adapter is merged into.
        self._embedding = chunk_prefix(layout, 0) + embedding(shape).megatron.parameter
        workers, form = settings.rollout.workers, (settings.dtype, settings.bucket_bytes, settings.quantization)
        # Each engine has an order of its own, so that they ask unlike ranks at the same time. One is for all where they read
        # the same memory, and where a rank keeps something of what it sends: all that it sent last, or the merged weights of
        # the layer that it is in, for which the workers of an engine go by layer too.
        several = TRANSPORTS[settings.transport].messages and settings.wire == "full" and not settings.merges
        self._orders = settings.num_engines if several else 1
        readers = self._orders * workers
        turns = [None if settings.merges else (reader, readers) for reader in range(readers)]
        self._streams = [sync_stream(shape, self._plan, n % workers, turn, *form) for n, turn in enumerate(turns)]
        self._sequence = bucket_sequence(self._plan, self._streams, settings.merges)
        quantised = quantised_tensors(shape) if settings.quantization == "fp8" else {}
        # Of one engine; unknown where no table says what its workers hold.
        element_bytes = settings.dtype.itemsize
        self._shard_bytes = shard_bytes(shape, settings.rollout, element_bytes, quantised) if is_mapped(shape) else None
        self._last = last_pieces(self._plan, self._streams, self._sequence, rank)
        # Of this rank, by stream and bucket: where the bucket lies in memory, and the pieces with their places there.
        self._pieces: dict[tuple[int, int], tuple[int, list[tuple[Piece, torch.Tensor]]]] = {}
        # By stream, where buckets lie on a device; made at the first sync.
        self._device_checks: list[DeviceChecks] = []
        # What workers read where it is: the pieces of each, and of this rank their numbers and places.
        self._in_place = [
            Pieces.of(self._plan, turn_order(self._plan, worker, turns[worker]), settings.dtype.itemsize)
            for worker in range(workers)
        ]
        self._own = [pieces.of_rank(rank) for pieces in self._in_place]
        self._elements_before = [pieces.elements_before(self._plan) for pieces in self._in_place]
        sent = self._plan.source_parameter[self._plan.source_rank == rank]  # this rank's parameters that some worker reads
        self._sent = [self._plan.source_parameters[number] for number in sorted(set(sent.tolist()))]
        self._homes: tuple[str, ...] = ()
        # Of this rank's parameters in shared memory: their identity, what `share` said, and views of them.
        self._kept: tuple[list[Any], str, list[list[list[np.ndarray]]]] = [], "", []
        self._session, self._begun = 0, 0.0
        self._engines: Engines | None = None
        self._sender: Sender
        self._parts = SentParts(self._streams) if settings.wire == "delta" else None
        self._bases = Bases()
        self._starts = [0] * settings.num_engines
        self._meetings = [0] * settings.num_engines
        self._names = self._agree_on_names(run_id)
        self._store_address = ("", 0)
        self._store_address = self._together("weight_sync: open", lambda: self._open(owner=True))[0]
        self._together("weight_sync: join", lambda: self._open(owner=False))

    def publish(
        self,
        version: int,
        parameters: Mapping[str, torch.Tensor],
        engines: Engines | None = None,
        chosen: Sequence[int] | None = None,
    ) -> dict[str, float]:
        """Bring a version to all engines, or to those that rank 0 has chosen; the `sync/...` figures, on every rank.

        `parameters` are all of the rank's own, by Megatron's local names; `engines` are given on rank 0. Engines that died
        or took wrong bytes are streamed to again, as often as `engines` has them. Raises SyncError on every rank, naming
        the rank or the engine that failed and why; rank 0 raises what `engines` raised.
        """
        self._engines, self._begun = engines, time.perf_counter()
        wanted = every = tuple(range(self._settings.num_engines)) if chosen is None else tuple(chosen)
        self._homes = self._find_homes(parameters, version, every)
        figures: dict[str, float] = {}
        pack_s, sent_bytes, attempt = 0.0, 0, 0
        changed_bytes = content_bytes = 0
        while wanted:
            attempt += 1
            manifest = self._from_first(partial(self._begin, version, attempt, wanted))
            try:
                with span("send"):
                    done = self._together("weight_sync: stream", partial(self._stream, manifest, parameters))
            except SyncError:
                self._meetings = [0] * len(self._meetings)  # every end lets go of its groups
                raise
            pack_s += max(streamed.pack_s for streamed in done)
            sent_bytes += sum(streamed.sent_bytes for streamed in done)
            changed_bytes += sum(streamed.changed_bytes for streamed in done)
            content_bytes += sum(streamed.content_bytes for streamed in done)
            wanted, figures = self._from_first(partial(self._finish, manifest, parameters, done))
        if self._parts is not None:
            figures["sync/changed_share"] = changed_bytes / max(1, content_bytes)
        if self._shard_bytes is not None:
            figures["sync/bound_bytes"] = len(every) * self._shard_bytes
        return figures | {
            "sync/sent_bytes": sent_bytes,
            "sync/pack_s": pack_s,
            "sync/attempts": attempt,
            "sync/in_place": float(bool(self._homes)),
        }

    def close(self) -> None:
        """Give the transport back. Not a collective: it also runs on the way out of a failure."""
        self._pieces, self._kept = {}, ([], "", [])  # views of what is given back, and of what others may free
        self._sender.close()

    def _agree_on_names(self, run_id: str) -> tuple[str, ...]:
        """Rank 0 chooses names that no other run has; everyone must be on its machine and have its plan."""
        mine: dict[str, Any] = {"names": None, "machine": machine(), "plan": self._plan.hash}
        if self._rank == 0:
            unique = f"{run_id}-{os.getpid()}-{secrets.token_hex(4)}"
            mine["names"] = tuple(f"{unique}-{worker}" for worker in range(self._settings.rollout.workers))
        everyone = self._gather(mine)
        for rank, other in enumerate(everyone):
            if other["plan"] != everyone[0]["plan"]:
                raise SyncError(f"weight_sync: rank {rank} computed another reshard plan than rank 0")
            if not TRANSPORTS[self._settings.transport].messages and other["machine"] != everyone[0]["machine"]:
                transport = self._settings.transport
                raise SyncError(f"weight_sync.transport = {transport}: rank {rank} is on another machine than rank 0")
        return everyone[0]["names"]

    def _open(self, owner: bool) -> tuple[str, int]:
        """This rank's end of the transport, first on rank 0; where the store is."""
        address, settings = self._store_address, self._settings
        if owner != (self._rank == 0):
            return address
        messages, on_device = TRANSPORTS[settings.transport]
        if not messages:
            if owner:
                sweep()
            make, size = Ring.create if owner else Ring.open, (self._layout.ranks, settings.num_engines)
            rings = [make(name, *size, s.capacity, on_device) for name, s in zip(self._names, self._streams, strict=True)]
            watch = self._watch if owner else None
            self._sender = RingSender(rings, self._streams, self._rank, settings.timeout_s, watch)
            return address
        store = open_store(settings.host, address[1], settings.timeout_s, owner)
        self._sender = PointToPointSender(self._streams, self._rank, store, on_device, self._parts)
        return settings.host, store.port

    def _find_homes(self, parameters: Mapping[str, torch.Tensor], version: int, engines: Sequence[int]) -> tuple[str, ...]:
        """Where the parameters of each rank are read in place; none where they have to be written into buckets. All ranks
        move theirs into shared memory, or none does: there is room for all of them. Meanwhile engines come to a stand."""

        def begin() -> tuple[int | None, str]:
            if self._engines is not None:
                self._engines.ask(version, engines)
            return self._begin_in_place(parameters)

        begun = self._together("weight_sync: begin", begin)
        total = sum(private for private, _ in begun if private is not None)
        if any(private is None for private, _ in begun) or (total and not self._from_first(lambda: has_room(total))):
            self._kept = [], "", []
            return ()
        if not total:
            return tuple(said for _, said in begun)
        return tuple(self._together("weight_sync: share", lambda: self._keep(parameters)))

    def _begin_in_place(self, parameters: Mapping[str, torch.Tensor]) -> tuple[int | None, str]:
        """What this rank would have to move, None where buckets are the way; and where its parameters are, if all of them
        are in shared memory."""
        private = self._private_bytes(parameters)
        if private != 0:
            return private, ""
        return private, self._kept[1] if self._is_kept(parameters) else self._keep(parameters)

    def _keep(self, parameters: Mapping[str, torch.Tensor]) -> str:
        """Bring this rank's parameters into shared memory, where they are not yet, and say where."""
        said = share(parameters, self._sent)
        self._kept = identity(parameters, self._sent), said, self._views(parameters)
        return said

    def _is_kept(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Whether they lie where they lay: the views keep anything else from lying there."""
        return bool(self._kept[0]) and self._kept[0] == identity(parameters, self._sent)

    def _private_bytes(self, parameters: Mapping[str, torch.Tensor]) -> int | None:
        """What this rank would have to move; None where buckets are the way."""
        self._check_names(parameters)
        settings = self._settings
        if settings.transport != "shared_memory" or settings.mode != "reshard" or settings.quantization is not None:
            return None
        if any(
            pieces.table_bytes > NUM_BUCKETS * s.capacity for pieces, s in zip(self._in_place, self._streams, strict=True)
        ):
            return None
        if isinstance(parameters, dict) and self._is_kept(parameters):
            return 0
        return private_bytes(parameters, self._sent, settings.dtype)

    def _check_names(self, parameters: Mapping[str, torch.Tensor]) -> None:
        odd = sorted(self._held ^ parameters.keys())
        if odd:
            raise ValueError(f"rank holds {len(self._held)} parameters, was given {len(parameters)}; differ in {odd[:5]}")

    def _begin(self, version: int, attempt: int, wanted: tuple[int, ...]) -> WeightManifest:
        """Rank 0: the next attempt, with the engines told."""
        self._session += 1
        facts = [EngineFacts("", 0)] * self._settings.num_engines
        if self._engines is not None:
            facts = list(self._engines.pause(version, attempt, wanted))
        for engine in wanted:
            if attempt > 1 or facts[engine].starts != self._starts[engine] or not self._meetings[engine]:
                self._meetings[engine] = self._session
            self._starts[engine] = facts[engine].starts
        leaders = _leaders(facts, wanted)
        leading = sorted({leaders[engine] for engine in wanted})
        manifest = WeightManifest(
            version=version,
            attempt=attempt,
            session=self._session,
            plan_hash=self._plan.hash,
            layout=self._layout,
            rollout=self._settings.rollout,
            mode=self._settings.mode,
            precision=PRECISIONS[self._settings.dtype],
            bucket_bytes=self._settings.bucket_bytes,
            timeout_s=self._settings.timeout_s,
            rings=self._names,
            engines=wanted,
            num_engines=self._settings.num_engines,
            transport=self._settings.transport,
            verify=self._settings.verify,
            store=self._store_address,
            leaders=leaders,
            meetings=tuple(self._meetings),
            wire=self._settings.wire,
            quantization=self._settings.quantization,
            base=self._bases.begin(attempt, leading, self._starts),
            homes=self._homes,
            orders=self._orders,
            by_layer=self._settings.merges,
        )
        if self._engines is not None:
            self._engines.begin(manifest)
        return manifest

    def _finish(
        self, manifest: WeightManifest, parameters: Mapping[str, torch.Tensor], done: Sequence[Streamed]
    ) -> tuple[tuple[int, ...], dict[str, float]]:
        """Rank 0: who must be served again, and the figures."""
        lost = [(rank, engine, why) for rank, streamed in enumerate(done) for engine, why in streamed.lost.items()]
        for _, engine, _ in lost:
            self._meetings[engine] = 0
        if self._engines is None:
            return (), {}
        try:
            again, figures = self._engines.finish()
        except Exception as error:  # whatever fails: engines meet anew in the next sync; it is raised again
            self._meetings = [0] * len(self._meetings)  # a failed engine has let go of its group
            for rank, engine, why in lost:
                error.add_note(f"trainer rank {rank} gave up engine {engine}: {why}")
            raise
        received = [engine for engine in manifest.leading if engine not in again]
        self._bases.finish(manifest.version, received, self._starts)
        figures["sync/total_s"] = time.perf_counter() - self._begun
        if again:  # buckets in the memory of an engine that died are gone
            return again, figures
        rate = memcpy_bytes_per_s(parameters[self._embedding], self._sender.buckets)
        return again, figures | {"sync/memcpy_bytes_per_s": rate}

    def _watch(self) -> None:
        """Rank 0, while it waits: the others need not wait for an engine that has failed."""
        for engine in () if self._engines is None else self._engines.failed():
            self._sender.lose(engine)

    def _stream(self, manifest: WeightManifest, parameters: Mapping[str, torch.Tensor]) -> Streamed:
        """Write all parts of this rank, in the one order in which all ranks go, so that no two can wait for each other."""
        if manifest.homes:
            return self._seal(manifest, parameters)
        pack_s, matrices = 0.0, Matrices(parameters, self._last)
        try:
            self._sender.begin(manifest)
            self._begin_checks(manifest.version)
            for bucket, number in self._sequence:
                part = self._streams[number].part(bucket, self._rank) if self._sender.serves(number) else None
                if part is not None:
                    with span("wait_engines"):
                        memory = self._sender.room(number, bucket)
                    begun = time.perf_counter()
                    self._pack(manifest, number, part, matrices, bucket, memory)
                    self._sender.send(number, bucket)
                    pack_s += time.perf_counter() - begun
            self._sender.finish()
        except BaseException:  # SystemExit too: engines wait for what is not sent any more; it is raised again
            self._sender.abort()
            raise
        sent, parts = (self._sender.sent_bytes, dict(self._sender.lost)), self._parts
        return Streamed(pack_s, *sent, *((0, 0) if parts is None else (parts.changed_bytes, parts.content_bytes)))

    def _seal(self, manifest: WeightManifest, parameters: Mapping[str, torch.Tensor]) -> Streamed:
        """Hash what workers have read in place of this rank, once they have: whatever was written to it meanwhile is in the
        hashes. Nobody may write to it before they all have compared, which they do when vLLM has packed."""
        sender = self._sender
        assert isinstance(sender, RingSender), "only what shares memory is read in place"
        try:
            sender.begin(manifest)
            with span("wait_engines"):
                last = [int(own[-1]) + 1 if len(own) else 0 for own in self._own]
                sender.wait_copied(last, self._elements_before)
            begun = time.perf_counter()
            everyones = self._kept[2] if self._is_kept(parameters) else self._views(parameters)
            for worker, (own, views) in enumerate(zip(self._own, everyones, strict=True)):
                numbers = own.tolist()
                sums = [piece_checksum(one, manifest.version, number) for one, number in zip(views, numbers, strict=True)]
                num_bytes = sum(part.nbytes for one in views for part in one)
                sender.seal(worker, own, sums, num_bytes + CHECKSUM_BYTES * len(own))
            pack_s = time.perf_counter() - begun
            with span("wait_engines"):
                sender.wait_read([np.unique(pieces.source) for pieces in self._in_place], self._elements_before)
        except BaseException:  # the same
            sender.abort()
            raise
        return Streamed(pack_s, sender.sent_bytes, dict(sender.lost))

    def _views(self, parameters: Mapping[str, torch.Tensor]) -> list[list[list[np.ndarray]]]:
        """By worker, the pieces that it reads of this rank's memory, in the parts that are hashed."""
        return [
            [hashed_parts(words_of(own_box(parameters, pieces.at_source(self._plan, number)))) for number in own.tolist()]
            for pieces, own in zip(self._in_place, self._own, strict=True)
        ]

    @torch.no_grad()
    def _pack(
        self, manifest: WeightManifest, stream: int, part: Part, matrices: Matrices, bucket: int, memory: torch.Tensor
    ) -> None:
        """Cast and copy a part's boxes into the bucket, each with its checksum."""
        place, pieces = self._pieces.get((stream, bucket), (0, []))
        if place != memory.data_ptr():
            pieces = self._pieces_in(memory, stream, part)
            self._pieces[stream, bucket] = memory.data_ptr(), pieces
        checks = None if self._device_checks else HostChecks(memory, manifest.version, bucket)
        for piece, target in pieces:
            if piece.scale_bytes:
                write_blocks(quantise_blocks(matrices.box(piece).to(self._settings.dtype)), target)
            else:
                target.copy_(matrices.box(piece))
            matrices.packed(stream, piece)
            if checks is not None:
                checks.add(piece)
        if checks is not None:
            checks.close()
        else:
            self._device_checks[stream].write(bucket, memory)

    def _begin_checks(self, version: int) -> None:
        """Have checksums made on the device where the buckets lie there."""
        if TRANSPORTS[self._settings.transport].on_device and not self._device_checks:
            where, sampled = self._sender.buckets.device, self._settings.verify == "sampled"
            self._device_checks = [DeviceChecks(stream, where, sampled, self._rank) for stream in self._streams]
        for checks in self._device_checks:
            checks.begin(version)

    def _pieces_in(self, memory: torch.Tensor, stream: int, part: Part) -> list[tuple[Piece, torch.Tensor]]:
        """A part's pieces, each with where it goes in a bucket's memory: [rows, cols], or the bytes of FP8 blocks."""
        dtype, pieces = self._settings.dtype, []
        for piece in self._streams[stream].at_source(self._plan, part):
            target = memory[piece.start : piece.end]
            pieces.append((piece, target if piece.scale_bytes else target.view(dtype).view(piece.rows, piece.cols)))
        return pieces

    def _together(self, call: str, step: Callable[[], Value]) -> list[Value]:
        """Run a step on every rank and wait for all; the results in rank order. A failure of one is raised on every rank,
        naming it: the first one that no other rank's failure caused."""
        value: Value | None = None
        error: Exception | None = None
        try:
            value = step()
        except Exception as caught:  # raised below, once the others know
            error = caught
        failure = None if error is None else (isinstance(error, SyncAborted), _said(error), isinstance(error, TimeoutError))
        answers = self._gather((value, failure))
        failures = [(*failure, rank) for rank, (_, failure) in enumerate(answers) if failure is not None]
        if failures:
            _, text, late, rank = min(failures, key=lambda one: (one[0], one[3]))
            raise (SyncLate if late else SyncError)(f"{call} failed on rank {rank}: {text}") from error
        return [value for value, _ in answers]

    def _from_first(self, step: Callable[[], Value]) -> Value:
        """What a step gives on rank 0, on every rank. Its failure is raised there as it is, and as SyncError elsewhere,
        SyncLate where a deadline has passed."""
        box: list[Any] = [None, None, False]
        error: Exception | None = None
        with span("wait_engines"):  # there rank 0 waits for them, and here all others for it
            if self._rank == 0:
                try:
                    box[0] = step()
                except Exception as caught:  # raised below, once the others know
                    error, box[1], box[2] = caught, _said(caught), isinstance(caught, TimeoutError)
            if self._group is not None:
                dist.broadcast_object_list(box, src=0, group=self._group)
            # Raised in here: it is engines that a rank has waited for in vain.
            if error is not None:
                raise error
            if box[1] is not None:
                raise (SyncLate if box[2] else SyncError)(f"weight_sync ended on rank 0: {box[1]}")
        return box[0]

    def _gather(self, value: Any) -> list[Any]:
        """One object of each rank, in rank order; bounded by the group's timeout."""
        if self._group is None:
            return [value]
        everyone: list[Any] = [None] * self._layout.ranks
        with span("wait_ranks"):
            dist.all_gather_object(everyone, value, group=self._group)
        return everyone


def _leaders(facts: Sequence[EngineFacts], engines: Sequence[int]) -> tuple[int, ...]:
    """The first of the engines on each node leads there; one that takes no part leads itself."""
    first: dict[str, int] = {}
    for engine in sorted(engines):
        first.setdefault(facts[engine].node, engine)
    return tuple(first[one.node] if engine in engines else engine for engine, one in enumerate(facts))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def memcpy_bytes_per_s(weight: torch.Tensor, buckets: torch.Tensor) -> float:
    """Rate at which this process copies bytes of a weight [rows, columns] to idle buckets, as they are: what a transfer is
    measured by. The median of a few copies, milliseconds in all, each of other rows: these come from memory. The same bytes,
    copied again and again, come from the cache at up to four times the rate, which no transfer of a model reaches."""
    content = weight.detach().view(torch.uint8)[:, : buckets.shape[1]]  # of a row that no bucket holds, its beginning
    parts = content.split(max(1, buckets.shape[1] // content.shape[1]))
    rates: list[float] = []
    device.settle()
    first = time.perf_counter()
    for number, rows in enumerate(parts[:MEMCPY_COPIES]):
        target = buckets[number % NUM_BUCKETS, : rows.numel()].view(rows.shape)
        begun = time.perf_counter()
        target.copy_(rows)
        device.settle()
        ended = time.perf_counter()
        rates.append(rows.numel() / (ended - begun))
        if ended - first > MEMCPY_S:
            break
    return statistics.median(rates)
