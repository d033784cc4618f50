"""Deltas and FP8 blocks; `test_conformance.py` compares the blocks with vLLM's. Checksums of a host and of a device; the
arithmetic of a device is the same on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.weight_sync.checks import CHUNK_WORDS, checksum, device_checksum, mixed_words
from megarl.weight_sync.codec import HEADER_BYTES, decode_delta, encode_delta

pytestmark = pytest.mark.sync


def as_bytes(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(words).view(np.uint8).copy())


@st.composite
def versions(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Old and new content and the bytes of an element: any bit patterns, any share changed, by little or by anything."""
    element_bytes = draw(st.sampled_from([1, 2, 4]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = draw(st.one_of(st.integers(0, 40), st.integers(1000, 6000)))
    word = np.dtype(f"u{element_bytes}")
    old = random.integers(0, np.iinfo(word).max, length, dtype=word, endpoint=True)
    step = draw(st.sampled_from([1, 3, 2 ** (8 * element_bytes - 1)]))
    moved = random.integers(-step, step, length, dtype=np.int64).astype(word)
    share = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]))
    return as_bytes(old), as_bytes(np.where(random.random(length) < share, old + moved, old)), element_bytes


@given(versions())
def test_a_delta_gives_back_every_bit(case: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    old, new, element_bytes = case
    original = old.clone()
    delta = encode_delta(old, new, element_bytes)
    assert torch.equal(old, original), "encoding changed the old content"
    for payload in (delta.payload, encode_delta(None, new, element_bytes).payload):
        content = original.clone()
        decode_delta(torch.cat([payload, torch.ones(9, dtype=torch.uint8)]), content, element_bytes)
        assert torch.equal(content, new)
    assert delta.payload.numel() <= new.numel() + HEADER_BYTES
    changed = int((original.view(-1, element_bytes) != new.view(-1, element_bytes)).any(dim=1).sum())
    assert delta.changed_bytes == changed * element_bytes


def step_of(share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 weights before and after a step that moves about a share of them by one unit in the last place."""
    random = torch.Generator().manual_seed(0)
    old = torch.randn(200_000, generator=random).bfloat16()
    moved = torch.rand(len(old), generator=random) < share
    return old.view(torch.uint8), (old.view(torch.int16) + moved.to(torch.int16)).view(torch.uint8)


@pytest.mark.parametrize(("share", "bytes_an_element"), [(0.0, 0.001), (0.01, 0.04), (0.3, 0.8), (1.0, 0.05)])
def test_a_small_step_takes_a_small_delta(share: float, bytes_an_element: float) -> None:
    old, new = step_of(share)
    delta = encode_delta(old, new, 2)
    assert delta.payload.numel() < bytes_an_element * 200_000
    assert delta.changed_bytes / new.numel() == pytest.approx(share, abs=0.01)


@given(st.data())
def test_a_broken_delta_is_refused_or_fills_its_own_content_alone(data: Any) -> None:
    """A flipped byte may change values, which the checksum detects; it never causes another error or size."""
    old, new = (content[: 2 * 3000] for content in step_of(data.draw(st.sampled_from([0.01, 0.3]))))
    payload = encode_delta(data.draw(st.sampled_from([old, None])), new, 2).payload.clone()
    payload[data.draw(st.integers(0, payload.numel() - 1))] ^= data.draw(st.integers(1, 255))
    torn = payload[: data.draw(st.sampled_from([payload.numel(), payload.numel() // 2, payload.numel() - 1]))]
    content = old.clone()
    try:
        decode_delta(torn, content, 2)
    except ValueError:
        assert torch.equal(content, old), "a refused delta changed the content"


on_both = pytest.mark.parametrize("check", [checksum, device_checksum], ids=["host", "device"])

Check = Callable[[torch.Tensor, int, int], torch.Tensor]
VERSION, NUMBER = 7, 3
SIZES = (2, 64, 1001, 3008)  # bytes


def content_of(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))


def value(check: Check, content: torch.Tensor, version: int = VERSION, number: int = NUMBER) -> int:
    result = check(content, version, number)
    assert result.dtype == torch.int64 and result.shape == ()
    return int(result)


@on_both
def test_equal_bytes_of_the_same_version_and_number_alone_have_the_same_checksum(check: Check) -> None:
    for size in SIZES:
        content = content_of(size)
        values = {value(check, content, version, number) for version in range(40) for number in range(40)}
        assert len(values) == 1600, "some versions or numbers do not count"
        assert value(check, content) == value(check, content.clone())


@on_both
@pytest.mark.parametrize(("size", "step"), [*((size, 37) for size in SIZES), (16 * CHUNK_WORDS + 8, 8 * CHUNK_WORDS - 1)])
def test_one_flipped_bit_anywhere_is_detected(check: Check, size: int, step: int) -> None:
    """Also in the first and the last word of a chunk."""
    content = content_of(size)
    expected = value(check, content)
    for byte in {0, size // 2, size - 1, *range(0, size, step)}:
        for bit in (1, 128):
            content[byte] ^= bit
            assert value(check, content) != expected
            content[byte] ^= bit
    assert value(check, content) == expected


@on_both
@pytest.mark.parametrize("width", [2, 4, 8, 64])
def test_elements_and_words_that_changed_places_are_detected(check: Check, width: int) -> None:
    content = content_of(8 * (CHUNK_WORDS + 8))
    for first, second in ((0, 1), (0, 7), (2, 6), (0, 8 * CHUNK_WORDS // width)):
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
