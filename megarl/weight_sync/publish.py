"""The trainer's end of a sync: every rank writes its boxes into the buckets of their destinations, while engines read
them."""

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
from megarl.weight_sync.boxes import shard_bytes
from megarl.weight_sync.checks import DeviceChecks, HostChecks
from megarl.weight_sync.codec import Bases, SentParts, quantise_blocks, write_blocks
from megarl.weight_sync.in_place import Pieces, has_room, identity, own_box, piece_checksum, private_bytes, share, words_of
from megarl.weight_sync.manifest import PRECISIONS, SyncAborted, SyncError, SyncLate, WeightManifest
from megarl.weight_sync.plan import sync_plan
from megarl.weight_sync.point_to_point import PointToPointSender, open_store
from megarl.weight_sync.ring import Ring, RingSender
from megarl.weight_sync.segment import machine, sweep
from megarl.weight_sync.stream import CHECKSUM_BYTES, Part, Piece, bucket_sequence, copy_order, last_pieces, sync_stream
from megarl.weight_sync.transport import NUM_BUCKETS, TRANSPORTS

Value = TypeVar("Value")
# The memory rate is measured by at most so many copies into buckets, each begun within so many seconds.
MEMCPY_COPIES, MEMCPY_S = 7, 0.003


@dataclass(frozen=True)
class SyncSettings:
    """How weights travel to at most `num_engines` engines, in `dtype`."""

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
    merges: bool = False  # adapters are merged into weights while these are sent; then weights go by layer


class Streamed(NamedTuple):
    """What one rank did in one attempt: seconds without waits, bytes with checksums, engines that it gave up with the
    reasons; where differences travel, also how many of all content bytes changed."""

    pack_s: float
    sent_bytes: int
    lost: dict[int, str]
    changed_bytes: int = 0
    content_bytes: int = 0


class EngineFacts(NamedTuple):
    """The node of an engine, where engines share memory, and how often the engine was started."""

    node: str
    starts: int


class Engines(Protocol):
    """The engines, seen from rank 0."""

    def ask(self, version: int, engines: Sequence[int]) -> None:
        """Ask some engines to pause for the first attempt at a version; does not wait."""

    def pause(self, version: int, attempt: int, engines: Sequence[int]) -> Sequence[EngineFacts]:
        """Pause some engines for a version, as far as they were not asked yet, and wait; the facts of all engines."""

    def begin(self, manifest: WeightManifest) -> None:
        """Start the receive of the manifest's engines; does not wait."""

    def failed(self) -> Sequence[int]:
        """Engines that have failed so far; does not wait."""

    def finish(self) -> tuple[tuple[int, ...], dict[str, float]]:
        """Wait for all; the engines that need another attempt and are ready for it, and the metrics of the others."""


class Matrices:
    """The local parameters that streams are in the middle of, by name, each [rows, columns].

    The mapping may make a parameter anew at each access (adapters are merged in). So each parameter is accessed once, for
    its first piece of any stream, and released after its last piece of the last stream. Where streams go by layer, at most
    one layer is held.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], last: Mapping[str, tuple[int, int]]) -> None:
        """`last` gives the stream and the number of each parameter's last piece (`last_pieces`)."""
        self._parameters, self._last = parameters, last
        self._held: dict[str, torch.Tensor] = {}

    def box(self, piece: Piece) -> torch.Tensor:
        """A view of a piece, [rows, cols]. Nobody may keep it: a merged weight lives as long as its views."""
        matrix = self._held.get(piece.parameter)
        if matrix is None:
            parameter = self._parameters[piece.parameter].detach()
            matrix = self._held[piece.parameter] = parameter.view(parameter.shape[0], -1)  # a vector is one column
        rows = matrix[piece.row : piece.row + piece.rows]
        return rows if rows.shape[1] == piece.cols else rows[:, piece.col : piece.col + piece.cols]

    def packed(self, stream: int, piece: Piece) -> None:
        """Record that a piece's bytes are in a bucket."""
        if (stream, piece.number) == self._last[piece.parameter]:
            del self._held[piece.parameter]


class WeightSync:
    """Streams actor weights to rollout engines. Every method but `close` is a collective of the trainer ranks.

    No version is kept: an engine that missed a version needs another stream. Rank 0 owns the shared memory, or the store,
    and takes it along when it ends.
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
        """`rank` is the trainer rank; `group` a gloo group of all ranks, None for a single rank.

        Weights are cast to the settings' dtype. Raises SyncError where ranks computed different plans or run on different
        machines, ValueError where shared memory or a bucket is too small.
        """
        if (group is None) != (layout.ranks == 1):
            raise ValueError(f"a layout of {layout.ranks} ranks needs a group of as many")
        if settings.dtype not in PRECISIONS:
            raise ValueError(f"weight sync in {settings.dtype} is not supported; one of {list(PRECISIONS.values())} is")
        self._layout, self._rank, self._group, self._settings = layout, rank, group, settings
        self._plan = sync_plan(shape, layout, settings.rollout, settings.mode)
        self._held = set(parameter_sizes(shape, layout, rank))
        # Rank 0, a rank of the first stage, always has the embedding, and no adapter is merged into it.
        self._embedding = chunk_prefix(layout, 0) + embedding(shape).megatron.parameter
        workers, form = settings.rollout.workers, (settings.dtype, settings.bucket_bytes, settings.quantization)
        # Each engine has its own order, so that engines ask different ranks at the same time. There is only one order where
        # engines read the same memory, and where a rank keeps what it sends: its last parts, or the merged weights of the
        # current layer, for which the workers of an engine go by layer too.
        several = TRANSPORTS[settings.transport].messages and settings.wire == "full" and not settings.merges
        self._orders = settings.num_engines if several else 1
        readers = self._orders * workers
        turns = [None if settings.merges else (reader, readers) for reader in range(readers)]
        self._streams = [sync_stream(shape, self._plan, n % workers, turn, *form) for n, turn in enumerate(turns)]
        self._sequence = bucket_sequence(self._plan, self._streams, settings.merges)
        quantised = quantised_tensors(shape) if settings.quantization == "fp8" else {}
        # Bytes of one engine; None where no table lists what its workers hold.
        element_bytes = settings.dtype.itemsize
        self._shard_bytes = shard_bytes(shape, settings.rollout, element_bytes, quantised) if is_mapped(shape) else None
        self._last = last_pieces(self._plan, self._streams, self._sequence, rank)
        # By stream and bucket: the address of the bucket, and the pieces of this rank with their places there.
        self._pieces: dict[tuple[int, int], tuple[int, list[tuple[Piece, torch.Tensor]]]] = {}
        self._device_checks: list[DeviceChecks] = []  # by stream, for buckets on a device; made at the first sync
        # Pieces that each worker reads in place, and the numbers of those that this rank holds.
        self._in_place = [
            Pieces.of(self._plan, copy_order(self._plan, worker, turns[worker]), settings.dtype.itemsize)
            for worker in range(workers)
        ]
        self._own = [np.flatnonzero(pieces.source == rank) for pieces in self._in_place]
        sent = self._plan.source_parameter[self._plan.source_rank == rank]  # this rank's parameters that some worker reads
        self._sent = [self._plan.source_parameters[number] for number in sorted(set(sent.tolist()))]
        self._homes: tuple[str, ...] = ()
        # This rank's parameters in shared memory: their identity, their address (`share`), and views of them.
        self._kept: tuple[list[Any], str, list[list[np.ndarray]]] = [], "", []
        self._session, self._begun = 0, 0.0
        self._engines: Engines | None = None
        self._sender: RingSender | PointToPointSender
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
        """Send a version to all engines, or to the `chosen` engines of rank 0; the `sync/...` metrics, on every rank.

        `parameters` are all parameters of this rank by Megatron's local names; only rank 0 has `engines`. Engines that died
        or took wrong bytes get further attempts, as often as `engines` asks for them. Raises SyncError on every rank, naming
        the rank or the engine that failed and why; rank 0 raises what `engines` raised.
        """
        self._engines, self._begun = engines, time.perf_counter()
        wanted = every = tuple(range(self._settings.num_engines)) if chosen is None else tuple(chosen)
        self._homes = self._find_homes(parameters, version, every)
        metrics: dict[str, float] = {}
        pack_s, sent_bytes, attempt = 0.0, 0, 0
        changed_bytes = content_bytes = 0
        while wanted:
            attempt += 1
            manifest = self._from_first(partial(self._begin, version, attempt, wanted))
            try:
                with span("send"):
                    done = self._together("weight_sync: stream", partial(self._stream, manifest, parameters))
            except SyncError:
                self._meetings = [0] * len(self._meetings)  # every end has left its groups
                raise
            pack_s += max(streamed.pack_s for streamed in done)
            sent_bytes += sum(streamed.sent_bytes for streamed in done)
            changed_bytes += sum(streamed.changed_bytes for streamed in done)
            content_bytes += sum(streamed.content_bytes for streamed in done)
            wanted, metrics = self._from_first(partial(self._finish, manifest, parameters, done))
        if self._parts is not None:
            metrics["sync/changed_share"] = changed_bytes / max(1, content_bytes)
        if self._shard_bytes is not None:
            metrics["sync/bound_bytes"] = len(every) * self._shard_bytes
        return metrics | {
            "sync/sent_bytes": sent_bytes,
            "sync/pack_s": pack_s,
            "sync/attempts": attempt,
            "sync/in_place": float(bool(self._homes)),
        }

    def close(self) -> None:
        """Close the transport. Not a collective: it also runs on the way out of a failure."""
        self._pieces, self._kept = {}, ([], "", [])  # views of memory that is about to go
        self._sender.close()

    def _agree_on_names(self, run_id: str) -> tuple[str, ...]:
        """Names of the rings that no other run has, chosen by rank 0. Every rank must have its plan and, without messages,
        run on its machine."""
        facts: dict[str, Any] = {"names": None, "machine": machine(), "plan": self._plan.hash}
        if self._rank == 0:
            unique = f"{run_id}-{os.getpid()}-{secrets.token_hex(4)}"
            facts["names"] = tuple(f"{unique}-{worker}" for worker in range(self._settings.rollout.workers))
        all_facts = self._gather(facts)
        for rank, other in enumerate(all_facts):
            if other["plan"] != all_facts[0]["plan"]:
                raise SyncError(f"weight_sync: rank {rank} computed another reshard plan than rank 0")
            if not TRANSPORTS[self._settings.transport].messages and other["machine"] != all_facts[0]["machine"]:
                transport = self._settings.transport
                raise SyncError(f"weight_sync.transport = {transport}: rank {rank} is on another machine than rank 0")
        return all_facts[0]["names"]

    def _open(self, owner: bool) -> tuple[str, int]:
        """Open this rank's end of the transport, on rank 0 as the owner first; the address of the store."""
        address, settings = self._store_address, self._settings
        if owner != (self._rank == 0):
            return address
        messages, on_device = TRANSPORTS[settings.transport]
        if not messages:
            if owner:
                sweep()
            size = self._layout.ranks, settings.num_engines
            rings = [
                Ring(name, *size, stream.capacity, on_device, create=owner)
                for name, stream in zip(self._names, self._streams, strict=True)
            ]
            watch = self._watch if owner else None
            self._sender = RingSender(rings, self._streams, self._rank, settings.timeout_s, watch)
            return address
        store = open_store(settings.host, address[1], settings.timeout_s, owner)
        self._sender = PointToPointSender(self._streams, self._rank, store, on_device, self._parts)
        return settings.host, store.port

    def _find_homes(self, parameters: Mapping[str, torch.Tensor], version: int, engines: Sequence[int]) -> tuple[str, ...]:
        """Where the parameters of each rank are read in place; nothing where they must be written into buckets. All ranks
        move their parameters into shared memory if all fit there, or none does. Engines pause meanwhile."""

        def begin() -> tuple[int | None, str]:
            """Bytes that this rank would have to move, None for buckets; and its address once everything is shared."""
            if self._engines is not None:
                self._engines.ask(version, engines)
            private = self._private_bytes(parameters)
            if private != 0:
                return private, ""
            return private, self._kept[1] if self._is_kept(parameters) else self._keep(parameters)

        begun = self._together("weight_sync: begin", begin)
        total = sum(private for private, _ in begun if private is not None)
        if any(private is None for private, _ in begun) or (total and not self._from_first(lambda: has_room(total))):
            self._kept = [], "", []
            return ()
        if not total:
            return tuple(address for _, address in begun)
        return tuple(self._together("weight_sync: share", lambda: self._keep(parameters)))

    def _keep(self, parameters: Mapping[str, torch.Tensor]) -> str:
        """Move this rank's parameters into shared memory, as far as they are not there yet; their address."""
        address = share(parameters, self._sent)
        self._kept = identity(parameters, self._sent), address, self._views(parameters)
        return address

    def _is_kept(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Whether the parameters still have their addresses; the kept views stop other memory from getting these."""
        return bool(self._kept[0]) and self._kept[0] == identity(parameters, self._sent)

    def _private_bytes(self, parameters: Mapping[str, torch.Tensor]) -> int | None:
        """Bytes that this rank would have to move; None where buckets are needed."""
        differing = sorted(self._held ^ parameters.keys())
        if differing:
            counts = f"rank holds {len(self._held)} parameters, was given {len(parameters)}"
            raise ValueError(f"{counts}; differ in {differing[:5]}")
        settings = self._settings
        if settings.transport != "shared_memory" or settings.mode != "reshard" or settings.quantization is not None:
            return None
        pairs = zip(self._in_place, self._streams, strict=True)
        if any(CHECKSUM_BYTES * len(pieces) > NUM_BUCKETS * stream.capacity for pieces, stream in pairs):
            return None
        if isinstance(parameters, dict) and self._is_kept(parameters):
            return 0
        return private_bytes(parameters, self._sent, settings.dtype)

    def _begin(self, version: int, attempt: int, wanted: tuple[int, ...]) -> WeightManifest:
        """On rank 0, begin the next attempt and start the engines' receive."""
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
        """On rank 0, wait for the engines: those that need another attempt, and the metrics."""
        lost = [(rank, engine, why) for rank, streamed in enumerate(done) for engine, why in streamed.lost.items()]
        for _, engine, _ in lost:
            self._meetings[engine] = 0
        if self._engines is None:
            return (), {}
        try:
            again, metrics = self._engines.finish()
        except Exception as error:  # raised again; engines meet anew in the next sync
            self._meetings = [0] * len(self._meetings)  # a failed engine has left its group
            for rank, engine, why in lost:
                error.add_note(f"trainer rank {rank} gave up engine {engine}: {why}")
            raise
        received = [engine for engine in manifest.leading if engine not in again]
        self._bases.finish(manifest.version, received, self._starts)
        metrics["sync/total_s"] = time.perf_counter() - self._begun
        if again:  # buckets in the memory of a dead engine are gone
            return again, metrics
        rate = memcpy_bytes_per_s(parameters[self._embedding], self._sender.buckets)
        return again, metrics | {"sync/memcpy_bytes_per_s": rate}

    def _watch(self) -> None:
        """On rank 0, called while it waits: stop waiting for engines that have failed."""
        for engine in () if self._engines is None else self._engines.failed():
            self._sender.lose(engine)

    def _stream(self, manifest: WeightManifest, parameters: Mapping[str, torch.Tensor]) -> Streamed:
        """Write all parts of this rank, in the same order on all ranks, so that no two ranks wait for each other."""
        if manifest.homes:
            return self._seal(manifest, parameters)
        pack_s, matrices = 0.0, Matrices(parameters, self._last)
        try:
            self._sender.begin(manifest)
            if TRANSPORTS[self._settings.transport].on_device and not self._device_checks:
                where, sampled = self._sender.buckets.device, self._settings.verify == "sampled"
                self._device_checks = [DeviceChecks(stream, where, sampled, self._rank) for stream in self._streams]
            for checks in self._device_checks:
                checks.begin(manifest.version)
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
        except BaseException:  # SystemExit too, since engines wait for this rank; raised again
            self._sender.abort()
            raise
        changed = (0, 0) if self._parts is None else (self._parts.changed_bytes, self._parts.content_bytes)
        return Streamed(pack_s, self._sender.sent_bytes, dict(self._sender.lost), *changed)

    def _seal(self, manifest: WeightManifest, parameters: Mapping[str, torch.Tensor]) -> Streamed:
        """Hash what workers read in place from this rank, after they have read it, so that the hashes include any write
        meanwhile. Nobody may write before all workers have compared, which they do when vLLM has packed."""
        sender = self._sender
        assert isinstance(sender, RingSender), "only what shares memory is read in place"
        try:
            sender.begin(manifest)
            with span("wait_engines"):
                last = [int(numbers[-1]) + 1 if len(numbers) else 0 for numbers in self._own]
                sender.wait_copied(last)
            begun = time.perf_counter()
            views_of_workers = self._kept[2] if self._is_kept(parameters) else self._views(parameters)
            for worker, (numbers, views) in enumerate(zip(self._own, views_of_workers, strict=True)):
                pairs = zip(views, numbers.tolist(), strict=True)
                sums = [piece_checksum(words, manifest.version, number) for words, number in pairs]
                num_bytes = sum(words.nbytes for words in views)
                sender.seal(worker, numbers, sums, num_bytes + CHECKSUM_BYTES * len(numbers))
            pack_s = time.perf_counter() - begun
            with span("wait_engines"):
                sources = [np.unique(pieces.source) for pieces in self._in_place]
                sender.wait_read(sources, [len(pieces) + 1 for pieces in self._in_place])
        except BaseException:  # as above
            sender.abort()
            raise
        return Streamed(pack_s, sender.sent_bytes, dict(sender.lost))

    def _views(self, parameters: Mapping[str, torch.Tensor]) -> list[list[np.ndarray]]:
        """By worker, the pieces that it reads from this rank's memory, as words."""
        return [
            [words_of(own_box(parameters, pieces.at_source(self._plan, number))) for number in numbers.tolist()]
            for pieces, numbers in zip(self._in_place, self._own, strict=True)
        ]

    @torch.no_grad()
    def _pack(
        self, manifest: WeightManifest, stream: int, part: Part, matrices: Matrices, bucket: int, memory: torch.Tensor
    ) -> None:
        """Cast and copy a part's boxes into the bucket, with their checksums."""
        place, pieces = self._pieces.get((stream, bucket), (0, []))
        if place != memory.data_ptr():
            dtype, pieces = self._settings.dtype, []
            for piece in self._streams[stream].at_source(self._plan, part):
                target = memory[piece.start : piece.end]  # of FP8 blocks the bytes, otherwise [rows, cols]
                pieces.append((piece, target if piece.scale_bytes else target.view(dtype).view(piece.rows, piece.cols)))
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

    def _together(self, call: str, step: Callable[[], Value]) -> list[Value]:
        """Run a step on every rank and wait for all; the results in rank order. A failure is raised on every rank and names
        the first rank that failed for a reason of its own."""
        value: Value | None = None
        error: Exception | None = None
        try:
            value = step()
        except Exception as caught:  # raised below, once the other ranks know
            error = caught
        failure = (
            None if error is None else (isinstance(error, SyncAborted), _described(error), isinstance(error, TimeoutError))
        )
        answers = self._gather((value, failure))
        failures = [(*failure, rank) for rank, (_, failure) in enumerate(answers) if failure is not None]
        if failures:
            _, text, late, rank = min(failures, key=lambda failure: (failure[0], failure[3]))
            raise (SyncLate if late else SyncError)(f"{call} failed on rank {rank}: {text}") from error
        return [value for value, _ in answers]

    def _from_first(self, step: Callable[[], Value]) -> Value:
        """Run a step on rank 0; its result, on every rank. A failure is raised unchanged on rank 0, and as SyncError on the
        other ranks (SyncLate where a deadline has passed)."""
        box: list[Any] = [None, None, False]
        error: Exception | None = None
        with span("wait_engines"):  # rank 0 waits for engines, and the other ranks for rank 0
            if self._rank == 0:
                try:
                    box[0] = step()
                except Exception as caught:  # raised below, once the other ranks know
                    error, box[1], box[2] = caught, _described(caught), isinstance(caught, TimeoutError)
            if self._group is not None:
                dist.broadcast_object_list(box, src=0, group=self._group)
            # Raised inside the span, which says that the rank waited for engines.
            if error is not None:
                raise error
            if box[1] is not None:
                raise (SyncLate if box[2] else SyncError)(f"weight_sync ended on rank 0: {box[1]}")
        return box[0]

    def _gather(self, value: Any) -> list[Any]:
        """Gather one object from each rank, in rank order; bounded by the group's timeout."""
        if self._group is None:
            return [value]
        everyone: list[Any] = [None] * self._layout.ranks
        with span("wait_ranks"):
            dist.all_gather_object(everyone, value, group=self._group)
        return everyone


def _leaders(facts: Sequence[EngineFacts], engines: Sequence[int]) -> tuple[int, ...]:
    """By engine, the engine that leads: the first chosen engine of the node; an engine that takes no part leads itself."""
    first: dict[str, int] = {}
    for engine in sorted(engines):
        first.setdefault(facts[engine].node, engine)
    return tuple(first[fact.node] if engine in engines else engine for engine, fact in enumerate(facts))


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def memcpy_bytes_per_s(weight: torch.Tensor, buckets: torch.Tensor) -> float:
    """Measure the rate at which this process copies bytes of a weight [rows, columns] to idle buckets, as a bound for
    transfers. The median of a few copies, milliseconds in all, each of different rows, which come from memory: the same
    bytes again would come from the cache at up to four times the rate, which no transfer of a model reaches."""
    content = weight.detach().view(torch.uint8)[:, : buckets.shape[1]]  # rows may be longer than a bucket
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
