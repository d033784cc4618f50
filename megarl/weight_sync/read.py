"""The worker's end of a sync, without vLLM: join the group, take the bytes, verify them, and put each box in its place."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from megarl.models import ModelShape
from megarl.platform import current as platform
from megarl.weight_sync.buckets import NUM_BUCKETS, LocalBox, Part, PieceStream, sync_stream
from megarl.weight_sync.checks import checksum, checksums
from megarl.weight_sync.codec import blocks_in, scales_of
from megarl.weight_sync.copies import SpareMemory, Works, in_threads, num_threads
from megarl.weight_sync.group import Inbox, Message, MessageGroup, bucket_memory, finish, open_group, open_store, start
from megarl.weight_sync.manifest import SyncError, WeightManifest
from megarl.weight_sync.mapped import map_parameters
from megarl.weight_sync.plan import ReshardPlan, sync_plan


class Writer(Protocol):
    """Knows where the parameters of an engine are."""

    def works(self, boxes: Sequence[LocalBox], bucket_bytes: int) -> Works | None:
        """Divide boxes that are mapped among threads; None if boxes are written one after another."""
        return None

    def place(self, box: LocalBox, spare: SpareMemory | None = None) -> torch.Tensor:
        """Return where to write a box, [rows, cols]; nobody may keep it. A thread gives its spare memory."""

    def written(self, owner: str) -> None:
        """Pack a module of a work that a thread has written, or note it for `finish`."""

    def finish(self) -> None:
        """Pack the rest, once all boxes are written and while ranks compute the checksums of mapped weights."""


@dataclass
class ReadTimes:
    """What a reader did for one version. Seconds of several threads are divided by their number."""

    wait_s: float = 0.0  # for buckets
    verify_wait_s: float = 0.0  # for the ranks' checksums of mapped weights
    verify_s: float = 0.0  # for the reader's own checksums
    pack_s: float = 0.0  # for packing in threads
    received_bytes: int = 0  # of boxes


class HandedOver:
    """An inbox in the memory of the trainer rank that serves this worker. The rank says which bucket is full, and the worker
    which is free."""

    parts = None  # the rank adds differences

    def __init__(self, handle: str, server: int, member: int, num_buckets: int) -> None:
        """`server` is the trainer rank, and `member` its number in the group. Raises SyncError where its memory cannot be
        mapped."""
        try:
            self._memory = platform.reach_bytes(handle).view(NUM_BUCKETS, -1)  # uint8 [2, capacity]
        except RuntimeError as error:
            raise SyncError(f"hand over: no way to the buckets of trainer rank {server}: {error}") from error
        self._server, self._member, self._num_buckets = server, member, num_buckets

    def begin(self, manifest: WeightManifest) -> None:
        self._posted: dict[int, list[Message]] = {}  # by bucket

    def post(self, bucket: int, group: MessageGroup) -> None:
        """Tell the rank that the bucket's memory is free, and start to receive that the bucket is full."""
        messages = self._posted[bucket] = []
        if bucket >= NUM_BUCKETS:
            platform.settle()
            what = f"permission for bucket {bucket}, to trainer rank {self._server}"
            messages.append(start(group.send, torch.tensor([bucket]), self._member, what))
        what = f"bucket {bucket} of {self._num_buckets} from trainer rank {self._server}"
        messages.append(start(group.receive, torch.zeros(1, dtype=torch.int64), self._member, what))

    def complete(self, bucket: int, group: MessageGroup, deadline: float) -> torch.Tensor:
        """Wait for a bucket that was posted; as `Inbox.complete`."""
        for message in self._posted.pop(bucket):
            finish(group, message, deadline)
        return self._memory[bucket % NUM_BUCKETS]


class WeightReader:
    """Reads the versions of one worker number for one engine. From version to version it keeps plan, stream, mapped memory,
    the engine's process group, and the bytes that a difference is added to."""

    def __init__(self, shape: ModelShape, worker: int) -> None:
        self._shape, self._worker = shape, worker
        self._key: tuple[Any, ...] | None = None  # identifies the plan and the stream
        self._plan: ReshardPlan
        self._stream: PieceStream
        # Elements that come with a version, by local parameter and by module; other elements are padding.
        self.elements: dict[str, int] = {}
        self.module_elements: Counter[str] = Counter()
        self._addresses: tuple[str, ...] = ()
        self._mapped: list[tuple[LocalBox, torch.Tensor]] = []  # of each piece, where it belongs and where it lies
        self._works: Works | None = None  # into which the pieces are divided
        self._store: tuple[tuple[str, int], dist.TCPStore] | None = None
        self._group: tuple[tuple[Any, ...], MessageGroup] | None = None  # store, engine and number of the group
        self._inbox: Inbox | HandedOver | None = None
        self._inbox_key: tuple[Any, ...] = ()  # stream, and handle of the server's buckets
        self.times = ReadTimes()
        self.is_complete = False  # whether the last version was read to its end

    def read(self, manifest: WeightManifest, engine: int, writer: Writer) -> Generator[LocalBox, None, None]:
        """Write every box of a version to its place, and yield each box once it is written, except those that threads write.
        Boxes come in pieces, in the order of the buckets: several modules are incomplete at a time.

        A caller that stops early must close the generator, so that nobody waits for this worker. Boxes in host buckets are
        verified before they are written; boxes in device buckets, and mapped boxes, at the end.

        Raises SyncError naming the first box that differs, or what did not come in time.
        """
        self.times, self.is_complete = ReadTimes(), False
        deadline = time.monotonic() + manifest.worker_waits * manifest.timeout_s
        try:
            self._prepare(manifest)
            group = self._join(manifest, engine)
            if manifest.transport == "mapped":
                yield from self._read_mapped(manifest, group, deadline, writer)
            else:
                yield from self._read_buckets(manifest, engine, group, deadline, writer)
            self.times.received_bytes = int(self._stream.size.sum())
            self.is_complete = True
        finally:
            if not self.is_complete:
                self.leave()
            if platform.frees_once_unmapped and self._mapped:
                # A rank that offloads its weights frees them after the sync.
                platform.settle()
                self._addresses, self._mapped = (), []

    def leave(self) -> None:
        """Leave the group, so that waits of the trainer ranks fail at once."""
        if self._group is not None:
            self._group[1].leave()
            self._group = None

    def close(self) -> None:
        self.leave()
        self._addresses, self._mapped = (), []
        self._store = self._inbox = None

    def _join(self, manifest: WeightManifest, engine: int) -> MessageGroup:
        """Join the engine's group. Raises SyncError."""
        address = manifest.host, manifest.port
        key = address, engine, manifest.groups[engine]  # new trainers number their groups from the first
        if self._group is None or self._group[0] != key:
            self.leave()
            if self._store is None or self._store[0] != address:
                self._store = address, open_store(*address, manifest.timeout_s, owner=False)
            member = len(manifest.ranks_of(engine)) + self._worker
            self._group = key, open_group(self._store[1], manifest, engine, member)
        return self._group[1]

    def _read_mapped(
        self, manifest: WeightManifest, group: MessageGroup, deadline: float, writer: Writer
    ) -> Iterator[LocalBox]:
        """Copy all boxes from the ranks' memory, and hash the copies. The ranks compute their checksums once everything is
        copied, and the worker compares."""
        times, source, version = self.times, self._stream.source, manifest.version
        self._map(manifest, writer)
        hashes: list[tuple[Sequence[int], torch.Tensor]] = []  # numbers of pieces, and their checksums

        def copy(numbers: Sequence[int], spare: SpareMemory | None = None) -> float:
            """Copy pieces and hash the copies; return the seconds for the hashes."""
            pieces = [self._mapped[number] for number in numbers]
            places = [writer.place(box, spare) for box, _ in pieces]
            # One call copies them all. After each call a thread waits for the GIL, which another thread may hold.
            torch._foreach_copy_(places, [content for _, content in pieces])
            begun = time.perf_counter()
            hashes.append((numbers, checksums(places, version, numbers)))
            return time.perf_counter() - begun

        def do(numbers: Sequence[int], spare: SpareMemory) -> tuple[float, float]:
            verify_s = copy(numbers, spare)
            begun = time.perf_counter()
            for owner in dict.fromkeys(self._mapped[number][0].owner for number in numbers):
                writer.written(owner)
            spare.take_back()
            return verify_s, time.perf_counter() - begun

        if self._works is not None:
            threads = num_threads(self._works, manifest.rollout.workers)
            seconds = np.array(in_threads(self._works, threads, do)).reshape(-1, 2).sum(axis=0)
            times.verify_s, times.pack_s = (seconds / threads).tolist()
        else:
            for number, (box, _) in enumerate(self._mapped):
                times.verify_s += copy([number])
                yield box
        begun = time.perf_counter()
        order = np.concatenate([numbers for numbers, _ in hashes])
        assert len(order) == len(source), "each piece is copied once"
        taken = torch.empty(len(source), dtype=torch.int64)
        taken[order] = torch.cat([sums for _, sums in hashes]).cpu()  # verification waits for the device only here
        times.verify_s += time.perf_counter() - begun
        copied = torch.tensor([version])
        expected = {rank: np.flatnonzero(source == rank) for rank in np.unique(source).tolist()}
        received = {rank: torch.zeros(len(numbers), dtype=torch.int64) for rank, numbers in expected.items()}
        ends = [start(group.send, copied, rank, f"that all is copied, to trainer rank {rank}") for rank in expected]
        answers = [start(group.receive, sums, rank, f"checksums of trainer rank {rank}") for rank, sums in received.items()]
        writer.finish()
        begun = time.perf_counter()
        for message in (*answers, *ends):
            finish(group, message, deadline)
        times.verify_wait_s += time.perf_counter() - begun
        for rank, numbers in expected.items():
            wrong = numbers[(taken[numbers] != received[rank]).numpy()]
            if len(wrong):
                which = self._plan.describe(self._stream.copy[wrong[0]])
                raise SyncError(f"weight version {version}: wrong bytes in piece {wrong[0]} of {len(source)}, {which}")

    def _map(self, manifest: WeightManifest, writer: Writer) -> None:
        """Map the parameters of all ranks, unless these have not moved since the last version."""
        if self._addresses == manifest.addresses:
            return
        self._addresses, self._mapped = (), []  # nothing is left of it after a failure
        stream, pieces = self._stream, np.arange(len(self._stream.source))
        ranks = {rank: map_parameters(manifest.addresses[rank], rank) for rank in np.unique(stream.source).tolist()}
        ends = zip(stream.at_source(self._plan, pieces), stream.at_destination(self._plan, pieces), strict=True)
        self._mapped = [
            (there.box, here.box.within(ranks[source][here.box.parameter]))
            for (here, there), source in zip(ends, stream.source.tolist(), strict=True)
        ]
        self._works = writer.works([box for box, _ in self._mapped], manifest.bucket_bytes)
        self._addresses = manifest.addresses

    def _read_buckets(
        self, manifest: WeightManifest, engine: int, group: MessageGroup, deadline: float, writer: Writer
    ) -> Iterator[LocalBox]:
        """Take, verify and write bucket after bucket. Raises SyncError where the buckets of the server cannot be mapped."""
        times, stream, version, servers = self.times, self._stream, manifest.version, manifest.servers
        handle = manifest.addresses[engine * manifest.rollout.workers + self._worker] if servers else ""
        if self._inbox is None or self._inbox_key != (stream, handle):
            self._inbox, self._inbox_key = None, (stream, handle)  # nothing is left of it after a failure
            if servers:
                server = servers[engine][self._worker]
                self._inbox = HandedOver(handle, server, manifest.ranks_of(engine).index(server), stream.num_buckets)
            else:
                self._inbox = Inbox(stream, bucket_memory(stream.capacity, manifest.on_device), manifest)
        inbox = self._inbox
        inbox.begin(manifest)

        def post(bucket: int) -> None:
            if bucket < stream.num_buckets:
                with group.together():
                    inbox.post(bucket, group)

        for bucket in range(NUM_BUCKETS):
            post(bucket)
        differs: list[tuple[int, Part, torch.Tensor]] = []  # of parts on a device, whether the checksum does
        for bucket, parts in enumerate(stream.parts):
            begun = time.perf_counter()
            memory = inbox.complete(bucket, group, deadline)
            taken = time.perf_counter()
            times.wait_s += taken - begun
            for part in parts:
                sent = memory[part.check : part.end].view(torch.int64)[0]
                differ = checksum(memory[part.start : part.check], version, bucket) != sent
                if memory.device.type != "cpu":
                    differs.append((bucket, part, differ))
                elif differ:
                    raise self._wrong(version, bucket, part)
            times.verify_s += time.perf_counter() - taken
            for piece in stream.at_destination(self._plan, np.arange(*stream.starts[bucket : bucket + 2])):
                content, box = memory[piece.start : piece.end], piece.box
                if piece.scale_bytes:
                    blocks = blocks_in(content, box.rows, box.cols)
                    writer.place(box).copy_(blocks.weight)
                    writer.place(scales_of(box)).copy_(blocks.weight_scale_inv)
                else:
                    writer.place(box).copy_(content.view(box.dtype).view(box.rows, box.cols))
                yield box
            post(bucket + NUM_BUCKETS)
        begun = time.perf_counter()
        wrong = torch.stack([differ for *_, differ in differs]).cpu() if differs else torch.zeros(0)
        times.verify_s += time.perf_counter() - begun  # verification waits for the device only here
        if wrong.any():
            bucket, part, _ = differs[int(wrong.nonzero()[0])]
            raise self._wrong(version, bucket, part)
        writer.finish()
        if inbox.parts is not None:
            inbox.parts.version = version

    def _wrong(self, version: int, bucket: int, part: Part) -> SyncError:
        first, last = (self._plan.describe(self._stream.copy[part.pieces[end]]) for end in (0, -1))
        where = f"bucket {bucket} of {self._stream.num_buckets} from trainer rank {part.source_rank}"
        return SyncError(f"weight version {version}: wrong bytes in {where}: {first}, to {last}")

    def _prepare(self, manifest: WeightManifest) -> None:
        # What decides into which pieces the weights are cut.
        form = manifest.by_layer, manifest.precision, manifest.transport, manifest.bucket_bytes, manifest.quantization
        key = manifest.plan_hash, *form
        if self._key == key:
            return
        plan = sync_plan(self._shape, manifest.layout, manifest.rollout, manifest.mode)
        if plan.hash != manifest.plan_hash:
            raise SyncError(
                f"weight version {manifest.version}: the trainer's reshard plan {manifest.plan_hash[:12]} is not "
                f"this worker's {plan.hash[:12]}; both must run the same megarl on the same model"
            )
        self._plan, copies = plan, plan.to_destination(self._worker)
        self._stream = sync_stream(self._shape, plan, self._worker, manifest)
        self._addresses, self._mapped = (), []
        covered = np.bincount(plan.destination_parameter[copies], plan.sizes[copies], len(plan.destination_parameters))
        self.elements = dict(zip(plan.destination_parameters, covered.astype(int).tolist(), strict=True))
        self.module_elements = Counter()
        for parameter, elements in self.elements.items():
            self.module_elements[parameter.rpartition(".")[0]] += elements
        self._key = key


class WholeTensors(Writer):
    """A writer for checkpoint mode, where the boxes' parameters are checkpoint tensors of `sizes` (rows, columns)."""

    def __init__(self, sizes: Mapping[str, tuple[int, int]], device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self._tensors: dict[str, torch.Tensor] = {}
        self._missing: dict[str, int] = {}

    def place(self, box: LocalBox, spare: SpareMemory | None = None) -> torch.Tensor:
        if box.parameter not in self._tensors:
            size = self._sizes[box.parameter]
            # Each tensor has memory of its own, as `load_checkpoint_tensors` needs.
            self._tensors[box.parameter] = torch.empty(size, dtype=box.dtype, device=self._device)
            self._missing[box.parameter] = size[0] * size[1]
        return box.within(self._tensors[box.parameter])

    def written(self, owner: str) -> None:
        """No thread writes."""

    def finish(self) -> None:
        """The consumer of `complete` does the rest."""

    def complete(self, boxes: Iterator[LocalBox]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the content of each tensor once all its boxes are written; `boxes` come from `read`."""
        for box in boxes:
            self._missing[box.parameter] -= box.rows * box.cols
            if not self._missing[box.parameter]:
                tensor = self._tensors.pop(box.parameter)
                yield box.parameter, tensor[:, 0] if tensor.shape[1] == 1 else tensor
