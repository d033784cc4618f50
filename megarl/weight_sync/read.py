"""The rollout worker's end of a sync: open the transport, take bucket after bucket, verify each, and hand out its boxes."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.models import ModelShape
from megarl.platform import current as platform
from megarl.weight_sync.checks import DeviceChecks, HostChecks
from megarl.weight_sync.codec import TakenParts, read_blocks
from megarl.weight_sync.copies import RELEASE_PIECES, Box, Copies, Works, num_copy_threads
from megarl.weight_sync.in_place import Home, Pieces, piece_checksum, words_of
from megarl.weight_sync.manifest import DTYPES, SyncAborted, SyncError, WeightManifest
from megarl.weight_sync.plan import ReshardPlan, sync_plan
from megarl.weight_sync.point_to_point import MessageGroup, PointToPointReceiver, open_group, open_store
from megarl.weight_sync.ring import Ring, RingReceiver, RingSender
from megarl.weight_sync.segment import PREFIX, ROOT, sweep
from megarl.weight_sync.stream import Piece, Stream, copy_order, sync_stream
from megarl.weight_sync.transport import TRANSPORTS, wait_until

# Divides all boxes that are read in place into works; boxes of no work are handed out.
FindWorks = Callable[[Sequence[Box]], Works]


def no_works(boxes: Sequence[Box]) -> Works:
    """Have all boxes handed out."""
    return Works()


@dataclass
class ReadTimes:
    """What a reader did for one version: seconds of waiting for buckets, of checksums and of finishing works, and bytes of
    boxes. Seconds of several threads are divided by their number."""

    wait_s: float = 0.0
    verify_s: float = 0.0
    pack_s: float = 0.0
    received_bytes: int = 0


class Link:
    """Opens a worker's end of its stream. Between two syncs it keeps the mapped rings, the process group with the trainer
    ranks, and the bytes that a difference is added to."""

    def __init__(self) -> None:
        self._ring: tuple[tuple[str, int, int], Ring] | None = None  # name, capacity and engines that the ring belongs to
        self._group: tuple[tuple[int, int], MessageGroup] | None = None  # engine and meeting of the group
        self._store: tuple[tuple[str, int], dist.TCPStore] | None = None
        self._parts: TakenParts | None = None

    def open(
        self, manifest: WeightManifest, stream: Stream, engine: int, worker: int
    ) -> RingReceiver | PointToPointReceiver:
        """Open the end of the manifest's transport. Raises SyncError where the other end is not there in time, SyncAborted
        where the other end is the leading engine."""
        name, timeout_s = manifest.rings[worker], manifest.timeout_s
        if not TRANSPORTS[manifest.transport].messages:
            ring = self._mapped(name, manifest.layout.ranks, manifest, stream, owner=False)
            self._begin(ring, manifest, engine, manifest.leading[0])
            return RingReceiver(ring, stream, manifest.session, engine, timeout_s)
        leader = manifest.leaders[engine]
        # A restarted leader makes a new ring: nothing that is left in the old ring can count.
        name = f"{name}-{leader}-{manifest.meetings[leader]}"
        if leader != engine and not wait_until((ROOT / f"{PREFIX}{name}").exists, timeout_s):
            raise SyncAborted(
                f"begin: engine {leader}, which leads, made no buckets to read within weight_sync.timeout_s = {timeout_s:g}"
            )
        ring = self._mapped(name, 1, manifest, stream, owner=leader == engine)
        self._begin(ring, manifest, engine, leader)
        if leader != engine:
            self._parts = None  # of a version that it received as a leading engine
            return RingReceiver(ring, stream, manifest.session, engine, timeout_s, leader)
        try:
            group = self._join(manifest, engine, manifest.layout.ranks + worker)
        except SyncError:
            relay = RingSender([ring], [stream], 0, timeout_s, None)
            relay.begin_for(manifest.session, manifest.followers[engine])
            relay.abort()  # the followers need not wait
            raise
        if manifest.wire == "delta" and (self._parts is None or self._parts.stream is not stream):
            self._parts = TakenParts(stream)
        followers = manifest.followers[engine]
        return PointToPointReceiver(ring, stream, group, manifest, followers, self._leave, self._parts)

    def completed(self, version: int) -> None:
        """Record that all of a version was read and verified."""
        if self._parts is not None:
            self._parts.version = version

    def close(self) -> None:
        if self._ring is not None:
            self._ring[1].close()
        self._leave()
        self._ring = self._store = self._parts = None

    def _begin(self, ring: Ring, manifest: WeightManifest, engine: int, leader: int) -> None:
        """Wait for the buckets; on a device they belong to the worker of the leading engine."""
        session, timeout_s = manifest.session, manifest.timeout_s
        if ring.on_device and engine == leader:
            ring.offer(session)
        if not ring.begin(session, leader, timeout_s):
            raise SyncAborted(
                f"begin: engine {leader}, which leads, offered no buckets within weight_sync.timeout_s = {timeout_s:g}"
            )

    def _mapped(self, name: str, num_writers: int, manifest: WeightManifest, stream: Stream, owner: bool) -> Ring:
        key = (name, stream.capacity, manifest.num_engines)
        if self._ring is None or self._ring[0] != key:
            if self._ring is not None:
                self._ring[1].close()
                self._ring = None
            if owner:
                sweep()
            on_device = TRANSPORTS[manifest.transport].on_device
            ring = Ring(name, num_writers, manifest.num_engines, stream.capacity, on_device, create=owner)
            self._ring = key, ring
        return self._ring[1]

    def _join(self, manifest: WeightManifest, engine: int, member: int) -> MessageGroup:
        if self._store is None or self._store[0] != manifest.store:
            self._leave()  # its trainers are gone; new trainers count their meetings from the first
            self._store = manifest.store, open_store(*manifest.store, manifest.timeout_s, owner=False)
        key = (engine, manifest.meetings[engine])
        if self._group is None or self._group[0] != key:
            self._leave()  # leave the old group first: its members then see that it is gone
            self._group = key, open_group(self._store[1], manifest, engine, member)
        return self._group[1]

    def _leave(self) -> None:
        """Leave the group, so that pending messages on the other side fail at once."""
        if self._group is not None:
            self._group[1].leave()
            self._group = None


class StreamReader:
    """Reads the stream of one worker number for one engine. Plan, stream and transport are set up at the first version and
    kept."""

    def __init__(self, shape: ModelShape, worker: int) -> None:
        self._shape, self._worker = shape, worker
        self._key: tuple[Any, ...] | None = None  # identifies the plan and the stream
        self._plan: ReshardPlan
        self._stream: Stream
        self._elements: dict[str, int] = {}
        # By bucket: its address in memory, and its boxes there, each with its piece.
        self._boxes: dict[int, tuple[int, list[tuple[Box, Piece]]]] = {}
        self._checks: DeviceChecks | None = None  # of buckets on a device
        self._pieces: Pieces
        self._homes: list[Home] = []
        self._in_place: list[Box] = []  # boxes that are read in place
        self._works = Works()
        self._link = Link()
        self.times = ReadTimes()

    def boxes(
        self,
        manifest: WeightManifest,
        engine: int,
        meanwhile: Callable[[], None] = lambda: None,
        works: FindWorks = no_works,
    ) -> Generator[Box, None, None]:
        """Yield every box of a version, layer by layer; a box larger than a bucket comes in pieces.

        The content of a box is overwritten after the next box was requested. A caller that stops early must close the
        generator. Boxes in host buckets are verified before they are yielded; boxes in device buckets, or read in place, at
        the end. `meanwhile` is called after the last box, while ranks make the checksums of what was read in place.

        Boxes that are read in place and belong to a work are not yielded: all works are done first, and their boxes hashed
        where they were copied to. `works` is called once the memory is mapped; its works are done in every later version
        that is read there.

        Raises SyncError naming the first box that differs, or what did not come in time.
        """
        self.times = ReadTimes()
        self._prepare(manifest, engine)
        end = self._link.open(manifest, self._stream, engine, self._worker)
        if self._checks is not None:
            self._checks.begin(manifest.version)
        complete = False
        try:
            if manifest.homes:
                assert isinstance(end, RingReceiver), "only what shares memory is read in place"
                yield from self._read_in_place(manifest, end, meanwhile, works)
            for bucket in () if manifest.homes else range(self._stream.num_buckets):
                yield from self._bucket(manifest, bucket, end)
                end.release(bucket)
            if not manifest.homes:
                if self._checks is not None:
                    begun = time.perf_counter()
                    wrong = self._checks.wrong()  # the only time that verification waits for the device
                    self.times.verify_s += time.perf_counter() - begun
                    if wrong:
                        raise self._wrong(manifest, wrong[0])
                meanwhile()
            self._link.completed(manifest.version)
            complete = True
        finally:
            if not complete:
                end.give_up()

    def elements(self, parameter: str) -> int:
        """Elements of a local parameter that come with a version; its other elements are padding."""
        return self._elements[parameter]

    def close(self) -> None:
        self._let_go()
        self._link.close()

    def _let_go(self) -> None:
        """Drop all views of memory that other processes own."""
        self._boxes, self._in_place, self._works, self._homes = {}, [], Works(), []

    def _read_in_place(
        self, manifest: WeightManifest, end: RingReceiver, meanwhile: Callable[[], None], works: FindWorks
    ) -> Iterator[Box]:
        """Do all works, then yield the other boxes where they lie, and hash them there. When everything was read the ranks
        make their sums, which are then compared."""
        times, pieces, begun = self.times, self._pieces, time.perf_counter()
        if tuple(home.address for home in self._homes) != manifest.homes:
            self._let_go()
            dtype, in_place = DTYPES[manifest.precision], list[Box]()
            homes = [Home(address, rank, dtype) for rank, address in enumerate(manifest.homes)]
            for number, source in enumerate(pieces.source.tolist()):
                content = homes[source].box(pieces.at_source(self._plan, number))
                to = pieces.at_destination(self._plan, number)
                in_place.append(Box(to.parameter, to.row, to.col, content, None, words_of(content)))
            # Set together at the end: a failure above leaves no half of them to the next version.
            self._works, self._in_place, self._homes = works(in_place), in_place, homes
        times.wait_s += time.perf_counter() - begun
        words = [box.in_words for box in self._in_place]
        num_threads = min(num_copy_threads(manifest.rollout.workers), self._works.most_threads)
        copies = Copies(words, self._works.each, manifest.version, num_threads)
        copies.run(lambda count: end.release(count - 1))
        times.verify_s, times.pack_s, sums = copies.verify_s, copies.pack_s, copies.sums
        for count, number in enumerate(copies.left):
            yield self._in_place[number]
            begun = time.perf_counter()
            sums[number] = piece_checksum(words[number], manifest.version, number)
            if count % RELEASE_PIECES == 0:
                end.release(number)
            times.verify_s += time.perf_counter() - begun
        times.received_bytes += sum(part.nbytes for part in words)
        end.release(len(pieces) - 1)
        meanwhile()
        begun = time.perf_counter()
        sent_sums = end.sums(np.unique(pieces.source), len(pieces))
        times.wait_s += time.perf_counter() - begun
        wrong = np.flatnonzero(sums != sent_sums)
        if len(wrong):
            which = self._plan.describe(pieces.copy[wrong[0]])
            raise SyncError(f"weight version {manifest.version}: wrong bytes in piece {wrong[0]} of {len(pieces)}, {which}")
        # Raises where this engine was given up before it had read all: later reads may be of another version.
        end.release(len(pieces))

    def _bucket(self, manifest: WeightManifest, bucket: int, end: RingReceiver | PointToPointReceiver) -> Iterator[Box]:
        """Take a bucket; yield each box as soon as its bytes are verified, while they are in the cache."""
        begun = time.perf_counter()
        memory = end.take(bucket)
        times, taken = self.times, time.perf_counter()
        times.wait_s += taken - begun
        place, boxes = self._boxes.get(bucket, (0, []))
        if place != memory.data_ptr():
            dtype, boxes = DTYPES[manifest.precision], []
            for piece in self._stream.at_destination(self._plan, bucket):
                content, scales = memory[piece.start : piece.end], None
                if piece.scale_bytes:
                    content, scales = read_blocks(content, piece.rows, piece.cols)
                else:
                    content = content.view(dtype).view(piece.rows, piece.cols)
                boxes.append((Box(piece.parameter, piece.row, piece.col, content, scales), piece))
            self._boxes[bucket] = memory.data_ptr(), boxes
        begun = time.perf_counter()
        host = HostChecks(memory, manifest.version, bucket) if self._checks is None else None
        if self._checks is not None:
            self._checks.compare(bucket, memory)
        for box, piece in boxes:
            if host is not None and host.is_wrong(piece):
                raise self._wrong(manifest, piece.number)
            times.verify_s += time.perf_counter() - begun
            times.received_bytes += piece.end - piece.start
            yield box
            begun = time.perf_counter()

    def _wrong(self, manifest: WeightManifest, piece: int) -> SyncError:
        which = self._plan.describe(self._stream.copy[piece])
        where = f"bucket {self._stream.bucket[piece]} of {self._stream.num_buckets}"
        return SyncError(f"weight version {manifest.version}: wrong bytes in {where}, {which}")

    def _prepare(self, manifest: WeightManifest, engine: int) -> None:
        workers = manifest.rollout.workers
        order = manifest.leaders[engine] if manifest.orders > 1 else 0  # the order of the leading engine
        turn = None if manifest.by_layer else (order * workers + self._worker, manifest.orders * workers)
        on_device, sampled = TRANSPORTS[manifest.transport].on_device, manifest.verify == "sampled"
        form = manifest.precision, manifest.bucket_bytes, manifest.quantization
        key = (manifest.plan_hash, *form, turn, on_device, sampled)
        if self._key == key:
            return
        plan = sync_plan(self._shape, manifest.layout, manifest.rollout, manifest.mode)
        if plan.hash != manifest.plan_hash:
            raise SyncError(
                f"weight version {manifest.version}: the trainer's reshard plan {manifest.plan_hash[:12]} is not "
                f"this worker's {plan.hash[:12]}; both must run the same megarl on the same model"
            )
        self._plan = plan
        copies = copy_order(plan, self._worker, turn)
        dtype = DTYPES[manifest.precision]
        self._stream = sync_stream(self._shape, plan, self._worker, turn, dtype, *form[1:])
        covered = np.bincount(plan.destination_parameter[copies], plan.sizes[copies], len(plan.destination_parameters))
        self._let_go()
        self._pieces = Pieces.of(plan, copies, dtype.itemsize)
        self._checks = DeviceChecks(self._stream, platform.current_device(), sampled) if on_device else None
        self._elements = dict(zip(plan.destination_parameters, covered.astype(int).tolist(), strict=True))
        self._key = key


def whole_tensors(boxes: Iterable[Box], sizes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Join boxes, in any order, into checkpoint tensors, for checkpoint mode; yields each tensor once it is complete.

    The boxes' parameters are checkpoint names; `sizes` are (rows, columns) of the tensors. Every tensor has its own memory,
    as `load_checkpoint_tensors` needs. Tensors that stay incomplete are not yielded.
    """
    filled: dict[str, torch.Tensor] = {}
    missing: dict[str, int] = {}
    for box in boxes:
        name, (rows, columns) = box.parameter, box.content.shape
        if name not in filled:
            filled[name] = torch.empty(sizes[name], dtype=box.content.dtype, device=box.content.device)
            missing[name] = filled[name].numel()
        filled[name][box.row : box.row + rows, box.col : box.col + columns] = box.content
        missing[name] -= rows * columns
        if not missing[name]:
            tensor = filled.pop(name)
            yield name, tensor[:, 0] if tensor.shape[1] == 1 else tensor
