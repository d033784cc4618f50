"""The point-to-point transport: parts travel as messages from trainer ranks to workers, on any machines.

Each leading engine has its own process group, the trainer ranks and then its workers, so that an engine that dies breaks no
other group. The groups are independent of torch's default group and meet over a store of rank 0. The *leading* engine of a
node receives, and the other engines of the node read the buckets in its shared memory (see `ring.py`). So a node gets one
copy. A group that failed is not used again: both sides leave it, which the other side sees at once (with NCCL at its
deadline), and meet in a new group.

Messages of a pair arrive in the order in which they were sent, with or without numbers. A rank begins its messages in the
order of (bucket, engine, worker), a worker posts its receives in that of (bucket, rank): both agree with the order (bucket,
engine, worker, rank). So where a member's messages wait for each other, as NCCL's do, the first pending message is the next
one at both of its ends, and goes through as soon as its bucket is read. Where weights go by layer, the layer comes before
all of these at both ends.

With `wire = delta` a message is a part's difference to the last version (see `codec.py`): usually much shorter than the
memory that the receiver has ready for it, which gloo allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megarl.platform import GlooMessages, NcclMessages
from megarl.platform import current as platform
from megarl.weight_sync.codec import SentParts, TakenParts
from megarl.weight_sync.manifest import SyncError, WeightManifest
from megarl.weight_sync.ring import Ring, RingSender
from megarl.weight_sync.stream import Part, Stream
from megarl.weight_sync.transport import LEADER_WAITS, NUM_BUCKETS, SENDER_WAITS, TRANSPORTS, engines_of, wait_until

MessageGroup = GlooMessages | NcclMessages
LAST_LOOK_S = 0.001  # a wait whose time is up still sees what is complete; gloo takes a timeout of 0 for none
# After an engine was given up, all other late engines together get this many times `weight_sync.timeout_s`: half of the time
# that a healthy engine waits longer for a rank than a rank waits for an engine.
SPARE_WAITS = (LEADER_WAITS - SENDER_WAITS) / 2


def open_store(host: str, port: int, timeout_s: float, owner: bool) -> dist.TCPStore:
    """Open the store that groups meet over. Rank 0 owns it, on a free port where `port` is 0. Raises SyncError."""
    try:
        return dist.TCPStore(host, port, is_master=owner, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise SyncError(
            f"meet: no way to the store of trainer rank 0 at {host}:{port} within "
            f"weight_sync.timeout_s = {timeout_s:g}: {error}"
        ) from error


def open_group(store: dist.TCPStore, manifest: WeightManifest, engine: int, member: int) -> MessageGroup:
    """Join an engine's group; `member` is a trainer rank, or the number of trainer ranks plus a worker's. Raises SyncError
    where the others do not join in time."""
    ranks, workers, timeout_s = manifest.layout.ranks, manifest.rollout.workers, manifest.timeout_s
    meeting, waits = dist.PrefixStore(f"engine-{engine}-{manifest.meetings[engine]}", store), 1
    try:
        if member >= ranks:
            waits = LEADER_WAITS  # the ranks may be waiting for other engines first
            store.set(_presence(manifest, engine, member - ranks), "")
        on_device = TRANSPORTS[manifest.transport].on_device
        return platform.message_group(meeting, member, ranks + workers, timeout_s, waits * timeout_s, store.host, on_device)
    except RuntimeError as error:
        raise SyncError(
            f"meet: no group of the trainer ranks and engine {engine} within "
            f"{waits} times weight_sync.timeout_s = {timeout_s:g}: {error}"
        ) from error


def _presence(manifest: WeightManifest, engine: int, worker: int) -> str:
    """The store's key for a worker that has come to its engine's meeting."""
    return f"here-{engine}-{manifest.meetings[engine]}-{worker}"


def engines_present(store: dist.TCPStore, manifest: WeightManifest, engines: Sequence[int], rank: int) -> list[int]:
    """Find which engines have all their workers at their meeting, within one deadline for all engines. Rank 0 looks, and all
    ranks use its result: otherwise a rank might wait for an engine that another rank has given up, and be late at the next
    meeting. Raises SyncError where rank 0 gives no result."""
    workers, present_key = range(manifest.rollout.workers), f"present-{manifest.session}"
    try:
        if rank == 0:
            keys = {engine: [_presence(manifest, engine, worker) for worker in workers] for engine in engines}
            wait_until(lambda: all(store.check(of) for of in keys.values()), manifest.timeout_s)
            store.set(present_key, ",".join(str(engine) for engine, of in keys.items() if store.check(of)))
        store.wait([present_key], timedelta(seconds=SENDER_WAITS * manifest.timeout_s))
        return [int(engine) for engine in store.get(present_key).decode().split(",") if engine]
    except RuntimeError as error:
        raise SyncError(
            f"meet: trainer rank 0 did not say which engines have come, within {SENDER_WAITS} times "
            f"weight_sync.timeout_s = {manifest.timeout_s:g}: {error}"
        ) from error


class PointToPointSender:
    """A trainer rank's end, with two buckets for all streams; its methods mean what those of `RingSender` do."""

    def __init__(
        self, streams: Sequence[Stream], rank: int, store: dist.TCPStore, on_device: bool, parts: SentParts | None = None
    ) -> None:
        """With `parts`, messages are differences to the last version."""
        self._streams, self._rank, self._store, self._parts = streams, rank, store, parts
        size = NUM_BUCKETS * max(stream.capacity for stream in streams)
        memory = platform.device_bytes(size) if on_device else torch.zeros(size, dtype=torch.uint8)
        self.buckets = memory.view(NUM_BUCKETS, -1)
        # Engine, description, work and memory of each message: gloo does not keep the memory alive.
        self._sending: list[list[tuple[int, str, Any, torch.Tensor]]] = [[] for _ in range(NUM_BUCKETS)]
        self._turn = 0
        self._hurried = False  # whether late engines share `SPARE_WAITS`
        self._groups: dict[int, tuple[int, MessageGroup]] = {}  # by engine: its meeting and group
        self._manifest: WeightManifest
        self.lost: dict[int, str] = {}
        self.sent_bytes = 0

    def begin(self, manifest: WeightManifest) -> None:
        self._manifest, self.lost, self.sent_bytes = manifest, {}, 0
        self._sending = [[] for _ in range(NUM_BUCKETS)]
        self._turn = 0  # so that a part lies in the same memory in every version
        self._hurried = False
        if self._parts is not None:
            self._parts.begin(manifest)
        meetings = {engine: meeting for engine, (meeting, _) in self._groups.items()}
        meeting = [engine for engine in manifest.leading if meetings.get(engine) != manifest.meetings[engine]]
        for engine in meeting:
            self._leave(engine)
        present = engines_present(self._store, manifest, meeting, self._rank) if meeting else []
        for engine in meeting:
            if engine not in present:
                self._lose(
                    engine, f"meet: engine {engine} did not come within weight_sync.timeout_s = {manifest.timeout_s:g}"
                )
                continue
            try:
                self._groups[engine] = manifest.meetings[engine], open_group(self._store, manifest, engine, self._rank)
            except SyncError as error:
                self._lose(engine, str(error))

    def serves(self, stream: int) -> bool:
        return any(engine not in self.lost for engine in engines_of(stream, self._manifest))

    def room(self, stream: int, bucket: int) -> torch.Tensor:
        self._turn = (self._turn + 1) % NUM_BUCKETS
        self._wait(self._turn)
        memory = self.buckets[self._turn, : self._streams[stream].capacity]
        if self._parts is not None:
            memory.zero_()  # so that the gaps between pieces do not differ
        return memory

    def send(self, stream: int, bucket: int) -> None:
        worker = stream % self._manifest.rollout.workers
        part = self._streams[stream].part(bucket, self._rank)
        assert part is not None, f"rank {self._rank} has nothing in bucket {bucket} of worker {worker}"
        content = self.buckets[self._turn, part.start : part.end]
        if self._parts is not None:
            content = self._parts.message(worker, bucket, part, content)
        for engine in engines_of(stream, self._manifest):
            if engine in self._groups and engine not in self.lost:
                member = self._manifest.layout.ranks + worker
                description = f"send: bucket {bucket} to worker {worker} of engine {engine}"
                try:
                    work = self._groups[engine][1].send(content, member, bucket)
                except RuntimeError as error:
                    self._lose(engine, f"{description}: {error}")
                    continue
                self._sending[self._turn].append((engine, description, work, content))
                self.sent_bytes += len(content)

    def finish(self) -> None:
        for turn in range(NUM_BUCKETS):
            self._wait(turn)

    def lose(self, engine: int) -> None:
        self._lose(engine, "it failed")

    def abort(self) -> None:
        """Leave all groups, so that the workers' waits fail at once."""
        self._sending = [[] for _ in range(NUM_BUCKETS)]
        for engine in list(self._groups):
            self._leave(engine)

    def close(self) -> None:
        self.abort()

    def _wait(self, turn: int) -> None:
        """Wait for all messages of a turn, with one deadline: healthy engines wait for this rank meanwhile.

        Once the deadline has passed, healthy engines have waited that long, and the messages of other late engines may not
        even have begun. So for the rest of this attempt all engines together get `SPARE_WAITS`, in equal shares. A healthy
        engine needs only the time of the transfer: it has been ready all along.
        """
        timeout_s = self._manifest.timeout_s
        spare_s = SPARE_WAITS * timeout_s
        patience_s, rule = SENDER_WAITS * timeout_s, f"within {SENDER_WAITS} times weight_sync.timeout_s = {timeout_s:g}"
        if self._hurried:
            patience_s = spare_s / len(self._manifest.leading)
            rule = f"within {patience_s:g} s, once another engine was not {rule}"
        begun = time.monotonic()
        for engine, description, work, _ in self._sending[turn]:
            if engine in self.lost:
                continue
            try:
                self._groups[engine][1].finish(work, max(LAST_LOOK_S, begun + patience_s - time.monotonic()))
            except RuntimeError as error:
                self._lose(engine, f"{description} {rule}: {error}")
                # One whose end is seen at once costs nothing.
                self._hurried = self._hurried or time.monotonic() - begun > spare_s
        self._sending[turn] = []

    def _lose(self, engine: int, why: str) -> None:
        self.lost.setdefault(engine, why)
        self._leave(engine)

    def _leave(self, engine: int) -> None:
        if engine in self._groups:
            self._groups.pop(engine)[1].leave()


class PointToPointReceiver:
    """A leading engine's end in one worker: messages arrive in the buckets of a ring, where the `followers`, the other
    engines of the node, read them too."""

    def __init__(
        self,
        ring: Ring,
        stream: Stream,
        group: MessageGroup,
        manifest: WeightManifest,
        followers: Sequence[int],
        leave: Callable[[], None],
        parts: TakenParts | None = None,
    ) -> None:
        """`leave` leaves the group; `parts` keeps the bytes that messages are differences to."""
        self._parts = parts
        self._ring, self._stream, self._group, self._manifest, self._leave = ring, stream, group, manifest, leave
        self._relay = RingSender([ring], [stream], 0, manifest.timeout_s, None)
        self._relay.begin_for(manifest.session, followers)
        self._released = 0
        # For each bucket that messages may come into: the part, memory and work of each message.
        self._posted: list[list[tuple[Part, torch.Tensor, Any]]] = []

    def take(self, bucket: int) -> torch.Tensor:
        if self._parts is not None and bucket == 0:
            self._parts.begin(self._manifest)
        if bucket == len(self._posted):
            self._relay.room(0, bucket)
            self._post()
        messages, self._posted[bucket] = self._posted[bucket], []  # a work that is kept would keep a group alive
        for number, (part, message, work) in enumerate(messages):
            try:
                self._group.finish(work, LEADER_WAITS * self._manifest.timeout_s)
            except RuntimeError as error:
                raise self._failure(part, bucket, error) from error
            if self._parts is not None:
                self._parts.put(message, bucket, number, self._ring.bucket(bucket))
        self._relay.send(0, bucket)
        self._post_ahead()
        return self._ring.bucket(bucket)

    def release(self, bucket: int) -> None:
        self._released = bucket + 1
        self._post_ahead()

    def give_up(self) -> None:
        """Leave the group, so that the trainer ranks' waits fail at once."""
        self._relay.abort()
        self._posted = []
        self._leave()

    def _post_ahead(self) -> None:
        """Post receives for every bucket that has been read."""
        while len(self._posted) < min(self._released + NUM_BUCKETS, self._stream.num_buckets):
            if not self._relay.has_room(0, len(self._posted)):
                return
            self._post()

    def _post(self) -> None:
        bucket = len(self._posted)
        memory = self._ring.bucket(bucket)
        works = []
        for number, part in enumerate(self._stream.parts[bucket]):
            message = memory[part.start : part.end] if self._parts is None else self._parts.room(bucket, number)
            try:
                works.append((part, message, self._group.receive(message, part.source_rank, bucket)))
            except RuntimeError as error:
                raise self._failure(part, bucket, error) from error
        self._posted.append(works)

    def _failure(self, part: Part, bucket: int, error: RuntimeError) -> SyncError:
        return SyncError(
            f"take: bucket {bucket} of {self._stream.num_buckets} did not come from trainer rank {part.source_rank} within "
            f"{LEADER_WAITS} times weight_sync.timeout_s = {self._manifest.timeout_s:g}: {error}"
        )
