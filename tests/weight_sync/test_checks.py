"""Checksums of a host and of a device; the arithmetic of a device is the same on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megarl.weight_sync.checks import CHUNK_WORDS, checksum, device_checksum, mixed_words

pytestmark = pytest.mark.sync
on_both = pytest.mark.parametrize("check", [checksum, device_checksum], ids=["host", "device"])

Check = Callable[[torch.Tensor, int, int], torch.Tensor]
VERSION, NUMBER = 7, 3
SIZES = (2, 64, 1001, 3008)  # bytes


def content_of(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))


def value(check: Check, content: torch.Tensor, version: int = VERSION, number: int = NUMBER) -> int:
    made = check(content, version, number)
    assert made.dtype == torch.int64 and made.shape == ()
    return int(made)


@on_both
def test_equal_bytes_of_the_same_version_and_number_alone_have_the_same_checksum(check: Check) -> None:
    for size in SIZES:
        content = content_of(size)
        values = {value(check, content, version, number) for version in range(40) for number in range(40)}
        assert len(values) == 1600, "some versions or numbers do not count"
        assert value(check, content) == value(check, content.clone())


@on_both
@pytest.mark.parametrize("size", SIZES)
def test_one_flipped_bit_anywhere_is_detected(check: Check, size: int) -> None:
    content = content_of(size)
    expected = value(check, content)
    for byte in {0, size // 2, size - 1, *range(0, size, 37)}:
        for bit in (1, 128):
            content[byte] ^= bit
            assert value(check, content) != expected
            content[byte] ^= bit
    assert value(check, content) == expected


@on_both
def test_bytes_of_every_chunk_count(check: Check) -> None:
    content = torch.zeros(8 * (2 * CHUNK_WORDS + 1), dtype=torch.uint8)
    values = {value(check, content)}
    for byte in (0, 8 * CHUNK_WORDS - 1, 8 * CHUNK_WORDS, 16 * CHUNK_WORDS, len(content) - 1):
        content[byte] = 1
        values.add(value(check, content))
        content[byte] = 0
    assert len(values) == 6


@on_both
@pytest.mark.parametrize("width", [2, 4, 8, 64])
def test_elements_and_words_that_changed_places_are_detected(check: Check, width: int) -> None:
    content = content_of(3008)
    for first, second in ((0, 1), (0, 7), (2, 6)):
        moved = content.view(-1, width).clone()
        moved[[first, second]] = moved[[second, first]]
        assert value(check, moved.view(-1)) != value(check, content)


@on_both
def test_signs_that_flip_in_pairs_do_not_cancel(check: Check) -> None:
    """A weighted sum of words would miss them: twice the highest bit is 0 modulo 2**64."""
    content = content_of(3008)
    for other in range(1, 40):
        flipped = content.clone()
        flipped[[7, 8 * other + 7]] ^= 128
        assert value(check, flipped) != value(check, content)


@on_both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_layout_in_memory_does_not_count(check: Check, dtype: torch.dtype) -> None:
    """A worker hashes rows that lie apart, and a rank a part of a matrix."""
    matrix = torch.randn(30, 17, generator=torch.Generator().manual_seed(0)).to(dtype)
    apart = torch.zeros(40, 40, dtype=dtype)[3:33, 5:22]
    apart.copy_(matrix)
    assert value(check, matrix) == value(check, apart)


@pytest.mark.gpu
def test_a_gpu_computes_what_a_cpu_does() -> None:
    for size in SIZES:
        content = content_of(size)
        assert value(checksum, content.cuda()) == value(device_checksum, content)


def test_a_word_is_mixed_one_to_one() -> None:
    """Also in the last step: a shift that repeats the sign would map two words to one."""
    values = [*range(-500, 500), *(1 << bit for bit in range(10, 63)), *(~(1 << bit) for bit in range(10, 63))]
    words, mixed = torch.zeros(2, dtype=torch.int64), set()
    for word in values:
        words[1] = word
        mixed.add(int(mixed_words(words, 0, 12345)[1]))
    assert len(mixed) == len(set(values))
