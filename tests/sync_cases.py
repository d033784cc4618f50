"""Engines without vLLM: their workers are threads that read a stream into tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.models.quantised_blocks import BLOCK
from megarl.models.vllm_weights import vllm_segments
from megarl.weight_sync.codec import Blocks, quantise_blocks
from megarl.weight_sync.copies import Box, Works
from megarl.weight_sync.in_place import words_of
from megarl.weight_sync.manifest import WeightManifest
from megarl.weight_sync.publish import EngineFacts
from megarl.weight_sync.read import StreamReader
from tests.rollout_cases import checkpoint, cut

Parameters = dict[str, torch.Tensor]
LARGEST = (1024, 512)  # of the parameters


def dequantise_blocks(blocks: Blocks) -> torch.Tensor:
    """The matrix that an engine computes with, float32 [rows, columns]."""
    rows, columns = blocks.weight.shape
    scale = blocks.weight_scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return blocks.weight.float() * scale[:rows, :columns]


class ThreadEngines:
    """The engines, seen from rank 0. `before` is called in a worker's thread before each box is copied, with the engine, the
    worker and the number of boxes so far; a failed engine asks for another attempt `retries` times. Each box that is read in
    place is a work of its own."""

    def __init__(self, shape: ModelShape, rollout: RolloutLayout, engines: int = 1, retries: int = 0) -> None:
        self.places = [(engine, worker) for engine in range(engines) for worker in range(rollout.workers)]
        self.readers = {place: StreamReader(shape, place[1]) for place in self.places}
        self.starts = [0] * engines
        self.taken: dict[tuple[int, int], Parameters] = {}
        self.versions = [0] * engines
        self.served: list[tuple[int, ...]] = []  # of each attempt
        self.bases: list[int | None] = []  # likewise
        self.before: Callable[[int, int, int], None] = lambda engine, worker, boxes: None
        self.nodes = ["here"] * engines
        self.failures: list[BaseException] = []
        self._shape, self._retries = shape, retries
        self._threads = ThreadPoolExecutor(len(self.places))
        self._reading: dict[tuple[int, int], Future[Parameters]] = {}
        self._taking: dict[tuple[int, int], Taking] = {}
        self._manifest: WeightManifest

    def ask(self, version: int, engines: Sequence[int]) -> None:
        """`pause` asks."""

    def pause(self, version: int, attempt: int, engines: Sequence[int]) -> list[EngineFacts]:
        return [EngineFacts(node, starts) for node, starts in zip(self.nodes, self.starts, strict=True)]

    def restart(self, engine: int) -> None:
        """An engine in place of one that died."""
        self.starts[engine] += 1
        for place in self.places:
            if place[0] == engine:
                self.readers[place].close()
                self.readers[place] = StreamReader(self._shape, place[1])

    def begin(self, manifest: WeightManifest) -> None:
        self._manifest = WeightManifest.from_dict(manifest.as_dict())
        self.served.append(manifest.engines)
        self.bases.append(manifest.base)
        chosen = [place for place in self.places if place[0] in manifest.engines]
        self._reading = {place: self._threads.submit(self._read, *place) for place in chosen}

    def failed(self) -> Sequence[int]:
        done = [(place, reading) for place, reading in self._reading.items() if reading.done()]
        return [place[0] for place, reading in done if reading.exception() is not None]

    def finish(self) -> tuple[tuple[int, ...], dict[str, float]]:
        wait_for(self._reading.values())
        again = set()
        for place, reading in self._reading.items():
            error = reading.exception()
            if error is None:
                self.taken[place] = reading.result()
                self.versions[place[0]] = self._manifest.version
            else:
                self.failures.append(error)
                again.add(place[0])
                if self._manifest.attempt > self._retries:
                    raise error
        received = sum(reader.times.received_bytes for reader in self.readers.values())
        return tuple(sorted(again)), {"sync/received_bytes": received}

    def close(self) -> None:
        self._threads.shutdown()
        for reader in self.readers.values():
            reader.close()

    def _read(self, engine: int, worker: int) -> Parameters:
        try:
            return self._take(engine, worker)
        except Exception as error:
            # vLLM's workers keep no traceback either: it holds a message that was waited for, that the group it came by, and
            # trainer ranks at the other end of a group that lives on wait for it until their deadline.
            error.__cause__ = error.__context__ = None
            raise error.with_traceback(None) from None

    def _take(self, engine: int, worker: int) -> Parameters:
        """A worker's parameters, every element written at most once; what is not written is not a number."""
        self._taking[engine, worker] = taking = Taking({}, 0)

        def works(boxes: Sequence[Box]) -> Works:
            return Works([BoxWork(self, (engine, worker), box, number) for number, box in enumerate(boxes)], most_threads=1)

        for box in self.readers[engine, worker].boxes(self._manifest, engine, works=works):
            self.before(engine, worker, taking.boxes)
            taking.target(box).copy_(
                box.content if box.scales is None else dequantise_blocks(Blocks(box.content, box.scales))
            )
            taking.boxes += 1
        return taking.parameters


@dataclass
class Taking:
    """What a worker has of a version, and of how many boxes."""

    parameters: Parameters
    boxes: int

    def target(self, box: Box) -> torch.Tensor:
        target = box.within(self.parameters.setdefault(box.parameter, torch.full(LARGEST, torch.nan)))
        assert torch.isnan(target).all(), f"{box.parameter} written twice"
        return target


class BoxWork:
    """One box into what its worker has of the version that it takes just then."""

    def __init__(self, engines: ThreadEngines, place: tuple[int, int], box: Box, number: int) -> None:
        self.numbers = (number,)
        self._engines, self._place, self._box = engines, place, box

    def places(self, thread: int) -> list[np.ndarray]:
        taking = self._engines._taking[self._place]
        self._engines.before(*self._place, taking.boxes)
        taking.target(self._box)
        return [self._box.within(words_of(taking.parameters[self._box.parameter]))]

    def copied(self, thread: int) -> None:
        self._engines._taking[self._place].boxes += 1


def assert_has_shard(
    taken: Parameters,
    shape: ModelShape,
    model: Path,
    rollout: RolloutLayout,
    worker: int,
    dtype: torch.dtype,
    quantised: bool = False,
) -> None:
    """A worker has exactly its shard of a checkpoint, in the dtype of the wire, or projections in FP8 blocks."""
    expected = cut(vllm_segments(shape, rollout), checkpoint(model))[worker]
    assert taken.keys() == expected.keys()
    for name, content in expected.items():
        rows, cols = content.shape
        sent = content.to(dtype)
        if quantised and "_proj" in name:
            sent = dequantise_blocks(quantise_blocks(sent))
        assert torch.equal(taken[name][:rows, :cols], sent.float()), name
        assert torch.isnan(taken[name][rows:]).all() and torch.isnan(taken[name][:, cols:]).all(), name
