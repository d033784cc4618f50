"""Checksums of buckets on a host and on a device; the arithmetic of a device is the same on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.weight_sync import checks
from megarl.weight_sync.checks import SAMPLE, DeviceChecks, HostChecks, mixed_words
from megarl.weight_sync.stream import ALIGNMENT, CHECKSUM_BYTES, Piece, Stream

pytestmark = pytest.mark.sync

VERSION, BUCKET = 7, 3
SIZES = [[640, 128, 3008, 64], [2, 1000, 126] + [192] * 60]  # bytes of the pieces of two parts
KINDS = ("host", "device", "sampled")
Parts = list[list[Piece]]


def parts_of_a_bucket() -> tuple[Parts, int]:
    """Pieces as a stream lays them out, and the bytes that they take."""
    parts: Parts = []
    end = number = 0
    for sizes in SIZES:
        places = []
        for size in sizes:
            places.append((end, end + size))
            end = -(-(end + size) // ALIGNMENT) * ALIGNMENT
        table = [end + CHECKSUM_BYTES * position for position in range(len(sizes))]
        end = -(-(end + CHECKSUM_BYTES * len(sizes)) // ALIGNMENT) * ALIGNMENT
        rows = enumerate(zip(places, table, strict=True), start=number)
        parts.append([Piece(position, "p", 0, 0, 1, 1, *place, check, 0) for position, (place, check) in rows])
        number += len(sizes)
    return parts, end


def on_device(
    sampled: bool, version: int, bucket: int = BUCKET, source: int | None = None, num: int = 1, where: str = "cpu"
) -> DeviceChecks:
    """The checks of a stream of `num` buckets, from `bucket` on, each with both parts."""
    parts, size = parts_of_a_bucket()
    pieces = [piece for part in parts for piece in part]
    none = np.zeros(num * len(pieces), dtype=np.int64)
    rank = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    columns = [np.array(column) for column in zip(*((p.start, p.end - p.start, p.check) for p in pieces), strict=True)]
    offset, sizes, check, source_rank = (np.tile(column, num) for column in (*columns, rank))
    buckets = np.repeat(np.arange(bucket, bucket + num), len(pieces))
    stream = Stream(none, none, none, source_rank, buckets, offset, sizes, check, none, bucket + num, size)
    found = DeviceChecks(stream, torch.device(where), sampled, source)
    found.begin(version)
    return found


def written(kind: str, version: int = VERSION, bucket: int = BUCKET) -> tuple[torch.Tensor, Parts]:
    """A bucket of random bytes with its checksums."""
    parts, size = parts_of_a_bucket()
    memory = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for rank, part in enumerate(parts):
        if kind != "host":
            on_device(kind == "sampled", version, bucket, rank).write(bucket, memory)
            continue
        seal = HostChecks(memory, version, bucket)
        for piece in part:
            seal.add(piece)
        seal.close()
    return memory, parts


def wrong(kind: str, memory: torch.Tensor, parts: Parts, version: int = VERSION, bucket: int = BUCKET) -> list[int]:
    """Numbers of the pieces that a reader finds wrong."""
    if kind != "host":
        found = on_device(kind == "sampled", version, bucket, where=memory.device.type)
        found.compare(bucket, memory)
        return found.wrong()
    check = HostChecks(memory, version, bucket)
    return [piece.number for part in parts for piece in part if check.is_wrong(piece)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_passes_under_its_own_version_and_bucket_alone(kind: str) -> None:
    memory, parts = written(kind)
    assert wrong(kind, memory, parts) == []
    firsts = {part[0].number for part in parts}
    assert firsts <= set(wrong(kind, memory, parts, version=VERSION - 1))
    assert firsts <= set(wrong(kind, memory, parts, bucket=BUCKET + 2))


@pytest.mark.parametrize("kind", ["host", "device"])
def test_one_flipped_bit_anywhere_is_found_in_its_piece(kind: str) -> None:
    memory, parts = written(kind)
    for part in parts:
        for piece in part[:5]:
            for byte in (piece.start, (piece.start + piece.end) // 2, piece.end - 1):
                for bit in (1, 128):
                    memory[byte] ^= bit
                    assert wrong(kind, memory, parts) == [piece.number]
                    memory[byte] ^= bit
    assert wrong(kind, memory, parts) == []


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("width", [2, 4, 8, 64])
def test_elements_and_words_that_changed_places_are_found(kind: str, width: int) -> None:
    memory, parts = written(kind)
    for first, second in ((0, 1), (0, 7), (2, 6)):
        one, two = (parts[0][2].start + width * place for place in (first, second))
        moved = memory.clone()
        moved[one : one + width], moved[two : two + width] = memory[two : two + width], memory[one : one + width]
        assert wrong(kind, moved, parts) == [2]


@pytest.mark.parametrize("kind", ["device", "host"])
def test_signs_that_flip_in_pairs_do_not_cancel(kind: str) -> None:
    """A weighted sum of words would miss them: twice the highest bit is 0 modulo 2**64."""
    memory, parts = written(kind)
    piece = parts[0][2]
    for other in range(1, 40):
        for byte in (7, 8 * other + 7):
            memory[piece.start + byte] ^= 128
        assert wrong(kind, memory, parts) == [piece.number]
        for byte in (7, 8 * other + 7):
            memory[piece.start + byte] ^= 128


def test_a_sample_is_one_of_sixteen_another_one_in_each_version_and_both_ends_choose_alike() -> None:
    parts, _ = parts_of_a_bucket()
    ends = [on_device(True, 0), *(on_device(True, 0, source=rank) for rank in range(len(parts)))]
    chosen = []
    for version in range(1, 201):
        for end in ends:
            end.begin(version)
        at_reader, *at_ranks = (end._chosen.tolist() for end in ends)
        assert at_reader == [piece for rank in at_ranks for piece in rank]
        chosen.append(set(at_reader))
    others = len(parts[0]) + len(parts[1]) - len(parts)
    share = sum(len(one) - len(parts) for one in chosen) / (others * len(chosen))
    assert 0.8 / SAMPLE < share < 1.2 / SAMPLE
    assert set.union(*chosen) == {piece.number for part in parts for piece in part}


@pytest.mark.gpu
def test_a_gpu_adds_up_as_a_cpu_does() -> None:
    memory, parts = written("device")
    assert wrong("device", memory.cuda(), parts) == []
    memory[parts[0][2].start] ^= 1
    assert wrong("device", memory.cuda(), parts) == [2]


def test_a_word_is_mixed_one_to_one() -> None:
    """Also in the last step: a shift that repeats the sign would map two words to one."""
    words = torch.zeros(2, dtype=torch.int64)
    seed, seen = checks._seed(VERSION, BUCKET), set()
    values = {*range(-500, 500), *(1 << bit for bit in range(63)), *(~(1 << bit) for bit in range(63))}
    for value in values:
        words[1] = value
        seen.add(int(mixed_words(words, 0, seed)[1]))
    assert len(seen) == len(values)
