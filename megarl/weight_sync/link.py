"""What a worker keeps of a transport between two syncs: mapped rings, its group with the trainer ranks, and what a
difference is added to."""

from __future__ import annotations

import torch.distributed as dist

from megarl.weight_sync.delta import TakenParts
from megarl.weight_sync.manifest import SyncAborted, SyncError, WeightManifest
from megarl.weight_sync.point_to_point import MessageGroup, PointToPointReceiver, open_group, open_store
from megarl.weight_sync.ring import Ring, RingReceiver, RingSender
from megarl.weight_sync.segment import PREFIX, ROOT, sweep
from megarl.weight_sync.stream import Stream
from megarl.weight_sync.transport import TRANSPORTS, Receiver, wait_until


class Link:
    """Opens a worker's end of its stream, by the transport that the manifest names."""

    def __init__(self) -> None:
        self._ring: tuple[tuple[str, int, int], Ring] | None = None  # name, capacity and engines that the ring belongs to
        self._group: tuple[tuple[int, int], MessageGroup] | None = None  # engine and meeting
        self._store: tuple[tuple[str, int], dist.TCPStore] | None = None
        self._parts: TakenParts | None = None

    def open(self, manifest: WeightManifest, stream: Stream, engine: int, worker: int) -> Receiver:
        """Raises SyncError where the other end is not there in time, SyncAborted where that is the engine that leads."""
        name, timeout_s = manifest.rings[worker], manifest.timeout_s
        if not TRANSPORTS[manifest.transport].messages:
            ring = self._mapped(name, manifest.layout.ranks, manifest, stream, owner=False)
            _begin(ring, manifest, engine, manifest.leading[0])
            return RingReceiver(ring, stream, manifest.session, engine, timeout_s)
        leader = manifest.leaders[engine]
        # A leader that was started again makes a ring of its own: nothing that is left of the old one is taken for news.
        name = f"{name}-{leader}-{manifest.meetings[leader]}"
        if leader != engine and not wait_until((ROOT / f"{PREFIX}{name}").exists, timeout_s):
            rule = f"within weight_sync.timeout_s = {timeout_s:g}"
            raise SyncAborted(f"begin: engine {leader}, which leads, made no buckets to read {rule}")
        ring = self._mapped(name, 1, manifest, stream, owner=leader == engine)
        _begin(ring, manifest, engine, leader)
        if leader != engine:
            self._parts = None  # of a version that it received as a leading engine; it keeps nothing of this one
            return RingReceiver(ring, stream, manifest.session, engine, timeout_s, leader)
        try:
            group = self._met(manifest, engine, manifest.layout.ranks + worker)
        except SyncError:
            relay = RingSender([ring], [stream], 0, timeout_s, None)
            relay.begin_for(manifest.session, manifest.followers[engine])
            relay.abort()  # what reads here need not wait
            raise
        if manifest.wire == "delta" and (self._parts is None or self._parts.stream is not stream):
            self._parts = TakenParts(stream)
        followers = manifest.followers[engine]
        return PointToPointReceiver(ring, stream, group, manifest, followers, self._part, self._parts)

    def completed(self, version: int) -> None:
        """All of a version has been read and verified."""
        if self._parts is not None:
            self._parts.version = version

    def close(self) -> None:
        if self._ring is not None:
            self._ring[1].close()
        self._part()
        self._ring = self._store = self._parts = None

    def _mapped(self, name: str, num_writers: int, manifest: WeightManifest, stream: Stream, owner: bool) -> Ring:
        key = (name, stream.capacity, manifest.num_engines)
        if self._ring is None or self._ring[0] != key:
            if self._ring is not None:
                self._ring[1].close()
                self._ring = None
            if owner:
                sweep()
            make = Ring.create if owner else Ring.open
            on_device = TRANSPORTS[manifest.transport].on_device
            self._ring = key, make(name, num_writers, manifest.num_engines, stream.capacity, on_device)
        return self._ring[1]

    def _met(self, manifest: WeightManifest, engine: int, member: int) -> MessageGroup:
        if self._store is None or self._store[0] != manifest.store:
            self._part()  # of other trainers, who count their meetings from the first again
            self._store = manifest.store, open_store(*manifest.store, manifest.timeout_s, owner=False)
        key = (engine, manifest.meetings[engine])
        if self._group is None or self._group[0] != key:
            self._part()  # from the old one first: its other ends see it go
            self._group = key, open_group(self._store[1], manifest, engine, member)
        return self._group[1]

    def _part(self) -> None:
        """Leave the group: its other ends wait in vain."""
        if self._group is not None:
            self._group[1].leave()
            self._group = None


def _begin(ring: Ring, manifest: WeightManifest, engine: int, leader: int) -> None:
    """Buckets on a device are those of the worker of the engine that leads."""
    session = manifest.session
    if ring.on_device and engine == leader:
        ring.offer(session)
    wait_until(lambda: ring.reached(session) or ring.is_gone(leader, session), manifest.timeout_s)
    if not ring.reached(session):
        raise SyncAborted(
            f"begin: engine {leader}, which leads, offered no buckets within weight_sync.timeout_s = {manifest.timeout_s:g}"
        )
