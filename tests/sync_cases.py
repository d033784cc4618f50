"""Engines without vLLM: their workers are threads that read a stream into tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import torch

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.models.quantised_blocks import BLOCK
from megarl.models.vllm_weights import vllm_boxes
from megarl.weight_sync.buckets import FP8, LocalBox
from megarl.weight_sync.codec import SCALES, Blocks, quantise_blocks
from megarl.weight_sync.copies import SpareMemory, Works
from megarl.weight_sync.manifest import WeightManifest
from megarl.weight_sync.read import WeightReader
from tests.rollout_cases import Publisher, checkpoint, cut, save_model

Parameters = dict[str, torch.Tensor]
LARGEST = (1024, 512)  # of the parameters


def dequantise_blocks(blocks: Blocks) -> torch.Tensor:
    """The matrix that an engine computes with, float32 [rows, columns]."""
    rows, columns = blocks.weight.shape
    scale = blocks.weight_scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return blocks.weight.float() * scale[:rows, :columns]


class ThreadEngines:
    """The engines, seen from rank 0. `before` is called in a worker's thread before each box is written, with the engine,
    the worker and the number of boxes so far; a failed engine asks for another attempt `retries` times. Each mapped box is a
    work of its own."""

    def __init__(self, shape: ModelShape, rollout: RolloutLayout, engines: int = 1, retries: int = 0) -> None:
        self.places = [(engine, worker) for engine in range(engines) for worker in range(rollout.workers)]
        self.readers = {place: WeightReader(shape, place[1]) for place in self.places}
        self.starts = [0] * engines
        self.taken: dict[tuple[int, int], Parameters] = {}
        self.versions = [0] * engines
        self.served: list[tuple[int, ...]] = []  # of each attempt
        self.bases: list[int | None] = []  # likewise
        self.before: Callable[[int, int, int], None] = lambda engine, worker, boxes: None
        self.failures: list[BaseException] = []
        self._shape, self._retries = shape, retries
        self._threads = ThreadPoolExecutor(len(self.places))
        self._reading: dict[tuple[int, int], Future[Parameters]] = {}
        self._manifest: WeightManifest

    def ask(self, version: int, engines: Sequence[int]) -> None:
        """`pause` asks."""

    def pause(self, version: int, attempt: int, engines: Sequence[int]) -> list[int]:
        return list(self.starts)

    def restart(self, engine: int) -> None:
        """An engine in place of one that died."""
        self.starts[engine] += 1
        for place in self.places:
            if place[0] == engine:
                self.readers[place].close()
                self.readers[place] = WeightReader(self._shape, place[1])

    def begin(self, manifest: WeightManifest) -> None:
        self._manifest = WeightManifest.from_dict(manifest.as_dict())
        self.served.append(manifest.engines)
        self.bases.append(manifest.base)
        chosen = [place for place in self.places if place[0] in manifest.engines]
        self._reading = {place: self._threads.submit(self._read, *place) for place in chosen}

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
        """A worker's parameters, every element written at most once; what is not written is NaN."""
        writer = BoxWriter(lambda boxes: self.before(engine, worker, boxes))
        for _ in self.readers[engine, worker].read(self._manifest, engine, writer):
            pass
        return writer.parameters


class SyncCase:
    """A trainer of one rank, an engine of two workers without vLLM, and two models of one shape."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.models = [save_model(folder / str(seed), "llama", False, seed) for seed in (0, 1)]
        self.publisher = Publisher(self.models[0], RolloutLayout(2), **settings)
        self.shape = ModelShape.from_directory(self.models[0])
        self.engines = ThreadEngines(self.shape, RolloutLayout(2))

    def assert_taken(self, model: int) -> None:
        """Both workers have exactly their shard of a model."""
        for worker in (0, 1):
            taken = self.engines.taken[0, worker]
            assert_has_shard(taken, self.shape, self.models[model], RolloutLayout(2), worker, torch.float32)

    def close(self) -> None:
        self.engines.close()
        self.publisher.close()


class BoxWriter:
    """Writes boxes into tensors. `before` is called before each box is written, with the number of boxes so far. Every
    element is written once at most, unless the `parameters` are given."""

    def __init__(self, before: Callable[[int], None] = lambda boxes: None, parameters: Parameters | None = None) -> None:
        self.parameters: Parameters = {} if parameters is None else parameters
        self.before, self.num_boxes, self._once = before, 0, parameters is None

    def works(self, boxes: Sequence[LocalBox], bucket_bytes: int) -> Works:
        return Works([[number] for number in range(len(boxes))], most_threads=1)

    def place(self, box: LocalBox, spare: SpareMemory | None = None) -> torch.Tensor:
        self.before(self.num_boxes)
        self.num_boxes += 1
        dtype = torch.float32 if box.dtype == FP8 else box.dtype
        place = box.within(self.parameters.setdefault(box.parameter, torch.full(LARGEST, torch.nan, dtype=dtype)))
        assert not self._once or torch.isnan(place).all(), f"{box.parameter} written twice"
        return place

    def written(self, owner: str) -> None:
        """Nothing is packed."""

    def finish(self) -> None:
        """Give quantised parameters their values."""
        for name in [name for name in self.parameters if name.endswith(SCALES)]:
            scale = self.parameters.pop(name)[: LARGEST[0] // BLOCK, : LARGEST[1] // BLOCK]
            self.parameters[name.removesuffix(SCALES)] *= scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


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
    expected = cut(vllm_boxes(shape, rollout), checkpoint(model))[worker]
    assert taken.keys() == expected.keys()
    for name, content in expected.items():
        rows, cols = content.shape
        sent = content.to(dtype)
        if quantised and "_proj" in name:
            sent = dequantise_blocks(quantise_blocks(sent))
        assert torch.equal(taken[name][:rows, :cols].float(), sent.float()), name
        assert torch.isnan(taken[name][rows:]).all() and torch.isnan(taken[name][:, cols:]).all(), name
