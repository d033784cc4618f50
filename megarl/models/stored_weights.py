"""What the safetensors files of a Hugging Face directory hold, held against what the model asks for.

Headers are read, never weights, and no torch: `megarl check` answers from here. A file is eight bytes with the header's
length, the header as JSON, and the tensors one behind the other
(https://huggingface.co/docs/safetensors/index#format).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megarl.models.model_files import check_fetched
from megarl.models import FAMILIES, ModelShape
from megarl.models.megatron_weights import checkpoint_sizes

INDEX = "model.safetensors.index.json"
# Number formats that weights are read from, with their bytes.
FORMATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Checkpoint tensors that are no weights: old Llama checkpoints keep the rotary frequencies, which config.json gives.
_NO_WEIGHTS = (r"rotary_emb\.inv_freq$",)
# The head of a sequence classifier, by transformers' name.
SCORE = "score.weight"
# A critic has a value head in place of these.
_HEADS = (r"^lm_head\.weight$", r"^score\.weight$")
_LARGEST_HEADER = 100 << 20  # the format's own limit


class Stored(NamedTuple):
    """A tensor in a file: its format in safetensors' words, and its bytes [start, stop) in the file."""

    file: Path
    format: str
    shape: tuple[int, ...]
    start: int
    stop: int


def stored_tensors(directory: str | Path) -> dict[str, Stored]:
    """Every tensor of a directory by its name, none for a directory without safetensors.

    Where there is an index its files count and no others, and where there is a `model.safetensors` that one. Raises
    ValueError naming the file for one that is missing, torn or no safetensors, and for a tensor that is not where the index
    says.
    """
    directory = Path(directory)
    index = directory / INDEX
    if not index.is_file():
        # Publishers put other forms of the same weights beside it, an adapter's or those of their own loader.
        only = directory / "model.safetensors"
        files = [only] if only.is_file() else sorted(directory.glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in _header(file)}
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: is no index of safetensors files: {type(error).__name__} {error}") from error
    found: dict[str, Stored] = {}
    for place in names:
        if not (directory / place).is_file():
            name = next(name for name, file in places.items() if file == place)
            raise ValueError(f"{index}: names the file {place!r}, for {name!r} and others, which is not there")
        found.update(_header(directory / place))
    for name, place in places.items():
        if name not in found or found[name].file.name != Path(place).name:
            raise ValueError(f"{directory / place}: has no tensor {name!r}, which {INDEX} says is there")
    return found


def _header(file: Path) -> Iterator[tuple[str, Stored]]:
    check_fetched(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise ValueError(f"{file}: is torn, or no safetensors file: {size} bytes and a header of {length}")
        try:
            header = json.loads(stream.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            tensors = {
                name: Stored(file, entry["dtype"], tuple(entry["shape"]), *(8 + length + at for at in entry["data_offsets"]))
                for name, entry in entries.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: is torn, or no safetensors file: {type(error).__name__} {error}") from error
    end = max((tensor.stop for tensor in tensors.values()), default=8 + length)
    if end != size:
        raise ValueError(f"{file}: has {size} bytes, but its header describes {end}; it is torn, fetch it again")
    yield from tensors.items()


def has_weights(directory: str | Path) -> bool:
    """The directory has safetensors, or says that it has."""
    return (Path(directory) / INDEX).is_file() or any(Path(directory).glob("*.safetensors"))


def check_weights(directory: str | Path, shape: ModelShape, critic: bool = False, score: bool = False) -> dict[str, Stored]:
    """The directory's tensors, once they are all that the model asks for, of its shapes, and nothing else. A critic asks
    for no head; with `score` it asks for a classifier's of one label.

    Raises ValueError naming file, tensor, what is expected and what is found; of many alike the first, and how many.
    """
    stored = stored_tensors(directory)
    if not stored:
        raise ValueError(f"{str(directory)!r}: no *.safetensors there; save the model as safetensors")
    sizes = checkpoint_sizes(shape, critic) | ({SCORE: (1, shape.hidden)} if score else {})
    faults = [*_missing(directory, stored, sizes), *_misshaped(stored, sizes), *_extra(stored, sizes, shape, critic)]
    if faults:
        raise ValueError("; ".join(faults))
    return stored


def _missing(directory: str | Path, stored: Mapping[str, Stored], sizes: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    missing = [name for name in sizes if name not in stored]
    if missing:
        wanted = _shown(sizes[missing[0]])
        yield f"{directory}: the checkpoint has no tensor {missing[0]!r}, expected {wanted} by config.json{_more(missing)}"


def _misshaped(stored: Mapping[str, Stored], sizes: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    present = {name: stored[name] for name in sizes if name in stored}
    wrong = [name for name, tensor in present.items() if _size(tensor.shape) != sizes[name]]
    if wrong:
        tensor = present[wrong[0]]
        yield (
            f"{tensor.file}: {wrong[0]} has shape {_shown(tensor.shape)}, expected {_shown(sizes[wrong[0]])} by config.json"
            f"{_more(wrong)}"
        )
    odd = [name for name, tensor in present.items() if tensor.format not in FORMATS]
    if odd:
        tensor = present[odd[0]]
        yield f"{tensor.file}: {odd[0]} is in {tensor.format}, expected one of {', '.join(FORMATS)}{_more(odd)}"


def _extra(
    stored: Mapping[str, Stored], sizes: Mapping[str, tuple[int, int]], shape: ModelShape, critic: bool
) -> Iterator[str]:
    # A tied head may be written out beside the embedding.
    heads = _HEADS if critic else _HEADS[:1] if shape.tied else ()
    own = (pattern.replace("NUM_LAYERS", str(shape.num_layers)) for pattern in FAMILIES[shape.family].harmless)
    harmless = re.compile("|".join((*_NO_WEIGHTS, *heads, *own)))
    extra = [name for name in stored if name not in sizes and not harmless.search(name)]
    if extra:
        tensor = stored[extra[0]]
        yield (
            f"{tensor.file}: holds {extra[0]!r}, {_shown(tensor.shape)}, which a {shape.family} of this config.json "
            f"does not have{_more(extra)}"
        )


def _size(shape: tuple[int, ...]) -> tuple[int, int]:
    """As the weight table counts: a vector has one column."""
    if len(shape) not in (1, 2):
        return (0, 0)
    return shape[0], shape[1] if len(shape) == 2 else 1


def _shown(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


class Vocabulary(NamedTuple):
    """The tokens of a `tokenizer.json` with their numbers: all of them, and those among them that were added to the model's
    own, special ones or a user's."""

    tokens: dict[str, int]
    added: set[str]


def read_vocabulary(directory: str | Path) -> Vocabulary:
    """A directory's tokens; none without `tokenizer.json`. Raises ValueError for a file that is no tokenizer."""
    file = Path(directory) / "tokenizer.json"
    if not file.is_file():
        return Vocabulary({}, set())
    check_fetched(file)
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = content["model"].get("vocab", {})
        # A unigram model lists [token, score] by id, the others map tokens to ids.
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((row[0], at) for at, row in enumerate(vocabulary))
        added = {entry["content"]: entry["id"] for entry in content.get("added_tokens") or ()}
        return Vocabulary({token: int(number) for token, number in (*pairs, *added.items())}, set(added))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: is no tokenizer: {type(error).__name__} {error}") from error


def check_tokenizer(directory: str | Path, shape: ModelShape) -> None:
    """Raises ValueError for a `tokenizer.json` of another model: the embedding has no row for a token of its own vocabulary.

    Added tokens may be beyond, as the one for pictures is in Gemma's text models: prompts that hold such a token are refused
    one by one. Other forms of tokenizers are not read.
    """
    tokens, added = read_vocabulary(directory)
    own = ((token, number) for token, number in tokens.items() if token not in added)
    token, last = max(own, key=lambda pair: pair[1], default=("", -1))
    if last >= shape.vocab:
        raise ValueError(
            f"{Path(directory) / 'tokenizer.json'}: token {token!r} has the id {last}, expected at most {shape.vocab - 1}: "
            f"the model's embedding has vocab_size = {shape.vocab} rows; take the tokenizer that belongs to the model"
        )


class Planned(NamedTuple):
    """A tensor of a file to be written; `size` is (rows, columns), one column for a vector."""

    file: Path
    start: int
    size: tuple[int, int]


def plan_files(
    directory: Path, sizes: Mapping[str, tuple[int, int]], formats: Mapping[str, str], max_file_bytes: int
) -> tuple[dict[str, Planned], dict[Path, bytes]]:
    """Where each tensor goes, and what each file begins with; a file has at most `max_file_bytes` of tensors, or one tensor.

    `formats` are the tensors' number formats. The same on every rank, so that each can write its own boxes.
    """
    files: list[list[str]] = [[]]
    held = 0
    for name, (rows, columns) in sizes.items():
        size = rows * columns * FORMATS[formats[name]]
        if held and held + size > max_file_bytes:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    planned: dict[str, Planned] = {}
    headers: dict[Path, bytes] = {}
    for number, names in enumerate(files, start=1):
        file = directory / f"model-{number:05d}.safetensors"
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at, starts = 0, {}
        for name in names:
            rows, columns = sizes[name]
            starts[name], end = at, at + rows * columns * FORMATS[formats[name]]
            shape = [rows] if columns == 1 else [rows, columns]
            entries[name] = {"dtype": formats[name], "shape": shape, "data_offsets": [at, end]}
            at = end
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)  # tensors start at a multiple of eight bytes
        headers[file] = len(header).to_bytes(8, "little") + header
        planned |= {name: Planned(file, len(headers[file]) + start, sizes[name]) for name, start in starts.items()}
    return planned, headers
