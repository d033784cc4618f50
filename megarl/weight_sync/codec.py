"""What weights become on the wire: FP8 blocks for engines that serve FP8, differences to the last version for slow links.

Pure functions of tensors. A cast to a shorter float needs none: `Tensor.copy_` does it.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np
import torch

from megarl.models.quantised_blocks import BLOCK, scale_bytes

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max  # 448
_SMALLEST = 1e-4  # a block's largest value counts as this at least, so that a block of zeros has a scale


class Blocks(NamedTuple):
    """A matrix in FP8, by the names of DeepSeek's checkpoints: element = weight * weight_scale_inv of its block."""

    weight: torch.Tensor  # e4m3 [rows, columns]
    weight_scale_inv: torch.Tensor  # float32 [blocks of rows, blocks of columns]; the last may be smaller


def quantise_blocks(matrix: torch.Tensor) -> Blocks:
    """A matrix [rows, columns] of any float format as FP8 blocks that start at its first element.

    The numbers are those of vLLM's `per_block_cast_to_fp8` (`vllm.utils.deep_gemm`), bit for bit: scale = largest / 448, and
    elements times 1 / scale. NaN and infinity give blocks of NaN.
    """
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=_SMALLEST) / _LARGEST
    weight = (blocks * (1.0 / scale)).to(FP8)
    return Blocks(weight.view_as(padded)[:rows, :columns].contiguous(), scale.view(scale.shape[0], scale.shape[2]))


def write_blocks(blocks: Blocks, memory: torch.Tensor) -> None:
    """Blocks as they travel, uint8 [bytes]: the scales, and the elements behind them."""
    num_scales = blocks.weight_scale_inv.nbytes
    memory[:num_scales].view(torch.float32).view_as(blocks.weight_scale_inv).copy_(blocks.weight_scale_inv)
    memory[num_scales:].view(FP8).view_as(blocks.weight).copy_(blocks.weight)


def read_blocks(memory: torch.Tensor, rows: int, columns: int) -> Blocks:
    """The blocks of a matrix [rows, columns] that `write_blocks` wrote, where they lie."""
    scales = memory[: scale_bytes(rows, columns)]
    weight = memory[len(scales) :].view(FP8).view(rows, columns)
    return Blocks(weight, scales.view(torch.float32).view(-(-rows // BLOCK), -(-columns // BLOCK)))


def dequantise_blocks(blocks: Blocks) -> torch.Tensor:
    """The matrix that an engine computes with, float32 [rows, columns]."""
    rows, columns = blocks.weight.shape
    scale = blocks.weight_scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return blocks.weight.float() * scale[:rows, :columns]


# A delta begins with: form, bytes of an element, whether the rest is deflated, bytes of the content, changed elements,
# bytes of their places, bytes of the rest before it was deflated, and as it follows.
_HEADER = struct.Struct("<BBBxxxxxQQQQQ")
HEADER_BYTES = _HEADER.size
# How the changed elements are told apart: not at all, one bit for each element, or one byte for each changed one, which is
# the number of equal elements before it; 255 of them make a byte of their own.
RAW, BITS, GAPS = range(3)
_SKIP = 255
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Delta(NamedTuple):
    """A content as its difference to an older one of the same size."""

    payload: torch.Tensor  # uint8 [bytes]
    changed_bytes: int  # of the elements that differ
    num_bytes: int  # of the content

    @property
    def changed_share(self) -> float:
        return self.changed_bytes / max(1, self.num_bytes)


def encode_delta(old: torch.Tensor | None, new: torch.Tensor, element_bytes: int, level: int = 1) -> Delta:
    """`new` as the places and differences of the elements that changed since `old`; both uint8 [bytes] on a CPU. With
    `old` None it is the content itself, all of which counts as changed.

    Elements are compared and subtracted as whole numbers of `element_bytes` (1, 2, 4 or 8), so every bit pattern comes back,
    NaN too. An update moves a weight by few units in the last place, so the differences, least significant bytes first, are
    small numbers and then zeros: `level` (zlib's, 1 fast to 9, 0 for none) of deflation takes them to a half. Where all that
    does not pay, the content itself travels, in `HEADER_BYTES` more.

    Raises ValueError for contents of other sizes.
    """
    after = _words(new, element_bytes)
    if old is None:
        return Delta(_payload(RAW, element_bytes, False, new.numel(), 0, 0, new.numel(), after), new.numel(), new.numel())
    before = _words(old, element_bytes)
    if len(before) != len(after):
        raise ValueError(f"a delta of {new.numel()} bytes needs as many old ones, not {old.numel()}")
    changed = before != after
    places = np.flatnonzero(changed)
    form, table = _place_table(changed, places)
    # Of floats of 32 bits an update changes nearly all: without deflation there is nothing to gain.
    may_pay = level > 0 or table.nbytes + len(places) * element_bytes < new.numel()
    body = table.tobytes() + _planes(before[places], after[places]).tobytes() if may_pay else b""
    size, deflated = len(body), False
    if level and body:
        shorter = zlib.compress(body, level)
        deflated = len(shorter) < size
        body = shorter if deflated else body
    rest = np.frombuffer(body, np.uint8)
    if not may_pay or len(body) >= new.numel():
        form, deflated, table, rest, size = RAW, False, table[:0], after, new.numel()
    payload = _payload(form, element_bytes, deflated, new.numel(), len(places), table.nbytes, size, rest)
    return Delta(payload, len(places) * element_bytes, new.numel())


def decode_delta(payload: torch.Tensor, content: torch.Tensor) -> None:
    """Make the old `content`, uint8 [bytes], the new one, in place. What follows the delta in `payload` is not looked at.

    Raises ValueError for a payload that is no delta of such a content, before anything is written. A delta of another old
    content is not seen here: the checksum of the result tells.
    """
    data = payload.numpy()
    if data.size < _HEADER.size:
        raise ValueError(f"a delta of {data.size} bytes is torn: its header has {_HEADER.size}")
    header = _HEADER.unpack(data[: _HEADER.size].tobytes())
    form, element_bytes, deflated, num_bytes, num_changed, table_bytes, size, length = header
    if form > GAPS or element_bytes not in _WORDS or num_bytes != content.numel():
        raise ValueError(
            f"no delta of {content.numel()} bytes: form {form} of {num_bytes} bytes, {element_bytes} an element"
        )
    body = data[_HEADER.size : _HEADER.size + length]
    # Places take no more than a bit for each element, and some bytes.
    if body.size != length or size > 2 * num_bytes + _HEADER.size:
        raise ValueError(f"a delta is torn: {body.size} bytes instead of {length}, of {size} inflated ones")
    if deflated:
        body = _inflated(body, size)
    if body.size != size or (form == RAW and size != num_bytes):
        raise ValueError(f"a delta is torn: {body.size} bytes instead of {size}")
    words = _words(content, element_bytes)
    if form == RAW:
        words[:] = body.view(words.dtype)
        return
    if size != table_bytes + num_changed * element_bytes:
        raise ValueError(f"a delta is torn: {size} bytes of {num_changed} elements and {table_bytes} of their places")
    places = _places(form, body[:table_bytes], len(words))
    if len(places) != num_changed or (num_changed and places[-1] >= len(words)):
        raise ValueError(f"a delta is torn: {len(places)} places for {num_changed} elements of {len(words)}")
    words[places] += _differences(body[table_bytes:], words.dtype)


def _payload(
    form: int,
    element_bytes: int,
    deflated: bool,
    num_bytes: int,
    num_changed: int,
    table_bytes: int,
    size: int,
    rest: np.ndarray,
) -> torch.Tensor:
    """The header's numbers and what follows them, uint8 [bytes]."""
    header = _HEADER.pack(form, element_bytes, deflated, num_bytes, num_changed, table_bytes, size, rest.nbytes)
    return torch.from_numpy(np.concatenate([np.frombuffer(header, np.uint8), rest.view(np.uint8)]))


def _words(content: torch.Tensor, element_bytes: int) -> np.ndarray:
    if content.numel() % element_bytes:
        raise ValueError(f"{content.numel()} bytes are no multiple of an element's {element_bytes}")
    return content.numpy().view(_WORDS[element_bytes])


def _place_table(changed: np.ndarray, places: np.ndarray) -> tuple[int, np.ndarray]:
    """The shorter form of the places, and its bytes."""
    if len(places) > len(changed) // 8:
        return BITS, np.packbits(changed)
    gaps = np.diff(places, prepend=-1) - 1
    skips = gaps // _SKIP
    ends = np.cumsum(skips + 1)
    if len(ends) and ends[-1] > len(changed) // 8:
        return BITS, np.packbits(changed)
    table = np.full(ends[-1] if len(ends) else 0, _SKIP, np.uint8)
    table[ends - 1] = gaps - skips * _SKIP
    return GAPS, table


def _places(form: int, table: np.ndarray, num_elements: int) -> np.ndarray:
    if form == BITS:
        return np.flatnonzero(np.unpackbits(table)[:num_elements])
    steps = np.where(table == _SKIP, _SKIP, table.astype(np.int64) + 1)
    return (np.cumsum(steps) - 1)[table != _SKIP]


def _planes(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Differences, small ones either way as small numbers (0, -1, 1, -2, 2 … are 0, 1, 2, 3, 4 …), all their lowest bytes
    first: uint8 [bytes of an element, elements]."""
    difference = after - before  # modulo 2 ** bits
    negative = difference >> (8 * before.dtype.itemsize - 1)
    folded = (difference << 1) ^ (0 - negative)
    return np.stack([(folded >> 8 * place).astype(np.uint8) for place in range(before.dtype.itemsize)])


def _differences(planes: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The inverse of `_planes`: what to add, [elements]."""
    folded = np.zeros(planes.size // dtype.itemsize, dtype)
    for place, plane in enumerate(planes.reshape(dtype.itemsize, -1)):
        folded |= plane.astype(dtype) << 8 * place
    return (folded >> 1) ^ (0 - (folded & 1))


def _inflated(body: np.ndarray, size: int) -> np.ndarray:
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(body.tobytes(), size)
    except zlib.error as error:
        raise ValueError(f"a delta is torn: {error}") from error
    if not stream.eof and size:
        raise ValueError(f"a delta is torn: more than the {size} bytes that it says")
    return np.frombuffer(content, np.uint8)
