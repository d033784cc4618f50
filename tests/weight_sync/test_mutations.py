"""No worker takes bytes that were damaged on the way: flipped bits, torn, stale, exchanged or unwritten buckets.

`test_shards.py` refuses a wrong plan; `test_conformance.py` compares the plans' tables with vLLM's loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.weight_sync.manifest import SyncError
from megarl.weight_sync.stream import CHECKSUM_BYTES, Stream
from tests.rollout_cases import Publisher, save_model
from tests.sync_cases import ThreadEngines, assert_has_shard

pytestmark = pytest.mark.sync

BUCKET_BYTES = 1 << 14
# Given the bucket's number and memory after it was packed.
Mutation = Callable[[int, torch.Tensor], None]


class Case(NamedTuple):
    """A trainer of one rank, an engine of two workers without vLLM, and two models of one shape."""

    publisher: Publisher
    engines: ThreadEngines
    models: tuple[Path, Path]

    @property
    def streams(self) -> list[Stream]:
        return self.publisher.sync._streams

    def publish(self, model: int, mutation: Mutation | None = None) -> None:
        """Publish a model as the next version; `mutation` changes the buckets of worker 0. Raises what the worker raised."""
        sync, pack = self.publisher.sync, type(self.publisher.sync)._pack

        def pack_wrong(manifest: Any, stream: int, part: Any, matrices: Any, bucket: int, memory: torch.Tensor) -> None:
            pack(sync, manifest, stream, part, matrices, bucket, memory)
            if mutation is not None and stream == 0:
                mutation(bucket, memory)

        sync._pack = pack_wrong  # type: ignore[method-assign]
        self.publisher.publish(self.engines.versions[0] + 1, self.models[model], self.engines)

    def assert_refused(self, mutation: Mutation, message: str) -> None:
        version = self.engines.versions[0]
        with pytest.raises(SyncError, match=message):
            self.publish(1, mutation)
        assert self.engines.versions == [version]

    def assert_taken(self, model: int, *workers: int) -> None:
        """Some workers, or all, have exactly their shard."""
        shape = ModelShape.from_directory(self.models[model])
        for worker in workers or (0, 1):
            taken = self.engines.taken[0, worker]
            assert_has_shard(taken, shape, self.models[model], RolloutLayout(2), worker, torch.float32)

    def close(self) -> None:
        self.engines.close()
        self.publisher.close()


def open_case(models: tuple[Path, Path], transport: str) -> Case:
    publisher = Publisher(models[0], RolloutLayout(2), bucket_bytes=BUCKET_BYTES, timeout_s=60.0, transport=transport)
    return Case(publisher, ThreadEngines(ModelShape.from_directory(models[0]), RolloutLayout(2)), models)


@pytest.fixture(scope="module", params=["shared_memory", "cuda_ipc"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """With checksums on a host, and on a device."""
    folder = tmp_path_factory.mktemp("models")
    models = (save_model(folder / "first", "llama", False, 0), save_model(folder / "second", "llama", False, 1))
    case = open_case(models, request.param)
    yield case
    case.close()


@pytest.fixture(autouse=True)
def first_version(case: Case) -> None:
    case.publish(0)
    case.assert_taken(0)


def counts(stream: Stream, bucket: int, byte: int) -> bool:
    """Whether a byte of a bucket belongs to a piece or a checksum."""
    pieces = np.array(stream.pieces(bucket))
    starts, sizes = stream.offset[pieces], stream.size[pieces]
    checks = stream.check[pieces]
    return bool(
        ((starts <= byte) & (byte < starts + sizes)).any() | ((checks <= byte) & (byte < checks + CHECKSUM_BYTES)).any()
    )


@settings(max_examples=40)
@given(st.data())
def test_a_bit_that_flips_is_seen_unless_it_lies_between_the_boxes(case: Case, data: Any) -> None:
    stream = case.streams[0]
    bucket = data.draw(st.integers(0, stream.num_buckets - 1))
    byte = data.draw(st.integers(0, stream.parts[bucket][-1].end - 1))
    bit = 1 << data.draw(st.integers(0, 7))

    def flip(number: int, memory: torch.Tensor) -> None:
        if number == bucket:
            memory[byte] ^= bit

    if counts(stream, bucket, byte):
        case.assert_refused(flip, f"wrong bytes in bucket {bucket} of {stream.num_buckets}")
    else:
        case.publish(1, flip)
        case.assert_taken(1)


def keep(old: torch.Tensor, memory: torch.Tensor) -> None:
    memory.copy_(old)


def keep_second_half(old: torch.Tensor, memory: torch.Tensor) -> None:
    memory[BUCKET_BYTES // 2 :] = old[BUCKET_BYTES // 2 :]


def zero(old: torch.Tensor, memory: torch.Tensor) -> None:
    memory.zero_()


@pytest.mark.parametrize("damage", [keep, keep_second_half, zero])
def test_a_bucket_that_is_not_all_of_this_version_is_seen(
    case: Case, damage: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """A bucket of the version before (also with the same weights), a torn bucket, and one that nobody wrote."""
    sent: dict[int, torch.Tensor] = {}
    case.publish(1 if damage is keep else 0, lambda number, memory: sent.update({number: memory.clone()}))

    def spoil(number: int, memory: torch.Tensor) -> None:
        if number == 3:
            damage(sent[number], memory)

    case.assert_refused(spoil, "wrong bytes in bucket 3")


def test_another_bucket_in_the_place_of_one_is_seen(case: Case) -> None:
    """Two buckets of one matrix have pieces of the same sizes; only the seeds of their checksums tell them apart."""
    stream = case.streams[0]
    sizes = [stream.size[list(stream.pieces(bucket))].tolist() for bucket in range(stream.num_buckets)]
    bucket = next(number for number in range(1, len(sizes)) if sizes[number] == sizes[number - 1])
    sent: dict[int, torch.Tensor] = {}

    def late(number: int, memory: torch.Tensor) -> None:
        sent[number] = memory.clone()
        if number == bucket:
            memory.copy_(sent[number - 1])

    case.assert_refused(late, f"wrong bytes in bucket {bucket}")
