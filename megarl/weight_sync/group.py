"""The transport `group`: buckets travel as messages, in one process group of each engine with the trainer ranks.

The groups are independent of torch's default group; their members join through a store on rank 0. After any failure each
side leaves the group, which the other side sees at once (with NCCL at its deadline), and the next attempt makes a new group.
So no message of a failed attempt is left.

Buckets travel in rounds (`buckets.sync_rounds`), and all members go through the rounds in order. All messages of a member in
a round start together. NCCL's messages wait for each other, but those of the first unfinished round can always go through
once their buckets are read. While a round travels, the round before is handed over and the next is written.

In two legs the receiver is a trainer rank, the *server* of a worker on its device. The ranks have another group for this.
The worker maps the server's buckets; in the engine's group the server says which bucket is full, and the worker which is
free."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megarl.platform import GlooMessages, NcclMessages
from megarl.platform import current as platform
from megarl.platform.messages import deadline_passed, peer_lost
from megarl.weight_sync.buckets import NUM_BUCKETS, Part, PieceStream, Round
from megarl.weight_sync.codec import HEADER_BYTES, SentParts, TakenParts
from megarl.weight_sync.manifest import RANK_WAITS, SyncAborted, SyncError, SyncLate, SyncSettings, WeightManifest

MessageGroup = GlooMessages | NcclMessages
LAST_LOOK_S = 0.001  # a wait after the deadline still sees what is complete; gloo reads a timeout of 0 as none
PRESENCE_LOOK_S = 0.002


def open_store(host: str, port: int, timeout_s: float, owner: bool) -> dist.TCPStore:
    """Open the store through which members join groups. Rank 0 owns it; port 0 means any free port. Raises SyncError."""
    try:
        return dist.TCPStore(host, port, is_master=owner, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise SyncError(
            f"join: no way to the store of trainer rank 0 at {host}:{port} within "
            f"weight_sync.timeout_s = {timeout_s:g}: {error}"
        ) from error


def open_group(store: dist.TCPStore, manifest: WeightManifest, engine: int, member: int) -> MessageGroup:
    """Join an engine's group. Members are numbered from the ranks of `manifest.ranks_of` on to the workers. Raises SyncError
    if the others do not join in time."""
    ranks, workers, timeout_s = len(manifest.ranks_of(engine)), manifest.rollout.workers, manifest.timeout_s
    if member >= ranks:
        store.add(_presence(manifest, engine), 1)
    waits = manifest.worker_waits if member >= ranks else 1
    # In two legs, and where memory is mapped, the messages of an engine's group are small: they stay in host memory.
    on_device = manifest.on_device and manifest.transport == "group" and not manifest.servers
    name = f"engine-{engine}-{manifest.groups[engine]}"
    return _join(store, name, member, ranks + workers, f"the trainer ranks and engine {engine}", waits, timeout_s, on_device)


def _join(
    store: dist.TCPStore, name: str, member: int, size: int, whose: str, waits: int, timeout_s: float, on_device: bool
) -> MessageGroup:
    """Join the group called `name` in the store. Raises SyncError if the others do not join in time."""
    prefix = dist.PrefixStore(name, store)
    try:
        return platform.message_group(prefix, member, size, timeout_s, waits * timeout_s, store.host, on_device)
    except RuntimeError as error:
        limit = f"{waits} times weight_sync.timeout_s = {timeout_s:g}"
        raise SyncError(f"join: no group of {whose} within {limit}: {error}") from error


def _presence(manifest: WeightManifest, engine: int) -> str:
    """Return the store's key for the number of workers that are about to join an engine's group."""
    return f"here-{engine}-{manifest.groups[engine]}"


def present_engines(store: dist.TCPStore, manifest: WeightManifest, engines: Collection[int]) -> list[int]:
    """Wait until all workers of these engines are about to join; return the engines whose workers came by the deadline. Only
    rank 0 looks: otherwise a rank might wait for an engine that another rank has given up."""
    deadline, workers = time.monotonic() + manifest.timeout_s, manifest.rollout.workers
    while True:
        present = [engine for engine in engines if store.add(_presence(manifest, engine), 0) == workers]
        if len(present) == len(engines) or time.monotonic() > deadline:
            return present
        time.sleep(PRESENCE_LOOK_S)


class Message(NamedTuple):
    """A pending message, with its description; `engine` if it goes to an engine or comes from it."""

    what: str
    work: Any
    engine: int = -1


class EngineGroups:
    """A trainer rank's process groups, one with each engine. An engine whose message fails is lost for this attempt: the
    rank leaves its group, so that no worker waits for it."""

    def __init__(self, store: dist.TCPStore, rank: int) -> None:
        self._store, self._rank = store, rank
        self._groups: dict[int, tuple[int, MessageGroup]] = {}  # by engine, with the number in the manifest
        self._manifest: WeightManifest
        self.lost: dict[int, str] = {}  # by engine, why

    def begin(self, manifest: WeightManifest, present: Collection[int]) -> None:
        """Begin an attempt, with one deadline for all engines: join the new groups of the engines that are `present`."""
        self._manifest, self.lost = manifest, {}
        # Late is an attempt in which an engine has reached the deadline.
        self._deadline, self._is_late = time.monotonic() + manifest.timeout_s, False
        for engine in manifest.engines:
            ranks = manifest.ranks_of(engine)
            if engine in self._groups and self._groups[engine][0] == manifest.groups[engine] or self._rank not in ranks:
                continue
            self._leave(engine)
            with self._losing(engine):
                if engine not in present:
                    limit = f"weight_sync.timeout_s = {manifest.timeout_s:g}"
                    raise SyncLate(f"join: engine {engine} did not come within {limit}")
                group = open_group(self._store, manifest, engine, ranks.index(self._rank))
                self._groups[engine] = manifest.groups[engine], group

    def has(self, engine: int) -> bool:
        """Return whether an engine takes part in this attempt and is not lost."""
        return engine in self._manifest.engines and engine in self._groups

    def start(self, call: str, engine: int, worker: int, content: torch.Tensor, what: str) -> Message | None:
        """Start to "send" to a worker or to "receive" from it; return None if its engine is lost. `what` describes the
        message."""
        if self.has(engine):
            with self._losing(engine, f"{what}: "):
                start_message = getattr(self._groups[engine][1], call)
                work = start_message(content, len(self._manifest.ranks_of(engine)) + worker)
                return Message(what, work, engine)
        return None

    @contextmanager
    def together(self, engine: int) -> Iterator[None]:
        """Start all messages of the block at once."""
        with self._losing(engine, "send: "), self._groups[engine][1].together() if self.has(engine) else nullcontext():
            yield

    def finish(self, message: Message | None) -> bool:
        """Wait for a message until the deadline of the attempt; return False if its engine is lost."""
        if message is None or not self.has(message.engine):
            return False
        with self._losing(message.engine):
            try:
                self._groups[message.engine][1].finish(message.work, max(LAST_LOOK_S, self._deadline - time.monotonic()))
                return True
            except RuntimeError as error:
                late, timeout_s = "", self._manifest.timeout_s
                if deadline_passed(error):
                    late = f" within weight_sync.timeout_s = {timeout_s:g}"
                    if not self._is_late:
                        # The other engines have waited for this rank meanwhile: they get half as long once more.
                        self._deadline, self._is_late = time.monotonic() + timeout_s / 2, True
                raise SyncError(f"{message.what}{late}: {error}") from error
        return False

    def leave_all(self) -> None:
        """Leave all groups, so that waits of the workers fail at once."""
        for engine in list(self._groups):
            self._leave(engine)

    @contextmanager
    def _losing(self, engine: int, what: str = "") -> Iterator[None]:
        """Give the engine up if the block fails."""
        try:
            yield
        except RuntimeError as error:
            self.lost.setdefault(engine, f"{what}{error}")
            self._leave(engine)

    def _leave(self, engine: int) -> None:
        if engine in self._groups:
            self._groups.pop(engine)[1].leave()


def bucket_memory(capacity: int, on_device: bool) -> torch.Tensor:
    """Return memory for the buckets of one end, uint8 [2, capacity]."""
    size = NUM_BUCKETS * capacity
    memory = platform.device_bytes(size) if on_device else torch.zeros(size, dtype=torch.uint8)
    return memory.view(NUM_BUCKETS, -1)


class Inbox:
    """The two buckets in which the parts of one stream arrive, uint8 [2, capacity]. With `parts` messages are differences,
    which are added to the bytes of the version before."""

    def __init__(self, stream: PieceStream, memory: torch.Tensor, settings: SyncSettings) -> None:
        self.stream, self.memory = stream, memory
        self.parts = TakenParts(stream) if settings.wire == "delta" else None
        self._posted: dict[int, list[tuple[int, torch.Tensor, Message]]] = {}  # by bucket: number and memory of each part

    def begin(self, manifest: WeightManifest) -> None:
        self._posted = {}
        if self.parts is not None:
            self.parts.begin(manifest)

    def bucket(self, bucket: int) -> torch.Tensor:
        """Return the memory of a bucket, uint8 [capacity]."""
        return self.memory[bucket % NUM_BUCKETS]

    def room(self, bucket: int, number: int) -> torch.Tensor:
        """Return memory for the message with a part, by its number in the bucket."""
        part = self.stream.parts[bucket][number]
        if self.parts is not None:  # the longest difference
            return torch.empty(part.size + HEADER_BYTES, dtype=torch.uint8)
        return self.bucket(bucket)[part.start : part.end]

    def post(self, bucket: int, group: MessageGroup, local_rank: int | None = None) -> None:
        """Start to receive a bucket's parts, except from this rank itself. Raises SyncAborted."""
        works = self._posted[bucket] = []
        for number, part in enumerate(self.stream.parts[bucket]):
            if part.source_rank != local_rank:
                what = f"bucket {bucket} of {self.stream.num_buckets} from trainer rank {part.source_rank}"
                room = self.room(bucket, number)
                works.append((number, room, start(group.receive, room, part.source_rank, what)))

    def complete(self, bucket: int, group: MessageGroup, deadline: float) -> torch.Tensor:
        """Wait for a bucket that was posted; return its memory. Raises SyncLate or SyncAborted naming the rank, SyncError
        for a message that does not fit."""
        for number, room, message in self._posted.pop(bucket):
            finish(group, message, deadline)
            self.arrive(bucket, number, room)
        return self.bucket(bucket)

    def arrive(self, bucket: int, number: int, message: torch.Tensor) -> None:
        """Decode a message that has arrived in its `room`, if it is a difference."""
        if self.parts is not None:
            self.parts.put(message, bucket, number, self.bucket(bucket))


def start(call: Callable[[torch.Tensor, int], Any], content: torch.Tensor, member: int, what: str) -> Message:
    """Start a message to or from a trainer rank; `call` is `send` or `receive` of a group. Raises SyncAborted where the rank
    has left the group."""
    try:
        return Message(what, call(content, member))
    except RuntimeError as error:
        raise SyncAborted(f"{what}: it left the group, as after a failure ({error})") from None


def finish(group: MessageGroup, message: Message, deadline: float) -> None:
    """Wait for a message of a trainer rank until the deadline on the monotonic clock. Raises SyncLate, or SyncAborted where
    the rank has left the group."""
    try:
        group.finish(message.work, max(LAST_LOOK_S, deadline - time.monotonic()))
    except RuntimeError as error:
        if peer_lost(error):
            raise SyncAborted(f"{message.what}: it left the group, as after a failure ({error})") from None
        raise SyncLate(f"{message.what} did not come by the deadline of the sync ({error})") from None


class HandOver(Inbox):
    """The buckets of one worker that a trainer rank serves, which the worker maps by their `handle`."""

    def __init__(self, stream: PieceStream, settings: SyncSettings) -> None:
        memory, self.handle = platform.share_bytes(NUM_BUCKETS * stream.capacity, settings.on_device)
        super().__init__(stream, memory.view(NUM_BUCKETS, -1), settings)

    def begin(self, manifest: WeightManifest) -> None:
        super().begin(manifest)
        self.messages: list[Message | None] = []  # that a bucket is full
        self.freed: list[Message | None] = []  # that a bucket was read, in the order of the buckets


class Written(NamedTuple):
    """A part of this rank in a round; its memory, uint8 [bytes], ends with its checksum."""

    bucket: int
    stream: int
    part: Part
    content: torch.Tensor


class BucketSender:
    """Sends a trainer rank's parts of the buckets; in two legs it also receives for the workers that the rank serves."""

    def __init__(
        self,
        streams: Sequence[PieceStream],
        rounds: Sequence[Round],
        rank: int,
        groups: EngineGroups,
        store: dist.TCPStore,
        settings: SyncSettings,
    ) -> None:
        self._streams, self._rank, self._groups, self._store = streams, rank, groups, store
        self._parts = SentParts() if settings.wire == "delta" else None
        capacity = max(sum(part.size for *_, part in self._own(entries)) for entries in rounds)
        self.buckets = bucket_memory(capacity, settings.on_device)
        self._under_way: list[tuple[Round, list[Message]]] = []  # rounds that started and are not done
        self._ranks: MessageGroup | None = None  # the group of the trainer ranks, for two legs
        self.served: dict[tuple[int, int], HandOver] = {}  # by engine and worker
        for engine, servers in enumerate(settings.servers):
            for worker, server in enumerate(servers):
                if server == rank:
                    self.served[engine, worker] = HandOver(streams[worker], settings)

    @property
    def changed(self) -> tuple[int, int]:
        """Where differences travel, how many bytes changed in this attempt, and of how many."""
        return (0, 0) if self._parts is None else (self._parts.changed_bytes, self._parts.content_bytes)

    def begin(self, manifest: WeightManifest) -> None:
        """Begin an attempt, once `groups` have begun it. Raises SyncError where the other ranks do not come."""
        self._manifest, self.sent_bytes, self._turn = manifest, 0, 0
        self._under_way = []
        self._deadline = time.monotonic() + RANK_WAITS * manifest.timeout_s
        if self._parts is not None:
            self._parts.begin(manifest)
        if manifest.servers and self._ranks is None:
            # Every rank left the last group of the ranks when it left all engines, so an engine has a new number.
            name, form = f"ranks-{max(manifest.groups)}", (RANK_WAITS, manifest.timeout_s, manifest.on_device)
            self._ranks = _join(self._store, name, self._rank, manifest.layout.ranks, "the trainer ranks", *form)
        for hand_over in self.served.values():
            hand_over.begin(manifest)

    def room(self, entries: Round) -> list[Written]:
        """Return memory for this rank's parts of the next round, unless all engines are lost; waits for the last round but
        one. Raises SyncError for a rank that is late."""
        if len(self._under_way) == NUM_BUCKETS:
            self._complete()
        self._turn = (self._turn + 1) % NUM_BUCKETS
        memory, start, written = self.buckets[self._turn], 0, []
        if self._parts is not None:
            memory.zero_()  # so that the gaps between pieces do not differ
        for bucket, stream, part in self._own(entries):
            # In two legs servers take all that was announced, also for lost engines.
            if self._manifest.servers or any(map(self._groups.has, self._manifest.engines)):
                written.append(Written(bucket, stream, part, memory[start : start + part.size]))
                start += part.size
        return written

    def send(self, entries: Round, written: Sequence[Written]) -> None:
        """Start a round: send this rank's parts, which were written to their `room`, to all engines, and receive for the
        workers that this rank serves."""
        if self._parts is not None:
            written = [part._replace(content=self._parts.message(*part)) for part in written]
        if self._manifest.servers:
            self._under_way.append((entries, self._send_in_two_legs(entries, written)))
            return
        messages = []
        for engine in self._manifest.engines:
            with self._groups.together(engine):
                for bucket, worker, _, content in written:
                    what = f"send: bucket {bucket} for worker {worker} of engine {engine}"
                    message = self._groups.start("send", engine, worker, content, what)
                    if message is not None:
                        messages.append(message)
                        self.sent_bytes += len(content)
        self._under_way.append((entries, messages))

    def finish(self) -> None:
        """Wait for everything that was started, and hand over the last buckets. Raises SyncError for a rank that is late."""
        while self._under_way:
            self._complete()
        for (engine, _), hand_over in self.served.items():
            if engine in self._manifest.engines and hand_over.parts is not None:
                hand_over.parts.version = self._manifest.version
            for message in hand_over.messages:
                self._groups.finish(message)

    def abort(self) -> None:
        """Leave the group of the ranks, so that waits of the others fail at once."""
        if self._ranks is not None:
            self._ranks.leave()
            self._ranks = None

    def _own(self, entries: Round) -> list[tuple[int, int, Part]]:
        """Return this rank's parts of a round, with bucket and stream."""
        parts = [(bucket, number, part) for bucket, number in entries for part in self._streams[number].parts[bucket]]
        return [(bucket, number, part) for bucket, number, part in parts if part.source_rank == self._rank]

    def _send_in_two_legs(self, entries: Round, written: Sequence[Written]) -> list[Message]:
        ranks, manifest, messages = self._ranks, self._manifest, []
        assert ranks is not None, "two legs have a group of the ranks"
        receiving = self._receiving(entries)
        for bucket, _, hand_over in receiving:
            if bucket >= NUM_BUCKETS:  # the worker must have read the bucket whose memory is used again
                self._groups.finish(hand_over.freed.pop(0))
        with ranks.together():
            for bucket, _, hand_over in receiving:
                hand_over.post(bucket, ranks, self._rank)
            for bucket, worker, part, content in written:
                for engine in manifest.engines:
                    server = manifest.servers[engine][worker]
                    if server == self._rank:
                        inbox = self.served[engine, worker]
                        number = inbox.stream.parts[bucket].index(part)
                        room = inbox.room(bucket, number)
                        room[: len(content)].copy_(content)
                        inbox.arrive(bucket, number, room)
                        continue
                    what = f"send: bucket {bucket} for worker {worker} of engine {engine}"
                    messages.append(start(ranks.send, content, server, what))
                    self.sent_bytes += len(content)
        return messages

    def _complete(self) -> None:
        """Wait for the first round that is not done, and hand its buckets over."""
        entries, messages = self._under_way.pop(0)
        if not self._manifest.servers:
            for message in messages:
                self._groups.finish(message)
            return
        assert self._ranks is not None, "two legs have a group of the ranks"
        for bucket, (engine, worker), hand_over in self._receiving(entries):
            hand_over.complete(bucket, self._ranks, self._deadline)
            platform.settle()  # the worker reads what was copied here
            what = f"hand over: bucket {bucket} to worker {worker} of engine {engine}"
            hand_over.messages.append(self._groups.start("send", engine, worker, torch.tensor([bucket]), what))
            if bucket + NUM_BUCKETS < hand_over.stream.num_buckets:
                what = f"hand over: worker {worker} of engine {engine} read no bucket {bucket}"
                hand_over.freed.append(self._groups.start("receive", engine, worker, torch.zeros(1).long(), what))
        for message in messages:
            finish(self._ranks, message, self._deadline)

    def _receiving(self, entries: Round) -> list[tuple[int, tuple[int, int], HandOver]]:
        """Return the buckets of a round that this rank receives, with engine and worker."""
        return [
            (bucket, place, hand_over)
            for bucket, number in entries
            for place, hand_over in self.served.items()
            if place[1] == number and place[0] in self._manifest.engines
        ]
