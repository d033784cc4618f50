"""Read a Hugging Face directory into Megatron shards, box by box; `export.py` writes one.

No rank reads or holds more than its own boxes plus one tensor: safetensors are sliced on disk.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megarl.reshard.boxes import Segment

_WEIGHTS = "*.safetensors"
_KEPT = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt",
         "chat_template*", "added_tokens.json")  # fmt: skip


def checkpoint_files(directory: Path) -> dict[str, Path]:
    """Which file holds each tensor. Raises ValueError if the directory has no safetensors."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    files: dict[str, Path] = {}
    for file in sorted(directory.glob(_WEIGHTS)):
        with safe_open(file, "pt") as handle:
            files.update(dict.fromkeys(handle.keys(), file))
    if not files:
        raise ValueError(f"model.path = {str(directory)!r}: no *.safetensors there; save the model as safetensors")
    return files


def load_shards(
    directory: str | Path,
    segments: Iterable[Segment],
    shards: Mapping[str, Tensor],
    sizes: Mapping[str, tuple[int, int]],
) -> None:
    """Fill this rank's parameters.

    Padding rows become zero; a parameter that no segment covers must be filled by the caller (a value head). `sizes` are
    the (rows, columns) that config.json asks for. Raises ValueError for a tensor that the checkpoint lacks or holds in
    another shape.
    """
    files = checkpoint_files(Path(directory))
    by_file: dict[Path, list[Segment]] = defaultdict(list)
    for segment in segments:
        if segment.name not in files:
            raise ValueError(f"{directory}: the checkpoint has no tensor {segment.name!r}")
        by_file[files[segment.name]].append(segment)
    with torch.no_grad():
        for parameter in shards.values():
            parameter.zero_()
        for file, wanted in by_file.items():
            with safe_open(file, "pt") as handle:
                for segment in wanted:
                    box(shards[segment.parameter], segment).copy_(_read(handle, segment, file, sizes[segment.name]))


def _read(handle: safe_open, segment: Segment, file: Path, size: tuple[int, int]) -> Tensor:
    source = handle.get_slice(segment.name)
    shape = tuple(source.get_shape())
    if (*shape, 1)[:2] != size:
        raise ValueError(f"{file}: {segment.name} has shape {shape}, but config.json asks for {size[0]} x {size[1]}")
    if len(shape) == 1:
        return source[segment.row0 : segment.row1].unsqueeze(1)
    return source[segment.row0 : segment.row1, segment.col0 : segment.col1]


def box(parameter: Tensor, segment: Segment) -> Tensor:
    """The view [rows, columns] of a local parameter that a segment names; a vector is a column."""
    matrix = parameter.detach()
    matrix = matrix.unsqueeze(1) if matrix.dim() == 1 else matrix
    rows, columns = segment.row1 - segment.row0, segment.col1 - segment.col0
    return matrix[segment.local_row : segment.local_row + rows, segment.local_col : segment.local_col + columns]


def copy_model_files(source: str | Path, target: str | Path) -> None:
    """Copy everything of a Hugging Face directory that is not a weight (config, tokenizer, templates)."""
    for pattern in _KEPT:
        for file in Path(source).glob(pattern):
            shutil.copy(file, target)
