"""Whatever is wrong with a sync on its way, no worker takes it: bits, buckets, versions, plans.

A plan that is wrong at both ends is taken, and what arrives is not the checkpoint's. That the tables which plans are made of
are those of vLLM's loader is in `test_conformance.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.weight_sync import publish, read
from megarl.weight_sync.manifest import SyncError, sync_plan
from megarl.weight_sync.plan import ReshardPlan
from megarl.weight_sync.stream import CHECKSUM_BYTES, Stream
from tests.rollout_cases import Publisher, save_model
from tests.sync_cases import ThreadEngines, assert_has_shard

pytestmark = pytest.mark.sync

BUCKET_BYTES = 1 << 14
# Given the bucket's number and memory after it was packed.
Mutation = Callable[[int, torch.Tensor], None]


class Case(NamedTuple):
    """A trainer of one rank, an engine without vLLM that is cut over two workers, and two models of one shape."""

    publisher: Publisher
    engines: ThreadEngines
    models: tuple[Path, Path]

    @property
    def streams(self) -> list[Stream]:
        return self.publisher.sync._streams

    def publish(self, model: int, mutation: Mutation | None = None) -> None:
        """Bring a model as the next version; `mutation` changes what worker 0 gets. Raises what the worker raised."""
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
        """By some workers, or all of them."""
        shape = ModelShape.from_directory(self.models[model])
        for worker in workers or (0, 1):
            taken = self.engines.taken[0, worker]
            assert_has_shard(taken, shape, self.models[model], RolloutLayout(2), worker, torch.float32)

    def of_its_own(self) -> Case:
        """Another trainer and another engine with the same models."""
        return open_case(self.models, self.publisher.sync._settings.transport)

    def close(self) -> None:
        self.engines.close()
        self.publisher.close()


def open_case(models: tuple[Path, Path], transport: str) -> Case:
    publisher = Publisher(models[0], RolloutLayout(2), bucket_bytes=BUCKET_BYTES, timeout_s=60.0, transport=transport)
    return Case(publisher, ThreadEngines(ModelShape.from_directory(models[0]), RolloutLayout(2)), models)


@pytest.fixture(scope="module", params=["shared_memory", "cuda_ipc"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """With the checksums of a host, and with those of a device."""
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
    """A byte of a bucket is a piece's or a checksum's."""
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


def test_a_bucket_of_the_version_before_is_seen(case: Case) -> None:
    """Also one with the same weights: its checksums are of another version."""
    kept: dict[int, torch.Tensor] = {}
    case.publish(1, lambda number, memory: kept.update({number: memory.clone()}))

    def stale(number: int, memory: torch.Tensor) -> None:
        if number == 3:
            memory.copy_(kept[number])

    case.assert_refused(stale, "wrong bytes in bucket 3")


def test_a_torn_bucket_is_seen(case: Case) -> None:
    """Its first half is new and its second half still what the ring held."""
    old: dict[int, torch.Tensor] = {}
    case.publish(0, lambda number, memory: old.update({number: memory.clone()}))

    def torn(number: int, memory: torch.Tensor) -> None:
        if number == 2:
            memory[BUCKET_BYTES // 2 :] = old[number][BUCKET_BYTES // 2 :]

    case.assert_refused(torn, "wrong bytes in bucket 2")


def test_another_bucket_in_the_place_of_one_is_seen(case: Case) -> None:
    """Two buckets of one matrix have pieces of the same sizes; only what their checksums begin with tells them apart."""
    stream = case.streams[0]
    sizes = [stream.size[list(stream.pieces(bucket))].tolist() for bucket in range(stream.num_buckets)]
    bucket = next(number for number in range(1, len(sizes)) if sizes[number] == sizes[number - 1])
    sent: dict[int, torch.Tensor] = {}

    def late(number: int, memory: torch.Tensor) -> None:
        sent[number] = memory.clone()
        if number == bucket:
            memory.copy_(sent[number - 1])

    case.assert_refused(late, f"wrong bytes in bucket {bucket}")


def test_a_bucket_that_was_never_written_is_seen(case: Case) -> None:
    def empty(number: int, memory: torch.Tensor) -> None:
        if number == 4:
            memory.zero_()

    case.assert_refused(empty, "wrong bytes in bucket 4")


def of(plan: ReshardPlan, name: str) -> np.ndarray:
    """The copies of checkpoint tensors whose names end so."""
    wanted = [number for number, known in enumerate(plan.names) if known.endswith(name)]
    return np.isin(plan.name, wanted)


def gate_and_up_swapped(plan: ReshardPlan) -> ReshardPlan:
    row = plan.source_row.copy()
    gate, up = of(plan, "gate_proj.weight"), of(plan, "up_proj.weight")
    row[gate], row[up] = plan.source_row[up], plan.source_row[gate]
    return replace(plan, source_row=row)


def key_head_shifted(plan: ReshardPlan) -> ReshardPlan:
    return replace(plan, source_row=plan.source_row + 32 * of(plan, "k_proj.weight"))


def padding_dropped(plan: ReshardPlan) -> ReshardPlan:
    """The second worker's part of the vocabulary begins where the first one's would end without padding."""
    shifted = of(plan, "embed_tokens.weight") & (plan.destination_rank == 1)
    return replace(plan, source_row=plan.source_row - 30 * shifted)


def layer_skipped(plan: ReshardPlan) -> ReshardPlan:
    """Layer 1 gets what layer 0 has."""
    numbers = {name: number for number, name in enumerate(plan.source_parameters)}
    taken = np.array([numbers[name.replace(".layers.1.", ".layers.0.")] for name in plan.source_parameters])
    return replace(plan, source_parameter=taken[plan.source_parameter])


# Wrong plans, each with the worker whose weights it changes, and a parameter of those.
PLANS = [
    (gate_and_up_swapped, 0, r"layers\.0\.mlp\.gate_up_proj\.weight"),
    (key_head_shifted, 0, r"layers\.0\.self_attn\.qkv_proj\.weight"),
    (padding_dropped, 1, r"embed_tokens\.weight"),
    (layer_skipped, 0, r"layers\.1\."),
]


@pytest.mark.parametrize("mutation", [mutation for mutation, _, _ in PLANS])
def test_a_plan_that_is_wrong_at_one_end_is_refused(
    case: Case, monkeypatch: pytest.MonkeyPatch, mutation: Callable[[ReshardPlan], ReshardPlan]
) -> None:
    monkeypatch.setattr(case.publisher.sync, "_plan", mutation(case.publisher.sync._plan))
    with pytest.raises(SyncError, match="the trainer's reshard plan .* is not this worker's"):
        case.publish(1)
    monkeypatch.undo()
    case.publish(1)
    case.assert_taken(1)


@pytest.mark.parametrize(("mutation", "worker", "parameter"), PLANS)
def test_a_plan_that_is_wrong_at_both_ends_brings_other_weights(
    case: Case, monkeypatch: pytest.MonkeyPatch, mutation: Callable[[ReshardPlan], ReshardPlan], worker: int, parameter: str
) -> None:
    """Their plans agree and all checksums match: only the content tells."""
    for end in (publish, read):
        monkeypatch.setattr(end, "sync_plan", lambda *arguments: mutation(sync_plan(*arguments)))
    wrong = case.of_its_own()
    try:
        wrong.publish(1)
        assert wrong.engines.versions == [1]
        with pytest.raises(AssertionError, match=parameter):
            wrong.assert_taken(1, worker)
    finally:
        wrong.close()
