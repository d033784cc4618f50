"""Megatron shards from a Hugging Face directory and back, box by box.

No rank reads or holds more than its own boxes plus one tensor: safetensors are sliced on disk, and written in place.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from megarl.models import ModelShape
from megarl.models.layout import Segment
from megarl.models.megatron_weights import checkpoint_sizes
from megarl.models.stored_weights import INDEX, SCORE, check_weights, plan_files, stored_tensors

_FORMATS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
MAX_FILE_BYTES = 4 << 30


def load_shards(
    directory: str | Path,
    shape: ModelShape,
    segments: Iterable[Segment],
    shards: Mapping[str, Tensor],
    critic: bool = False,
) -> None:
    """Fill this rank's parameters.

    Padding rows become zero; a parameter that no segment covers must be filled by the caller (a value head). Raises
    ValueError for a checkpoint that is not the one of `shape`, before anything is read of it.
    """
    stored = check_weights(directory, shape, critic)
    by_file: dict[Path, list[Segment]] = defaultdict(list)
    for segment in segments:
        by_file[stored[segment.name].file].append(segment)
    with torch.no_grad():
        for parameter in shards.values():
            parameter.zero_()
        for file, wanted in by_file.items():
            with safe_open(file, "pt") as handle:
                for segment in wanted:
                    box(shards[segment.parameter], segment).copy_(_read(handle, segment))


def _read(handle: safe_open, segment: Segment) -> Tensor:
    source = handle.get_slice(segment.name)
    if len(source.get_shape()) == 1:
        return source[segment.row0 : segment.row1].unsqueeze(1)
    return source[segment.row0 : segment.row1, segment.col0 : segment.col1]


class WeightFiles:
    """Safetensors files and their index, made empty and then written box by box, by as many processes as hold boxes.

    Nothing is gathered: a box goes straight to its place in its file. One process makes the files (`create`) before any
    writes; the directory must be one that all of them see.
    """

    def __init__(
        self, directory: Path, shape: ModelShape, dtypes: Mapping[str, torch.dtype], max_file_bytes: int = MAX_FILE_BYTES
    ) -> None:
        """`dtypes` are those of the checkpoint's tensors, by their names."""
        self._directory, self._dtypes = directory, dtypes
        formats = {name: _FORMATS[dtype] for name, dtype in dtypes.items()}
        self._planned, self._headers = plan_files(directory, checkpoint_sizes(shape), formats, max_file_bytes)

    def create(self) -> None:
        """Write the headers and the index; the tensors are holes until they are written."""
        sizes = dict.fromkeys(self._headers, 0)
        for name, (file, _, (rows, columns)) in self._planned.items():
            sizes[file] += rows * columns * self._dtypes[name].itemsize
        for file, header in self._headers.items():
            with file.open("wb") as stream:
                stream.write(header)
                stream.truncate(len(header) + sizes[file])
        places = {name: planned.file.name for name, planned in self._planned.items()}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (self._directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def write(self, segments: Iterable[Segment], shards: Mapping[str, Tensor]) -> None:
        """Write the boxes of these parameters, cast to the files' number formats."""
        with ExitStack() as stack:
            streams: dict[Path, int] = {}
            for segment in segments:
                file, start, (_, columns) = self._planned[segment.name]
                dtype = self._dtypes[segment.name]
                if file not in streams:
                    streams[file] = os.open(file, os.O_WRONLY)
                    stack.callback(os.close, streams[file])
                content = box(shards[segment.parameter], segment).to(device="cpu", dtype=dtype).contiguous()
                lines: np.ndarray = content.view(torch.uint8).numpy()
                if content.shape[1] == columns:
                    lines = lines.reshape(1, -1)  # whole rows lie one behind the other
                for number, line in enumerate(lines):
                    position = (segment.row0 + number) * columns + segment.col0
                    _write_all(streams[file], line.data, start + position * dtype.itemsize)


def _write_all(stream: int, content: memoryview, at: int) -> None:
    while len(content):
        written = os.pwrite(stream, content, at)
        content, at = content[written:], at + written


def box(parameter: Tensor, segment: Segment) -> Tensor:
    """The view [rows, columns] of a local parameter that a segment names; a vector is a column."""
    matrix = parameter.detach()
    matrix = matrix.unsqueeze(1) if matrix.dim() == 1 else matrix
    rows, columns = segment.row1 - segment.row0, segment.col1 - segment.col0
    return matrix[segment.local_row : segment.local_row + rows, segment.local_col : segment.local_col + columns]


def load_score_head(weight: Tensor, directory: str | Path) -> None:
    """Fill a reward model's head [1, hidden]. Raises ValueError for a checkpoint without one or with several labels."""
    stored = stored_tensors(directory).get(SCORE)
    if stored is None:
        raise ValueError(f"{directory}: the checkpoint has no tensor {SCORE!r}; a reward model is a sequence classifier")
    if stored.shape != tuple(weight.shape):
        found, expected = (" x ".join(map(str, shape)) for shape in (stored.shape, weight.shape))
        raise ValueError(f"{stored.file}: {SCORE} is {found}, expected {expected}: one label")
    with torch.no_grad(), safe_open(stored.file, "pt") as handle:
        weight.copy_(handle.get_tensor(SCORE))
