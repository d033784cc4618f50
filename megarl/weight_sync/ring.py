"""Buckets that processes of one machine share and reuse, with counters that say who has written and read what.

The counters are in /dev/shm. The buckets are there too, or in the memory of a device (`on_device`). Then one worker of the
leading engine owns them: a trainer rank casts and writes a box to the place where it is read in one step over NVLink, and
no other process needs memory for it. The owner offers its buckets anew in each session with a handle.

All engines read the same buckets: K engines cost one copy. A counter holds a session in its upper half, so counters of an
earlier sync, or of a process that should be dead, never count. A reader sees a counter only after the bytes it stands for:
stores keep their order on x86, and elsewhere a bucket that was read too early fails its checksums; a device has finished
(`platform.settle`) before a counter is raised.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from megarl.platform import current as platform
from megarl.weight_sync.manifest import SyncAborted, SyncError, SyncLate, WeightManifest
from megarl.weight_sync.segment import SharedSegment
from megarl.weight_sync.stream import ALIGNMENT, Stream
from megarl.weight_sync.transport import ENGINE_WAITS, FOLLOWER_WAITS, NUM_BUCKETS, READ_LOOK_S, wait_until

COUNTER_BYTES = 8
SESSION_SHIFT = 32
HANDLE_BYTES = 1024
# By engine: how far it had read when it last advanced, and when that was.
Progress = dict[int, tuple[tuple[int, ...], float]]


class Ring:
    """One stream's buckets and counters, mapped into this process.

    `written` [trainer ranks]: buckets that a rank has completed. `read` [engines]: buckets that an engine's worker has read.
    `gone` [engines]: nobody waits for this engine. `aborted` [1]: the trainer rank that failed, from 1. `offered` [1]: the
    session for which the handle of the buckets holds. Buckets on a device are empty until they are offered, or reached.
    """

    def __init__(
        self, name: str, num_ranks: int, num_engines: int, capacity: int, on_device: bool = False, *, create: bool
    ) -> None:
        """Create a ring, or map a ring of this machine.

        Raises ValueError where shared memory is too small, SyncError where the ring is missing or has another size."""
        control = -(-(num_ranks + 2 * num_engines + 2) * COUNTER_BYTES // ALIGNMENT) * ALIGNMENT
        size = control + (HANDLE_BYTES if on_device else NUM_BUCKETS * capacity)
        if create:
            smaller = f", or lower weight_sync.bucket_bytes: {NUM_BUCKETS} buckets have {capacity} bytes each"
            segment = SharedSegment.create(name, size, "" if on_device else smaller)
        else:
            try:
                segment = SharedSegment.open(name)
            except FileNotFoundError as error:
                raise SyncError(
                    f"no shared memory {name!r} on this machine: its owner is gone; or engines and trainer run on two "
                    "machines, and weight_sync.transport = shared_memory and cuda_ipc need one"
                ) from error
            if segment.num_bytes != size:
                segment.close()
                raise SyncError(f"shared memory {name!r} of {segment.num_bytes} bytes, not {size}")
        self._segment, self._capacity, self.on_device = segment, capacity, on_device
        counters = segment.data[:control].view(np.uint64)
        ends = np.cumsum([num_ranks, num_engines, num_engines, 1, 1])
        parts = (counters[a:b] for a, b in zip([0, *ends], ends, strict=False))
        self.written, self.read, self.gone, self.aborted, self.offered = parts
        self._shown = segment.data[control : control + HANDLE_BYTES]
        self._handle = b""  # of the buckets that this process has
        self._owned: tuple[torch.Tensor, bytes] | None = None  # this process's own buckets and their handle
        buckets = torch.empty(0, dtype=torch.uint8) if on_device else torch.from_numpy(segment.data[control:])
        self.buckets = buckets.view(NUM_BUCKETS, -1)

    def offer(self, session: int) -> None:
        """Own the buckets of a session, in memory of this process's device that is allocated at the first session."""
        if self._owned is None:
            self._owned = platform.shared_device_bytes(NUM_BUCKETS * self._capacity)
        memory, self._handle = self._owned
        assert len(self._handle) < HANDLE_BYTES, f"a handle of {len(self._handle)} bytes"
        self.buckets = memory.view(NUM_BUCKETS, -1)
        self._shown[:] = 0
        self._shown[: len(self._handle)] = np.frombuffer(self._handle, dtype=np.uint8)
        self.offered[0] = _mark(session)

    def reached(self, session: int) -> bool:
        """Whether this process has the buckets of a session. Raises SyncError for memory that it cannot reach."""
        if not self.on_device:
            return True
        if self.offered[0] != _mark(session):
            return False
        handle = self._shown.tobytes().rstrip(b"\0")
        if handle != self._handle:
            try:
                memory = platform.reach_device_bytes(handle)
            except RuntimeError as error:
                raise SyncError(f"cannot reach the buckets of {self._segment.name!r}: {error}") from error
            if len(memory) != NUM_BUCKETS * self._capacity:
                raise SyncError(f"buckets of {len(memory)} bytes, not {NUM_BUCKETS * self._capacity}")
            self.buckets, self._handle = memory.view(NUM_BUCKETS, -1), handle
        return True

    def begin(self, session: int, leader: int, timeout_s: float, look: Callable[[], None] | None = None) -> bool:
        """Wait for the buckets of a session; False where the leading engine is gone or late. `look` may raise."""
        wait_until(lambda: self.reached(session) or self.is_gone(leader, session), timeout_s, look)
        return self.reached(session)

    def use_private_buckets(self) -> None:
        """Give a rank buckets to fill that nobody reads, where no engine offered any."""
        self.buckets, self._handle = platform.device_bytes(NUM_BUCKETS * self._capacity).view(NUM_BUCKETS, -1), b""

    def bucket(self, number: int) -> torch.Tensor:
        """Memory of a bucket, uint8 [capacity]."""
        return self.buckets[number % NUM_BUCKETS]

    @property
    def table(self) -> np.ndarray:
        """The memory of all buckets, uint64, for the checksums of what is read in place."""
        return self.buckets.view(-1).numpy().view(np.uint64)

    def is_gone(self, engine: int, session: int) -> bool:
        return bool(self.gone[engine] >= _mark(session))

    def close(self) -> None:
        empty = np.empty(0, dtype=np.uint64)
        self.written = self.read = self.gone = self.aborted = self.offered = empty
        self._shown = np.empty(0, dtype=np.uint8)
        self.buckets, self._owned = torch.empty(0, dtype=torch.uint8), None
        self._segment.close()


class RingSender:
    """A writer's end of the rings of all streams; `rank` is its position in `written`.

    The rank that looks after the engines has a `watch`, which is called while it waits.
    """

    def __init__(
        self, rings: Sequence[Ring], streams: Sequence[Stream], rank: int, timeout_s: float, watch: Callable[[], None] | None
    ) -> None:
        self._rings, self._streams, self._rank, self._timeout_s, self._watch = rings, streams, rank, timeout_s, watch
        self._session, self._engines = 0, np.empty(0, dtype=np.int64)
        self.sent_bytes = 0  # since `begin`, with checksums
        self.lost: dict[int, str] = {}  # engines that this rank gave up since `begin`, with the reason

    @property
    def buckets(self) -> torch.Tensor:
        return self._rings[0].buckets

    def begin(self, manifest: WeightManifest) -> None:
        """Start over for the engines of a manifest. Give up a leading engine that does not offer its device's buckets in
        time, and all engines that read there."""
        self.begin_for(manifest.session, manifest.engines)
        leader = manifest.leading[0]
        for worker, ring in enumerate(self._rings):
            why = f"begin: engine {leader} offered no buckets for worker {worker}"
            try:
                reached = ring.begin(self._session, leader, self._timeout_s, self._look)
            except SyncAborted:
                raise
            except SyncError as error:  # the engine died meanwhile, or no other process reaches its memory
                reached, why = False, f"begin: worker {worker} of engine {leader}: {error}"
            if not reached:
                ring.use_private_buckets()
                for engine in manifest.engines:
                    self.lost.setdefault(engine, why)
                    self.lose(engine)

    def begin_for(self, session: int, engines: Sequence[int]) -> None:
        """Start over for some readers, not all engines of a manifest."""
        self._session, self._engines = session, np.array(engines, dtype=np.int64)
        self.sent_bytes, self.lost = 0, {}

    def has_room(self, worker: int, bucket: int) -> bool:
        """Whether every engine has read the previous content of a bucket's memory."""
        return not len(self._behind(worker, bucket + 1 - NUM_BUCKETS))

    def serves(self, worker: int) -> bool:
        """Whether a stream has to be written: always, since rank 0 waits for the parts of every rank, whoever reads them."""
        return True

    def room(self, worker: int, bucket: int) -> torch.Tensor:
        """Wait until a bucket may be written; its memory, uint8 [capacity]. Gives up engines that read nothing until the
        deadline: they take no further part in this sync, and their reports say so. Raises SyncAborted where another rank
        failed."""
        if not wait_until(partial(self.has_room, worker, bucket), self._timeout_s, self._look):
            for engine in self._behind(worker, bucket + 1 - NUM_BUCKETS):
                self.lost[int(engine)] = f"room: bucket {bucket} of worker {worker} was not read"
                self.lose(int(engine))
        self._look()
        return self._rings[worker].bucket(bucket)

    def send(self, worker: int, bucket: int) -> None:
        """Send this rank's part of the bucket that `room` gave last."""
        platform.settle()
        self._rings[worker].written[self._rank] = _mark(self._session, bucket + 1)
        part = self._streams[worker].part(bucket, self._rank)
        self.sent_bytes += 0 if part is None else part.end - part.start

    def seal(self, worker: int, numbers: np.ndarray, sums: Sequence[int], num_bytes: int) -> None:
        """Publish the checksums of what a worker reads in place from this rank, by the numbers of the pieces."""
        self._rings[worker].table[numbers] = np.array(sums, dtype=np.uint64)
        self._rings[worker].written[self._rank] = _mark(self._session, 1)
        self.sent_bytes += num_bytes

    def wait_copied(self, num_pieces: Sequence[int]) -> None:
        """Wait until every engine's workers have read so many pieces, by worker: all that they read in place from this
        rank."""
        wait_until(partial(self._all_read, num_pieces, {}), math.inf, self._look, READ_LOOK_S)
        self._look()

    def wait_read(self, sources: Sequence[np.ndarray], num_reports: Sequence[int]) -> None:
        """On the rank that looks after the engines, wait until all workers have read and compared all that they read in
        place: each worker reports `num_reports` times, and reads from the ranks in `sources`."""
        if self._watch is None:
            return
        for worker, ranks in enumerate(sources):
            # Twice the deadline, as in `finish`: an engine may wait for a rank that is late.
            if not wait_until(partial(self._has_written, worker, ranks, 0), 2 * self._timeout_s, self._look):
                return
        self.wait_copied(num_reports)

    def _all_read(self, num_pieces: Sequence[int], progress: Progress) -> bool:
        """Whether nobody has to be waited for. The rank that looks after the engines gives up an engine that does not
        advance until the deadline; the other ranks wait for such an engine at most twice as long."""
        behind = {int(engine) for worker, count in enumerate(num_pieces) for engine in self._behind(worker, count)}
        waits = len(behind)
        for engine in behind:
            read, now = tuple(int(ring.read[engine]) for ring in self._rings), time.monotonic()
            last_read, since = progress.setdefault(engine, (read, now))
            if read != last_read:
                progress[engine] = read, now
            elif self._watch is None:
                waits -= now - since > 2 * self._timeout_s
            elif now - since > self._timeout_s:
                self.lost[engine] = "wait_read: it read no further"
                self.lose(engine)
        return waits == 0

    def finish(self) -> None:
        """On the rank that looks after the engines, wait until every other rank has found room for all of its parts. What is
        in a ring has left this rank's memory anyway."""
        if self._watch is None:
            return
        for worker, stream in enumerate(self._streams):
            for bucket, parts in enumerate(stream.parts):
                sources = np.array([part.source_rank for part in parts], dtype=np.int64)
                # Twice the deadline: the other ranks give up an engine at theirs. The next collective names a later rank.
                if not wait_until(partial(self._has_written, worker, sources, bucket), 2 * self._timeout_s, self._look):
                    return

    def lose(self, engine: int) -> None:
        """Stop waiting for an engine that is gone."""
        for ring in self._rings:
            ring.gone[engine] = _mark(self._session)

    def abort(self) -> None:
        """Tell the engines that this rank failed and sends no more."""
        for ring in self._rings:
            ring.aborted[0] = _mark(self._session, self._rank + 1)

    def close(self) -> None:
        for ring in self._rings:
            ring.close()

    def _behind(self, worker: int, num_read: int) -> np.ndarray:
        """Engines that have read less than `num_read` and are waited for."""
        if num_read <= 0:
            return self._engines[:0]
        read, gone = self._rings[worker].read[self._engines], self._rings[worker].gone[self._engines]
        return self._engines[(read < _mark(self._session, num_read)) & (gone != _mark(self._session))]

    def _has_written(self, worker: int, sources: np.ndarray, bucket: int) -> bool:
        return bool((self._rings[worker].written[sources] >= _mark(self._session, bucket + 1)).all())

    def _look(self) -> None:
        if self._watch is not None:
            self._watch()
        for ring in self._rings:
            _raise_aborted(ring, self._session, self._rank)


class RingReceiver:
    """An engine's end, in the worker of that number."""

    def __init__(
        self, ring: Ring, stream: Stream, session: int, engine: int, timeout_s: float, leader: int | None = None
    ) -> None:
        """Buckets come in parts from the trainer ranks, or whole from the `leader`, the leading engine of this node."""
        self._ring, self._session, self._engine, self._timeout_s = ring, session, engine, timeout_s
        self._leader = leader
        self._waits = ENGINE_WAITS if leader is None else FOLLOWER_WAITS
        sources = [[0] if leader is not None else [part.source_rank for part in parts] for parts in stream.parts]
        self._sources = [np.array(ranks, dtype=np.int64) for ranks in sources]

    def take(self, bucket: int) -> torch.Tensor:
        """Wait for all parts of a bucket; its bytes, uint8 [capacity]. Raises SyncError at the deadline."""
        sources, mark = self._sources[bucket], _mark(self._session, bucket + 1)
        if not wait_until(
            lambda: bool((self._ring.written[sources] >= mark).all()), self._waits * self._timeout_s, self._look
        ):
            late = ", ".join(map(str, sources[self._ring.written[sources] < mark]))
            who = f"trainer rank {late}" if self._leader is None else f"engine {self._leader}, which leads,"
            raise (SyncLate if self._leader is None else SyncAborted)(
                f"take: bucket {bucket} of {len(self._sources)} has nothing from {who} within "
                f"{self._waits} times weight_sync.timeout_s = {self._timeout_s:g}"
            )
        return self._ring.bucket(bucket)

    def release(self, bucket: int) -> None:
        """Allow the bucket to be written again."""
        self._look()
        platform.settle()
        self._ring.read[self._engine] = _mark(self._session, bucket + 1)

    def sums(self, sources: np.ndarray, count: int) -> np.ndarray:
        """Wait until all `sources` have sealed; the checksums of what is read in place, uint64 [count]. Raises SyncLate at
        the deadline."""
        ring, mark = self._ring, _mark(self._session, 1)
        if not wait_until(lambda: bool((ring.written[sources] >= mark).all()), ENGINE_WAITS * self._timeout_s, self._look):
            late = ", ".join(map(str, sources[ring.written[sources] < mark]))
            raise SyncLate(
                f"sums: no checksums from trainer rank {late} within {ENGINE_WAITS} times "
                f"weight_sync.timeout_s = {self._timeout_s:g}"
            )
        return ring.table[:count]

    def give_up(self) -> None:
        """Stop reading, so that nobody waits for this worker."""
        self._ring.gone[self._engine] = _mark(self._session)

    def _look(self) -> None:
        """Raise where another process failed, or this worker was given up: its bucket may then be overwritten while it
        reads."""
        if self._leader is None:
            _raise_aborted(self._ring, self._session, None)
        elif int(self._ring.aborted[0]) >> SESSION_SHIFT == self._session:
            raise SyncAborted(f"engine {self._leader}, which leads, failed and passes nothing on")
        if self._ring.is_gone(self._engine, self._session):
            # vLLM shows the failure of only one worker, so the message says where else to look.
            raise SyncAborted(
                "given up: another worker of this engine failed (the engine's log says why), or this one read nothing for "
                f"weight_sync.timeout_s = {self._timeout_s:g}"
            )


def _raise_aborted(ring: Ring, session: int, my_rank: int | None) -> None:
    value = int(ring.aborted[0])
    rank = value - int(_mark(session)) - 1
    if value >> SESSION_SHIFT == session and rank != my_rank:
        raise SyncAborted(f"trainer rank {rank} failed and sends no more")


def _mark(session: int, count: int = 0) -> np.uint64:
    """A counter's value in a session; values of earlier sessions are all smaller."""
    return np.uint64(session << SESSION_SHIFT | count)
