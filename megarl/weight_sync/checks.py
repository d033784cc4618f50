"""Checksums of the bytes of a sync, made where the bytes are sent and compared where they arrived.

In host memory bytes are hashed by xxh3, at the speed of memory. On a device the words are mixed and added up there, and the
host reads the sums once a version. Both checksums depend on the version and on a number of the bytes, so bytes of another
version or of another place do not pass. A checksum is no defence against chosen bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import xxhash

CHECKSUM_BYTES = 8
# Words that are mixed at a time: a check needs a few times 4 MiB besides the weights.
CHUNK_WORDS = 1 << 19
# The constants of splitmix64 (Steele, Lea and Flood 2014, fig. 16).
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def checksum(content: torch.Tensor, version: int, number: int) -> torch.Tensor:
    """Compute the checksum of a tensor of at most two dimensions, whatever its strides: int64 [], on the tensor's device.
    The host does not wait for the device."""
    return checksums([content], version, [number])[0]


def checksums(contents: Iterable[torch.Tensor], version: int, numbers: Sequence[int]) -> torch.Tensor:
    """Compute the checksums of tensors of one device, one after the other, as `checksum`: int64 [tensors]."""
    sums: list[Any] = [
        _host_checksum(content, version, number)
        if content.device.type == "cpu"
        else device_checksum(content, version, number)
        for content, number in zip(contents, numbers, strict=True)
    ]
    if sums and isinstance(sums[0], torch.Tensor):
        return torch.stack(sums)
    return torch.tensor(sums, dtype=torch.int64)  # one tensor for all sums, not one for each


def _host_checksum(content: torch.Tensor, version: int, number: int) -> int:
    memory = content.contiguous().view(torch.uint8).numpy().data  # numpy has no bfloat16
    return _signed(xxhash.xxh3_64_intdigest(memory, seed=(version << 32 | number) & 0xFFFFFFFFFFFFFFFF))


def device_checksum(content: torch.Tensor, version: int, number: int) -> torch.Tensor:
    """Compute the checksum that `checksum` computes on devices, on any device.

    Each word is mixed one to one with its place, the version and the number, so any change of a single word is detected for
    certain. Other errors (words that changed places or belong to another version) are missed in about one case in 2**64.
    """
    content = content.contiguous().view(-1).view(torch.uint8)
    rest = len(content) % 8
    if rest or content.data_ptr() % 8:  # `pad` copies
        content = torch.nn.functional.pad(content, (0, 8 - rest)) if rest else content.clone()
    words = content.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    for begin in range(0, len(words), CHUNK_WORDS):
        total += mixed_words(words[begin : begin + CHUNK_WORDS], begin, version << 32 | number).sum()
    return total


def mixed_words(words: torch.Tensor, begin: int, seed: int) -> torch.Tensor:
    """Mix words, int64 [words], with their places, from place `begin` on: one step of splitmix64."""
    mixed = torch.arange(begin, begin + len(words), device=words.device).mul_(_signed(GOLDEN)).add_(_signed(seed))
    mixed ^= words
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        # torch's right shift repeats the sign, and then two words become one: clear those bits.
        mixed ^= (mixed >> shift) & ((1 << 64 - shift) - 1)
        mixed *= _signed(factor)
    return mixed


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
