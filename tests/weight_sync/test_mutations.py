"""No worker takes bytes that were damaged on the way: flipped bits, torn, stale, exchanged or unwritten buckets.

`test_shards.py` refuses a wrong plan; `test_conformance.py` compares the plans' tables with vLLM's loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.weight_sync.buckets import PieceStream, Round
from megarl.weight_sync.checks import CHECKSUM_BYTES
from megarl.weight_sync.group import BucketSender, Written
from megarl.weight_sync.manifest import SyncError
from tests.sync_cases import SyncCase

pytestmark = pytest.mark.sync

BUCKET_BYTES = 1 << 14
# Given the bucket's number and memory after it was packed.
Mutation = Callable[[int, torch.Tensor], None]


class Case(SyncCase):
    """Its buckets may change on their way."""

    @property
    def stream(self) -> PieceStream:
        return self.publisher.sync._streams[0]

    def publish(self, model: int, mutation: Mutation | None = None) -> None:
        """Publish a model as the next version; `mutation` changes the buckets of worker 0. Raises what the worker raised."""
        sender: Any = self.publisher.sync._sender

        def send(entries: Round, written: Sequence[Written]) -> None:
            for bucket, stream, _, content in written:  # the only part of its bucket
                if mutation is not None and stream == 0:
                    mutation(bucket, content)
            BucketSender.send(sender, entries, written)

        sender.send = send
        self.publisher.publish(self.engines.versions[0] + 1, self.models[model], self.engines)

    def assert_refused(self, mutation: Mutation, message: str) -> None:
        version = self.engines.versions[0]
        with pytest.raises(SyncError, match=message):
            self.publish(1, mutation)
        assert self.engines.versions == [version]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """With the checksums of a host; `test_codec.py` has what those of a device detect."""
    case = Case(tmp_path_factory.mktemp("models"), bucket_bytes=BUCKET_BYTES, transport="group")
    yield case
    case.close()


@pytest.fixture(autouse=True)
def first_version(case: Case) -> None:
    case.publish(0)
    case.assert_taken(0)


@settings(max_examples=40)
@given(st.data())
def test_a_bit_that_flips_is_seen(case: Case, data: Any) -> None:
    """Also between the boxes, and in the checksum; only the rest of a checksum's line holds nothing."""
    bucket = data.draw(st.integers(0, case.stream.num_buckets - 1))
    byte = data.draw(st.integers(0, case.stream.parts[bucket][-1].end - 1))
    bit = 1 << data.draw(st.integers(0, 7))

    def flip(number: int, memory: torch.Tensor) -> None:
        if number == bucket:
            memory[byte] ^= bit

    if any(part.check + CHECKSUM_BYTES <= byte < part.end for part in case.stream.parts[bucket]):
        case.publish(1, flip)
        case.assert_taken(1)
    else:
        case.assert_refused(flip, rf"wrong bytes in bucket {bucket} of {case.stream.num_buckets} from .*: (model|lm_head)\.")


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
    sizes = [case.stream.size[parts[0].pieces].tolist() for parts in case.stream.parts]
    bucket = next(number for number in range(1, len(sizes)) if sizes[number] == sizes[number - 1])
    sent: dict[int, torch.Tensor] = {}

    def late(number: int, memory: torch.Tensor) -> None:
        sent[number] = memory.clone()
        if number == bucket:
            memory.copy_(sent[number - 1])

    case.assert_refused(late, f"wrong bytes in bucket {bucket}")
