"""The rollout worker's end: take bucket after bucket, verify each, hand out the boxes in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from megarl.models import ModelShape
from megarl.platform import current as platform
from megarl.weight_sync.checks import DeviceChecks, HostChecks
from megarl.weight_sync.codec import read_blocks
from megarl.weight_sync.copies import RELEASE_PIECES, Copies, Works, num_copy_threads
from megarl.weight_sync.in_place import Home, Pieces, hashed_parts, part_of, piece_checksum, words_of
from megarl.weight_sync.link import Link
from megarl.weight_sync.manifest import DTYPES, SyncError, WeightManifest, sync_plan, sync_stream, turn_order
from megarl.weight_sync.plan import ReshardPlan
from megarl.weight_sync.ring import RingReceiver
from megarl.weight_sync.stream import Piece, Stream
from megarl.weight_sync.transport import TRANSPORTS, Receiver


class Box(NamedTuple):
    """A rectangle of a local parameter: `content` [rows, cols] belongs at (row, col); of FP8 blocks `scales` at the place of
    their blocks. What is read in place may be several, [boxes, rows, cols], each `step` rows behind the one before. It is
    there as `words` too: whole numbers, for which numpy takes a fraction of the time that torch does."""

    parameter: str
    row: int
    col: int
    content: torch.Tensor
    scales: torch.Tensor | None = None
    words: np.ndarray | None = None
    step: int = 0

    @property
    def in_words(self) -> np.ndarray:
        """Of what is read in place."""
        assert self.words is not None, "what comes in buckets has no words"
        return self.words

    def within(self, matrix: torch.Tensor) -> torch.Tensor:
        """Where the content belongs in all of the parameter, [rows, columns]."""
        return part_of(matrix, self.row, self.col, self.content.shape, self.step)

    def words_within(self, matrix: np.ndarray) -> np.ndarray:
        """Where the words belong in all of the parameter as words, [rows, columns]. Raises ValueError where it ends before
        them."""
        *boxes, rows, cols = self.in_words.shape
        rows += self.step * (boxes[0] - 1) if boxes else 0  # with those between the boxes
        place = matrix[self.row : self.row + rows, self.col : self.col + cols]
        if place.shape != (rows, cols):
            raise ValueError(f"a matrix of {matrix.shape} ends before {self.row + rows} x {self.col + cols}")
        if not boxes:
            return place
        down, right = place.strides
        return np.lib.stride_tricks.as_strided(place, self.in_words.shape, (self.step * down, down, right))


# What is done with boxes that are read in place, of all of them; those of no work are handed out.
FindWorks = Callable[[Sequence[Box]], Works]


def no_works(boxes: Sequence[Box]) -> Works:
    """All of them are to be handed out."""
    return Works()


@dataclass
class ReadFigures:
    """What a reader did for one version; seconds waited for buckets, spent on checksums, and on the ends of works; bytes of
    boxes. What several threads did counts as if they had shared it evenly."""

    wait_s: float = 0.0
    verify_s: float = 0.0
    pack_s: float = 0.0
    received_bytes: int = 0


class StreamReader:
    """Reads the stream of one worker number for one engine. Plan and stream are made at the first version and kept, and so
    is what the transport needs."""

    def __init__(self, shape: ModelShape, worker: int) -> None:
        self._shape, self._worker = shape, worker
        self._key: tuple[Any, ...] | None = None  # what the plan and the stream belong to
        self._plan: ReshardPlan
        self._stream: Stream
        self._elements: dict[str, int] = {}
        # By bucket: where it lies in memory, and its boxes there with what each is made of.
        self._boxes: dict[int, tuple[int, list[tuple[Box, list[Piece]]]]] = {}
        self._checks: DeviceChecks | None = None  # of buckets on a device
        self._pieces: Pieces
        self._homes: list[Home] = []
        self._in_place: list[Box] = []  # what is read where it is
        self._works = Works()
        self._link = Link()
        self.figures = ReadFigures()

    def boxes(
        self,
        manifest: WeightManifest,
        engine: int,
        meanwhile: Callable[[], None] = lambda: None,
        works: FindWorks = no_works,
    ) -> Generator[Box, None, None]:
        """Every box of a version, layer by layer; a box larger than a bucket comes in pieces. The contents are overwritten
        after the next one was asked for. What comes in buckets of the host is verified before it is handed out; what comes
        in those of a device, or is read in place, at the end. `meanwhile` is called after the last box, while ranks make the
        checksums of what was read in place. Who asks for no more boxes has to close it. Boxes that are read in place and
        belong to one of `works` are not handed out: works are done before, and their boxes hashed where they were copied to.
        `works` is asked when memory was mapped, and its works are done again in every version that is read there.

        Raises SyncError naming the first box that differs, or what did not come in time.
        """
        self.figures = ReadFigures()
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
                self._refuse_wrong(manifest)
                meanwhile()
            self._link.completed(manifest.version)
            complete = True
        finally:
            if not complete:
                end.give_up()

    def elements(self, parameter: str) -> int:
        """Elements of a local parameter that come with a version; the others are padding."""
        return self._elements[parameter]

    def close(self) -> None:
        self._let_go()
        self._link.close()

    def _let_go(self) -> None:
        """Of all memory that is not this process's own."""
        self._boxes, self._in_place, self._works, self._homes = {}, [], Works(), []

    def _read_in_place(
        self, manifest: WeightManifest, end: RingReceiver, meanwhile: Callable[[], None], works: FindWorks
    ) -> Iterator[Box]:
        """Do all works, then hand out the other boxes where they lie, to be hashed there. The ranks make their sums when all
        was read, and these are compared."""
        figures, pieces, begun = self.figures, self._pieces, time.perf_counter()
        if tuple(home.said for home in self._homes) != manifest.homes:
            self._let_go()
            dtype, in_place = DTYPES[manifest.precision], list[Box]()
            homes = [Home(said, rank, dtype) for rank, said in enumerate(manifest.homes)]
            for number, source in enumerate(pieces.source.tolist()):
                content = homes[source].box(pieces.at_source(self._plan, number))
                to = pieces.at_destination(self._plan, number)
                in_place.append(Box(to.parameter, to.row, to.col, content, None, words_of(content), to.step))
            # Known by the next version once all of them are: one that fails here leaves no half.
            self._works, self._in_place, self._homes = works(in_place), in_place, homes
        figures.wait_s += time.perf_counter() - begun
        words = [box.in_words for box in self._in_place]
        num_threads = min(num_copy_threads(manifest.rollout.workers), self._works.most_threads)
        copies = Copies(words, self._works.each, manifest.version, num_threads)
        copies.run(lambda count: end.release(count - 1))
        figures.verify_s, figures.pack_s, own = copies.verify_s, copies.pack_s, copies.sums
        for count, number in enumerate(copies.left):
            yield self._in_place[number]
            begun = time.perf_counter()
            own[number] = piece_checksum(hashed_parts(words[number]), manifest.version, number)
            if count % RELEASE_PIECES == 0:
                end.release(number)
            figures.verify_s += time.perf_counter() - begun
        figures.received_bytes += sum(part.nbytes for part in words)
        end.release(len(pieces) - 1)
        meanwhile()
        begun = time.perf_counter()
        sums = end.sums(np.unique(pieces.source), len(pieces))
        figures.wait_s += time.perf_counter() - begun
        wrong = np.flatnonzero(own != sums)
        if len(wrong):
            which = self._plan.describe(pieces.copy[wrong[0]])
            if (boxes := pieces.at_source(self._plan, int(wrong[0])).boxes) > 1:
                which += f" and the {boxes - 1} beside it"
            raise SyncError(f"weight version {manifest.version}: wrong bytes in piece {wrong[0]} of {len(pieces)}, {which}")
        # Says whether this engine was given up before it had read all: what it read since may be of another version.
        end.release(len(pieces))

    def _bucket(self, manifest: WeightManifest, bucket: int, end: Receiver) -> Iterator[Box]:
        """Take a bucket; each box is handed out as soon as its own bytes are verified, while they are in the cache."""
        begun = time.perf_counter()
        memory = end.take(bucket)
        figures, taken = self.figures, time.perf_counter()
        figures.wait_s += taken - begun
        place, boxes = self._boxes.get(bucket, (0, []))
        if place != memory.data_ptr():
            boxes = self._boxes_in(memory, bucket, DTYPES[manifest.precision])
            self._boxes[bucket] = memory.data_ptr(), boxes
        begun = time.perf_counter()
        host = HostChecks(memory, manifest.version, bucket) if self._checks is None else None
        if self._checks is not None:
            self._checks.compare(bucket, memory)
        for box, parts in boxes:
            wrong = None if host is None else host.wrong(parts)
            if wrong is not None:
                raise self._wrong(manifest, wrong.number)
            figures.verify_s += time.perf_counter() - begun
            figures.received_bytes += sum(piece.end - piece.start for piece in parts)
            yield box
            begun = time.perf_counter()

    def _refuse_wrong(self, manifest: WeightManifest) -> None:
        """Raises SyncError where a bucket on a device had other bytes than were written; the only wait for the device that
        verifying takes."""
        begun = time.perf_counter()
        wrong = [] if self._checks is None else self._checks.wrong()
        self.figures.verify_s += time.perf_counter() - begun
        if wrong:
            raise self._wrong(manifest, wrong[0])

    def _wrong(self, manifest: WeightManifest, piece: int) -> SyncError:
        which = self._plan.describe(self._stream.copy[piece])
        where = f"bucket {self._stream.bucket[piece]} of {self._stream.num_buckets}"
        return SyncError(f"weight version {manifest.version}: wrong bytes in {where}, {which}")

    def _boxes_in(self, memory: torch.Tensor, bucket: int, dtype: torch.dtype) -> list[tuple[Box, list[Piece]]]:
        """A bucket's boxes, whose contents are views of its memory, each with the pieces that it is made of."""
        boxes, elements = [], memory.view(dtype)
        for whole, parts in self._stream.at_destination(self._plan, bucket):
            place = whole.parameter, whole.row, whole.col
            if whole.scale_bytes:
                blocks = read_blocks(memory[whole.start : whole.end], whole.rows, whole.cols)
                boxes.append((Box(*place, blocks.weight, blocks.weight_scale_inv), parts))
            else:
                matrix = elements[whole.start // dtype.itemsize : whole.end // dtype.itemsize]
                boxes.append((Box(*place, matrix.view(whole.rows, whole.cols)), parts))
        return boxes

    def _prepare(self, manifest: WeightManifest, engine: int) -> None:
        workers = manifest.rollout.workers
        order = manifest.leaders[engine] if manifest.orders > 1 else 0  # who leads receives in its own
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
        copies = turn_order(plan, self._worker, turn)
        dtype = DTYPES[manifest.precision]
        self._stream = sync_stream(self._shape, plan, self._worker, turn, dtype, *form[1:])
        covered = np.bincount(plan.destination_parameter[copies], plan.sizes[copies], len(plan.destination_parameters))
        self._let_go()
        self._pieces = Pieces.of(plan, copies, dtype.itemsize)
        self._checks = DeviceChecks(self._stream, platform.current_device(), sampled) if on_device else None
        self._elements = dict(zip(plan.destination_parameters, covered.astype(int).tolist(), strict=True))
        self._key = key
