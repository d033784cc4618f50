"""Check a Hugging Face directory's safetensors files and tokenizer against the model. Read only headers, without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from megarl.models import FAMILIES, ModelShape
from megarl.models.megatron_weights import checkpoint_sizes
from megarl.models.model_files import check_fetched

INDEX = "model.safetensors.index.json"
FORMATS = ("F64", "F32", "F16", "BF16")  # number formats that weights are read from
# Checkpoint tensors that are not weights: old Llama checkpoints hold the rotary frequencies, which config.json gives.
_NO_WEIGHTS = (r"rotary_emb\.inv_freq$",)
# The head of a sequence classifier, by transformers' name.
SCORE = "score.weight"
# A critic has a value head in place of these heads.
_HEADS = (r"^lm_head\.weight$", r"^score\.weight$")


class Stored(NamedTuple):
    """A tensor in a file; `format` is safetensors' name of its number format."""

    file: Path
    format: str
    shape: tuple[int, ...]


def stored_tensors(directory: str | Path) -> dict[str, Stored]:
    """Return every tensor of a directory by name; empty for a directory without safetensors.

    Read the files that the index names, or else `model.safetensors`, or else all files. Raises ValueError for a file that is
    missing or damaged, and for a tensor that is not in the file that the index names.
    """
    directory = Path(directory)
    index = directory / INDEX
    if not index.is_file():
        # Other files may hold other forms of the same weights.
        only = directory / "model.safetensors"
        files = [only] if only.is_file() else sorted(directory.glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in _tensors_of(file)}
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: is no index of safetensors files: {type(error).__name__} {error}") from error
    tensors: dict[str, Stored] = {}
    for place in names:
        if not (directory / place).is_file():
            name = next(name for name, file in places.items() if file == place)
            raise ValueError(f"{index}: names the file {place!r}, for {name!r} and others, which is not there")
        tensors.update(_tensors_of(directory / place))
    for name, place in places.items():
        if name not in tensors or tensors[name].file.name != Path(place).name:
            raise ValueError(f"{directory / place}: has no tensor {name!r}, which {INDEX} says is there")
    return tensors


def _tensors_of(file: Path) -> Iterator[tuple[str, Stored]]:
    check_fetched(file)
    try:
        with safe_open(file, "numpy") as handle:
            parts = [(name, handle.get_slice(name)) for name in handle.keys()]  # noqa: SIM118 (no mapping)
            yield from ((name, Stored(file, part.get_dtype(), tuple(part.get_shape()))) for name, part in parts)
    except SafetensorError as error:
        raise ValueError(f"{file}: is torn, or no safetensors file: {error}; fetch it again") from error


def has_weights(directory: str | Path) -> bool:
    """Return whether the directory has safetensors or an index of them."""
    return (Path(directory) / INDEX).is_file() or any(Path(directory).glob("*.safetensors"))


def check_weights(directory: str | Path, shape: ModelShape, critic: bool = False, score: bool = False) -> dict[str, Stored]:
    """Return the directory's tensors if their names and shapes are exactly those of the model. A critic needs no head; with
    `score` the directory needs a classifier's head of one label.

    Raises ValueError with file, tensor and both shapes: the first fault of each kind, and the number of faults.
    """
    stored = stored_tensors(directory)
    if not stored:
        raise ValueError(f"{str(directory)!r}: no *.safetensors there; save the model as safetensors")
    sizes = checkpoint_sizes(shape, critic) | ({SCORE: (1, shape.hidden)} if score else {})
    faults = []
    if missing := [name for name in sizes if name not in stored]:
        wanted = _shown(sizes[missing[0]])
        faults.append(
            f"{directory}: the checkpoint has no tensor {missing[0]!r}, expected {wanted} by config.json{_more(missing)}"
        )
    present = {name: stored[name] for name in sizes if name in stored}
    if wrong := [name for name, tensor in present.items() if _size(tensor.shape) != sizes[name]]:
        tensor = present[wrong[0]]
        faults.append(
            f"{tensor.file}: {wrong[0]} has shape {_shown(tensor.shape)}, expected {_shown(sizes[wrong[0]])} by config.json"
            f"{_more(wrong)}"
        )
    if odd := [name for name, tensor in present.items() if tensor.format not in FORMATS]:
        tensor = present[odd[0]]
        faults.append(f"{tensor.file}: {odd[0]} is in {tensor.format}, expected one of {', '.join(FORMATS)}{_more(odd)}")
    # A tied model's file may hold the head as well.
    heads = _HEADS if critic else _HEADS[:1] if shape.tied else ()
    family = (pattern.replace("NUM_LAYERS", str(shape.num_layers)) for pattern in FAMILIES[shape.family].harmless)
    harmless = re.compile("|".join((*_NO_WEIGHTS, *heads, *family)))
    if extra := [name for name in stored if name not in sizes and not harmless.search(name)]:
        tensor = stored[extra[0]]
        faults.append(
            f"{tensor.file}: holds {extra[0]!r}, {_shown(tensor.shape)}, which a {shape.family} of this config.json does "
            f"not have{_more(extra)}"
        )
    if faults:
        raise ValueError("; ".join(faults))
    return stored


def _size(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns); a vector has one column."""
    if len(shape) not in (1, 2):
        return (0, 0)
    return shape[0], shape[1] if len(shape) == 2 else 1


def _shown(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


class Vocabulary(NamedTuple):
    """The tokens of a `tokenizer.json` with their ids, and the added tokens (special tokens or a user's)."""

    tokens: dict[str, int]
    added: set[str]


def read_vocabulary(directory: str | Path) -> Vocabulary:
    """Read a directory's tokens; empty without `tokenizer.json`. Raises ValueError if the file is not a tokenizer."""
    file = Path(directory) / "tokenizer.json"
    if not file.is_file():
        return Vocabulary({}, set())
    check_fetched(file)
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = content["model"].get("vocab", {})
        # A unigram model lists [token, score] by id; other models map tokens to ids.
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((row[0], at) for at, row in enumerate(vocabulary))
        added = {entry["content"]: entry["id"] for entry in content.get("added_tokens") or ()}
        return Vocabulary({token: int(number) for token, number in (*pairs, *added.items())}, set(added))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: is no tokenizer: {type(error).__name__} {error}") from error


def check_tokenizer(directory: str | Path, shape: ModelShape) -> None:
    """Raise ValueError for a `tokenizer.json` of another model, which has a token without a row in the embedding.

    Added tokens may lack a row, such as Gemma's token for pictures; the data room refuses prompts with such a token. Other
    kinds of tokenizer files are not read.
    """
    tokens, added = read_vocabulary(directory)
    original = ((token, number) for token, number in tokens.items() if token not in added)
    token, last = max(original, key=lambda pair: pair[1], default=("", -1))
    if last >= shape.vocab:
        raise ValueError(
            f"{Path(directory) / 'tokenizer.json'}: token {token!r} has the id {last}, expected at most {shape.vocab - 1}: "
            f"the model's embedding has vocab_size = {shape.vocab} rows; take the tokenizer that belongs to the model"
        )
