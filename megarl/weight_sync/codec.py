"""Encode weights for the wire: FP8 blocks for engines that serve FP8, differences to the last version for slow links.

For differences each end keeps the bytes of the last version: a trainer rank the bytes of its parts, a worker the bytes of
its stream. Only the changes of the next version travel. The worker applies them to its copy, and reads boxes and checksums
as usual. Checksums cover the whole content, so a difference that is applied to other bytes never passes. A version without a
base travels whole. A message is the checksum of its part and then a delta of the part's bytes.

A cast to a shorter float needs no codec: `Tensor.copy_` does it.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np
import torch

from megarl.models.quantised_blocks import BLOCK, scale_bytes
from megarl.weight_sync.buckets import ALIGNMENT, FP8, LocalBox, Part, PieceStream
from megarl.weight_sync.manifest import SyncError, WeightManifest

SCALES = "_scale_inv"  # suffix of the parameter with the scales of a weight in FP8 blocks
_LARGEST = torch.finfo(FP8).max  # 448
_SMALLEST = 1e-4  # a block's largest value counts as at least this, so that a block of zeros has a scale


class Blocks(NamedTuple):
    """A matrix in FP8, by the names of DeepSeek's checkpoints: element = weight * weight_scale_inv of its block."""

    weight: torch.Tensor  # e4m3 [rows, columns]
    weight_scale_inv: torch.Tensor  # float32 [blocks of rows, blocks of columns]; the last may be smaller


def quantise_blocks(matrix: torch.Tensor) -> Blocks:
    """Quantise a matrix [rows, columns] of any float format into FP8 blocks that start at its first element.

    The numbers are those of vLLM's `per_block_cast_to_fp8` (`vllm.utils.deep_gemm`), bit for bit: scale = largest / 448, and
    elements times 1 / scale. NaN and infinity give blocks of NaN.
    """
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=_SMALLEST) / _LARGEST
    weight = (blocks * (1.0 / scale)).to(FP8)
    return Blocks(weight.view_as(padded)[:rows, :columns].contiguous(), scale.view(scale.shape[0], scale.shape[2]))


def blocks_in(memory: torch.Tensor, rows: int, columns: int) -> Blocks:
    """View memory, uint8 [bytes], as the blocks of a matrix [rows, columns] as they travel: scales, then elements."""
    scales = memory[: scale_bytes(rows, columns)]
    weight = memory[len(scales) :].view(FP8).view(rows, columns)
    return Blocks(weight, scales.view(torch.float32).view(-(-rows // BLOCK), -(-columns // BLOCK)))


def scales_of(box: LocalBox) -> LocalBox:
    """Return the box of the scales that belong to a box of FP8 blocks."""
    rows, cols = -(-box.rows // BLOCK), -(-box.cols // BLOCK)
    return LocalBox(box.parameter + SCALES, box.row // BLOCK, box.col // BLOCK, rows, cols, torch.float32)


_HEADER = struct.Struct("<BxxxxxxxQ")  # of a delta: whether it is a difference, and the bytes that follow
HEADER_BYTES = _HEADER.size
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Delta(NamedTuple):
    """A content as its difference to an older content of the same size."""

    payload: torch.Tensor  # uint8 [bytes]
    changed_bytes: int  # of the elements that differ


def encode_delta(old: torch.Tensor | None, new: torch.Tensor, element_bytes: int) -> Delta:
    """Encode `new` as a bit for each element that says whether it changed since `old`, and the differences of those that
    did, deflated; both are uint8 [bytes] on a CPU. With `old` None the delta holds all of `new`, which counts as changed.

    Elements are compared and subtracted as whole numbers of `element_bytes` (1, 2 or 4), so every bit pattern comes back,
    NaN too. Where the delta would be longer, the content itself travels, in `HEADER_BYTES` more.
    """
    after = new.numpy().view(_WORDS[element_bytes])
    is_difference, num_changed, rest = False, len(after), new.numpy()
    if old is not None:
        before = old.numpy().view(after.dtype)
        changed = before != after
        num_changed = int(changed.sum())
        body = np.packbits(changed).tobytes() + (after[changed] - before[changed]).tobytes()  # modulo 2 ** bits
        shorter = np.frombuffer(zlib.compress(body, 1), np.uint8)
        if len(shorter) < new.numel():
            is_difference, rest = True, shorter
    header = np.frombuffer(_HEADER.pack(is_difference, len(rest)), np.uint8)
    return Delta(torch.from_numpy(np.concatenate([header, rest])), num_changed * element_bytes)


def decode_delta(payload: torch.Tensor, content: torch.Tensor, element_bytes: int) -> None:
    """Turn the old `content`, uint8 [bytes], into the new content in place. Bytes after the delta in `payload` are ignored.

    Raises ValueError for a payload that is no delta of such a content, before anything is written. A delta of another old
    content is not detected here but by the checksum of the result.
    """
    data = payload.numpy()
    is_difference, length = _HEADER.unpack(data[:HEADER_BYTES].tobytes())
    body = data[HEADER_BYTES : HEADER_BYTES + length]
    if len(body) != length or (not is_difference and length != content.numel()):
        raise ValueError(f"no delta of {content.numel()} bytes: {len(body)} of {length} bytes")
    if not is_difference:
        content.copy_(torch.from_numpy(body))
        return
    words = content.numpy().view(_WORDS[element_bytes])
    num_flag_bytes = -(-len(words) // 8)
    try:
        inflated = np.frombuffer(zlib.decompressobj().decompress(body.tobytes(), num_flag_bytes + content.numel()), np.uint8)
    except zlib.error as error:
        raise ValueError(f"a delta is torn: {error}") from error
    changed = np.unpackbits(inflated[:num_flag_bytes])[: len(words)].astype(bool)
    differences = inflated[num_flag_bytes:]
    if len(inflated) < num_flag_bytes or len(differences) != int(changed.sum()) * element_bytes:
        raise ValueError(f"a delta is torn: {len(differences)} bytes for {int(changed.sum())} changed elements")
    words[changed] += np.frombuffer(differences.tobytes(), words.dtype)


class SentParts:
    """A trainer rank's copy of what it sent last, in host memory."""

    def __init__(self) -> None:
        self._contents: dict[tuple[int, int], torch.Tensor] = {}  # by stream and bucket

    def begin(self, manifest: WeightManifest) -> None:
        self._has_base, self._element_bytes = manifest.base is not None, _element_bytes(manifest)
        self.changed_bytes = self.content_bytes = 0  # of this attempt

    def message(self, bucket: int, stream: int, part: Part, content: torch.Tensor) -> torch.Tensor:
        """Return the message for a part's bytes, uint8 [bytes], and keep the bytes for the next version."""
        num_bytes = part.check - part.start
        new, key = content[:num_bytes], (stream, bucket)
        delta = encode_delta(self._contents[key] if self._has_base else None, new, self._element_bytes)
        self.changed_bytes += delta.changed_bytes
        self.content_bytes += new.numel()
        self._contents.setdefault(key, torch.empty(num_bytes, dtype=torch.uint8)).copy_(new)
        return torch.cat([content[num_bytes:], delta.payload])


class TakenParts:
    """A worker's copy of the stream that it received last, in host memory."""

    def __init__(self, stream: PieceStream) -> None:
        self.stream = stream
        self.version: int | None = None  # of all contents
        self._contents = [[torch.zeros(p.check - p.start, dtype=torch.uint8) for p in b] for b in stream.parts]

    def begin(self, manifest: WeightManifest) -> None:
        """Begin a version. Raises SyncError if it is a difference to another version than the kept one."""
        kept, self.version = self.version, None
        self._element_bytes = _element_bytes(manifest)
        if manifest.base is not None and manifest.base != kept:
            raise SyncError(
                f"weight version {manifest.version} comes as its difference to version {manifest.base}, but this worker "
                f"keeps {'none' if kept is None else f'version {kept}'}"
            )

    def put(self, message: torch.Tensor, bucket: int, number: int, memory: torch.Tensor) -> None:
        """Decode a message into the bucket's memory; `number` is the part's number in the bucket. Raises SyncError for a
        torn message."""
        part, stored = self.stream.parts[bucket][number], self._contents[bucket][number]
        try:
            decode_delta(message[ALIGNMENT:], stored, self._element_bytes)
        except ValueError as error:
            raise SyncError(f"bucket {bucket} from trainer rank {part.source_rank}: {error}") from error
        memory[part.start : part.check].copy_(stored)
        memory[part.check : part.end].copy_(message[:ALIGNMENT])


def _element_bytes(manifest: WeightManifest) -> int:
    """Return the bytes of an element on the wire; an element of an FP8 block has one."""
    return 1 if manifest.quantization else manifest.dtype.itemsize
