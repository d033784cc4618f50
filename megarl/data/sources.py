"""Rows of questions and answers from a file, a data set or a generator.

JSONL is read with the standard library and Parquet with pyarrow, not through `datasets`: its loaders copy
the file into a cache, and their errors name neither the line nor the key of a bad row.
"""

from __future__ import annotations

import codecs
import difflib
import gzip
import json
import logging
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from io import BufferedReader, BytesIO
from itertools import chain
from pathlib import Path
from typing import IO, Any

from megarl.data.generated import generate
from megarl.models.model_files import check_fetched
from megarl.recipe.data_section import DataSection, FilePromptsSection, HuggingFacePromptsSection, SourceSection

logger = logging.getLogger(__name__)
NUM_SHOWN = 3  # of the bad rows that are left out
_BATCH = 1000  # rows of a table that are read at once


@dataclass(frozen=True)
class Row:
    """One question with its answer, and everything else its source says about it.

    `prompt` is what is rendered: the question, the messages of a chat, or token ids, of which the question is made later.
    `where` names the row for errors, and `prompt_field` and `answer_field` what the two were read of.
    """

    question: str
    answer: str
    fields: dict
    prompt: Any = field(compare=False)
    where: str = field(compare=False)
    prompt_field: str = field(compare=False)
    answer_field: str = field(compare=False)

    @property
    def prompt_place(self) -> str:
        """The row and the field of the prompt, for errors."""
        return _place(self.where, self.prompt_field)

    @property
    def answer_place(self) -> str:
        """The row and the field of the answer, for errors."""
        return _place(self.where, self.answer_field)


class BadRows:
    """Rows of a source that cannot be used, by `data.on_bad_row`: the first ends it all, or they are counted."""

    def __init__(self, on_bad_row: str) -> None:
        self._skips = on_bad_row == "skip"
        self.count = 0
        self.first = ""

    def add(self, error: ValueError) -> None:
        """Raises ValueError where such rows are not left out."""
        if not self._skips:
            raise ValueError(f"{error}; or leave such rows out: data.on_bad_row: skip") from error
        self.first = self.first or str(error)
        self.count += 1
        if self.count <= NUM_SHOWN:
            logger.warning("left out: %s%s", error, " (more are only counted)" if self.count == NUM_SHOWN else "")


@dataclass(frozen=True)
class Form:
    """What the named fields of a source's rows hold; `key` is where the source stands in the recipe."""

    prompt_format: str
    answer_format: str
    key: str

    def row(self, fields: Any, where: str, prompt_field: str, answer_field: str) -> Row:
        """Check one row; `where` names its file and position. Raises ValueError with the row, the field and its value."""
        if not isinstance(fields, dict):
            raise ValueError(f"{where}: a row is an object of named fields, this is {type(fields).__name__}")
        prompt = _value(fields, where, prompt_field, f"{self.key}.prompt_field")
        place = _place(where, prompt_field)
        if self.prompt_format == "messages":
            prompt = _messages(prompt, place)
            question = prompt[-1]["content"]
        elif self.prompt_format == "token_ids":
            _token_ids(prompt, place)
            question = ""
        else:
            question = prompt = _text(prompt, place, f"{self.key}.prompt_field")
        answer = _value(fields, where, answer_field, f"{self.key}.answer_field")
        if self.answer_format == "json" and isinstance(answer, list | dict):
            text = json.dumps(answer, default=_plain)
        else:
            text = _text(answer, _place(where, answer_field), f"{self.key}.answer_field")
        return Row(question, text, fields, prompt, where, prompt_field, answer_field)


def load_rows(source: SourceSection, seed: int, data: DataSection, key: str, bad: BadRows) -> list[Row]:
    """All good rows of a source of `data`, in its order; `seed` is for a generator whose section gives none.

    `key` is where the source stands in the recipe. Raises ValueError naming the file, the row and the field for bad data
    that is not left out, or the recipe key for a bad request.
    """
    form = Form(data.prompt_format, data.answer_format, key)
    rows: list[Row] = []
    for where, fields, prompt_field, answer_field in _read(source, seed, key):
        try:
            if isinstance(fields, ValueError):
                raise fields
            rows.append(form.row(fields, where, prompt_field, answer_field))
        except ValueError as error:
            bad.add(error)
    if not rows:
        left = f"; all {bad.count} that it had are left out, the first: {bad.first}" if bad.count else ""
        raise ValueError(f"{key} has no rows ({_origin(source)}); give at least one question{left}")
    return rows


def _read(source: SourceSection, seed: int, key: str) -> Iterator[tuple[str, Any, str, str]]:
    """Where each row stands, its fields (or the error of a row that cannot be read), and the two that are asked for."""
    if source.kind == "reasoning_gym":
        own_seed = seed if source.seed is None else source.seed
        for where, fields in generate(source.task, source.size, own_seed, source.options, key):
            yield where, fields, "question", "answer"
        return
    if source.kind == "huggingface":
        read = _read_huggingface(source, key)
    else:
        read = {"jsonl": _read_jsonl, "parquet": _read_parquet}[source.kind](_existing(source, key))
    for where, fields in read:
        yield where, fields, source.prompt_field, source.answer_field


def _origin(source: SourceSection) -> str:
    return f"task {source.task}" if source.kind == "reasoning_gym" else source.path


def _existing(source: FilePromptsSection, key: str) -> Path:
    path = Path(source.path)
    if not path.is_file():
        raise ValueError(f"{key}.path is {str(path)!r}, which is no file; the path counts from {Path.cwd()}")
    return path


def _place(where: str, field: str) -> str:
    return f"{where}: field {field!r}"


def _value(fields: dict, where: str, field: str, key: str) -> Any:
    """The value of a field; a dotted name (`reward_model.ground_truth`) goes into nested objects."""
    if field in fields:
        return fields[field]
    value: Any = fields
    for part in field.split("."):
        if not isinstance(value, dict) or part not in value:
            holder = value if isinstance(value, dict) else {}
            near = difflib.get_close_matches(part, holder, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            has = f"it has {sorted(value)}" if isinstance(value, dict) else f"what is before {part!r} is {_shown(value)}"
            raise ValueError(f"{where}: no field {field!r} ({key}), {has}{hint}")
        value = value[part]
    return value


def _text(value: Any, place: str, key: str) -> str:
    # A number is a fine answer; a list or null would silently become a text that no completion can equal, and so would
    # NaN, which pandas writes where there is nothing.
    finite = isinstance(value, str | int) or (isinstance(value, float | Decimal) and math.isfinite(value))
    if not finite or isinstance(value, bool):
        wanted = "a text or a number is needed" + ("; for lists data.answer_format: json" if "answer" in key else "")
        raise ValueError(f"{place} is {_shown(value)}; {wanted} ({key})")
    text = _digits(value) if isinstance(value, Decimal) else str(value)
    if not text.strip():
        raise ValueError(f"{place} is empty; a text or a number is needed ({key})")
    return text


def _digits(value: Decimal) -> str:
    """All digits of a number; `Decimal.normalize` would round to 28 of them."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _plain(value: Any) -> Any:
    """What JSON holds for a value that it does not know: a text for a number that a float would round."""
    if not isinstance(value, Decimal):
        return str(value)
    number = float(value)
    return number if Decimal(repr(number)) == value else int(value) if value == value.to_integral_value() else _digits(value)


def _messages(value: Any, place: str) -> list[dict[str, Any]]:
    """A chat whose contents are texts: parts of text are joined, and what is null is left out, as tables fill up with it."""
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        wanted = "data.prompt_format: messages needs a list of objects with a role and a content"
        raise ValueError(f"{place} is {_shown(value)}; {wanted}")
    return [_message(one, f"{place}: message {number}") for number, one in enumerate(value)]


def _message(given: dict[str, Any], place: str) -> dict[str, Any]:
    message = {name: value for name, value in given.items() if value is not None}
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"{place} has the part {_shown(part)}; megarl trains on text: leave such rows or parts out")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise ValueError(f"{place} is {_shown(given)}; it needs a role and a content, a text or a list of parts of text")
    return message | {"content": content}


def _token_ids(value: Any, place: str) -> None:
    if not isinstance(value, list) or not value or any(isinstance(one, bool) or not isinstance(one, int) for one in value):
        raise ValueError(f"{place} is {_shown(value)}; data.prompt_format: token_ids needs a list of whole numbers")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """One object a line, or one JSON array of all; in UTF-8, or UTF-16 with its mark; as it is or in gzip."""
    check_fetched(path)
    try:
        with _unpacked(path) as packed:
            content: IO[bytes] = packed
            if packed.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                text = packed.read().decode("utf-16", "surrogatepass")
                content = BytesIO(text.encode("utf-8", "surrogatepass"))
            yield from _json_rows(content, path)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read to its end: {error}; fetch or write it again") from error


def _json_rows(content: IO[bytes], path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of an array, which may begin after blank lines, or else those of the lines."""
    lines = enumerate((line.removeprefix(codecs.BOM_UTF8) for line in content), start=1)
    start, first = next(((number, line) for number, line in lines if line.strip()), (0, b""))
    rest: Iterable[bytes] = content
    if first.lstrip().startswith(b"["):
        whole = first + content.read()
        rows = _array(whole)
        if rows is not None:
            for place, fields in enumerate(rows):
                where = f"{path}, element {place}"
                yield where, _whole_characters(fields, where)
            return
        first, *rest = whole.splitlines()
    for number, line in enumerate(chain([first], rest), start=start):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _parsed(line, where)


def _unpacked(path: Path) -> BufferedReader:
    """The bytes of a file, also of one that gzip has packed, whatever its name."""
    with path.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    return BufferedReader(gzip.GzipFile(path)) if packed else path.open("rb")


def _array(content: bytes) -> list[Any] | None:
    """The elements of a JSON array of objects; None for anything else, such as several lists, one a line."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return found if any(isinstance(one, dict) for one in found) else None


def _parsed(line: bytes, where: str) -> Any:
    """The fields of a line, or the error that it is."""
    try:
        return _whole_characters(json.loads(line), where)
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8, or of a list in a list in a list
        return ValueError(f"{where}: not JSON: {error}; each line holds one JSON object")


def _whole_characters(fields: Any, where: str) -> Any:
    """The fields, or the error of a text among them that no tokenizer takes."""
    try:
        place = _half_character(fields)
    except RecursionError as error:
        return ValueError(f"{where}: too many lists in lists: {error}")
    if place is None:
        return fields
    rule = "half of a character (a lone surrogate), which no tokenizer takes; the text was cut within an emoji"
    return ValueError(f"{where}: field {place!r} has {rule}")


def _half_character(value: Any, place: str = "") -> str | None:
    """The dotted place of the first text with a lone surrogate: as an escape, or as bytes, which `json.loads` decodes."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return place
        return None
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in pairs:
        inside = f"{place}.{name}".lstrip(".")
        found = _half_character(str(name), inside) or _half_character(inner, inside)
        if found is not None:
            return found
    return None


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    check_fetched(path)
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from error
    for start in range(0, len(table), _BATCH):
        batch = table.slice(start, _BATCH)
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError:  # it does not say of which row
            rows = [None] * len(batch)
        for at, fields in enumerate(rows):
            where = f"{path}, row {start + at}"
            yield where, _decoded(where, partial(_only, batch, at)) if fields is None else fields


def _only(batch: Any, at: int) -> dict[str, Any]:
    return batch.slice(at, 1).to_pylist()[0]


def _decoded(where: str, read: Callable[[], dict[str, Any]]) -> Any:
    """A row, or the error of one whose text is no UTF-8, which Arrow holds without a word."""
    try:
        return read()
    except UnicodeDecodeError as error:
        return ValueError(f"{where}: a text of it is not UTF-8: {error}")


def _read_huggingface(source: HuggingFacePromptsSection, key: str) -> Iterator[tuple[str, Any]]:
    """`save_to_disk` and `load_dataset` have formats of their own, and each has its loader."""
    import datasets

    path = Path(source.path)
    try:
        saved = next((file for file in ("dataset_dict.json", "state.json") if (path / file).is_file()), None)
        if saved and source.name is not None:
            raise ValueError(f"save_to_disk wrote it, which keeps one configuration: leave {key}.name out")
        if saved == "dataset_dict.json":
            splits = datasets.load_from_disk(source.path)
            if source.split not in splits:
                raise ValueError(f"no split {source.split!r}, it has {sorted(splits)} ({key}.split)")
            found = splits[source.split]
        elif saved:
            found = datasets.load_from_disk(source.path)
            if found.split is not None and str(found.split) != source.split:
                raise ValueError(f"no split {source.split!r}, it is {str(found.split)!r} ({key}.split)")
        else:
            found = datasets.load_dataset(source.path, source.name, split=source.split)
    except (OSError, ValueError) as error:
        for file in path.rglob("*") if path.is_dir() else ():
            check_fetched(file)
        raise ValueError(
            f"{key}.path is {source.path!r}, from which no data set loads: {error}; give a directory that save_to_disk "
            "wrote, one of data files, or a hub name that this machine can reach or has cached"
        ) from error
    for number in range(len(found)):
        where = f"{source.path}, {source.split} row {number}"
        yield where, _decoded(where, partial(found.__getitem__, number))
