"""Read rows of questions and answers from a file, a data set or a generator.

The standard library reads JSONL and pyarrow reads Parquet. The loaders of `datasets` do not fit: they copy the file into a
cache, and their errors name neither the line nor the key of a bad row.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from io import BufferedReader, BytesIO
from itertools import chain
from pathlib import Path
from typing import IO, Any

from megarl.data.generated import generate
from megarl.data.tokenizer import ANSWERERS
from megarl.models.model_files import check_fetched
from megarl.recipe.data_section import DataSection, HuggingFacePromptsSection, SourceSection
from megarl.recipe.violation import shown

logger = logging.getLogger(__name__)
NUM_SHOWN = 3  # skipped rows that are logged
_BATCH = 1000  # rows of a table that are read at once
Message = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A question with its answer and all other fields of its row.

    `prompt` is the content to render: the question, the messages of a chat, or token ids, from which the question is decoded
    later; in a supervised run the chats to train on, the chosen one first. `where` names the row in errors;
    `prompt_field` and `answer_field` name the row's fields.
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


class BadRows:
    """Handles unusable rows of a source by `data.on_bad_row`: stop at the first bad row, or count bad rows."""

    def __init__(self, on_bad_row: str) -> None:
        self._skips = on_bad_row == "skip"
        self.count = 0
        self.first = ""

    def add(self, error: ValueError) -> None:
        """Count a bad row and log the first bad rows. Raises ValueError if bad rows are not skipped."""
        if not self._skips:
            raise ValueError(f"{error}; or leave such rows out: data.on_bad_row: skip") from error
        self.first = self.first or str(error)
        self.count += 1
        if self.count <= NUM_SHOWN:
            logger.warning("left out: %s%s", error, " (more are only counted)" if self.count == NUM_SHOWN else "")


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Put a place before the message of a ValueError that the block raises."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


@dataclass(frozen=True)
class Form:
    """Checks rows by the formats of `data`. `key` is the source's recipe key; `rejected_field` is given for pairs of a
    chosen and a rejected answer."""

    data: DataSection
    key: str
    rejected_field: str | None = None

    def question(self, fields: Any, where: str, prompt_field: str, answer_field: str | None) -> Row:
        """Check a row of a run with rollouts; `where` names its file and position. Raises ValueError with the row, the field
        and its value."""
        assert answer_field is not None, "refused in the recipe"
        prompt, question = self._prompt(fields, where, prompt_field)
        answer = _value(fields, where, answer_field, f"{self.key}.answer_field")
        if self.data.answer_format == "json" and isinstance(answer, list | dict):
            text = json.dumps(answer, default=_plain)
        else:
            text = _text(answer, _place(where, answer_field), f"{self.key}.answer_field")
        return Row(question, text, fields, prompt, where, prompt_field, answer_field)

    def examples(self, fields: Any, where: str, prompt_field: str, answer_field: str | None) -> Row:
        """Check a row of a supervised run, as `question`."""
        chat, question = self._prompt(fields, where, prompt_field)
        if self.data.prompt_format == "text":
            template = self.data.prompt_template
            chat = [{"role": "user", "content": question if template is None else template.replace("{question}", question)}]
        examples = [chat if answer_field is None else self._answered(chat, fields, where, answer_field, "answer_field")]
        if self.rejected_field is not None:
            examples.append(self._answered(chat, fields, where, self.rejected_field, "rejected_field"))
        return Row(chat[-1]["content"], "", fields, tuple(examples), where, prompt_field, answer_field or prompt_field)

    def _prompt(self, fields: Any, where: str, name: str) -> tuple[Any, str]:
        """Return the prompt of a row, and the question in it."""
        if not isinstance(fields, dict):
            raise ValueError(f"{where}: a row is an object of named fields, this is {type(fields).__name__}")
        prompt, place = _value(fields, where, name, f"{self.key}.prompt_field"), _place(where, name)
        if self.data.prompt_format == "messages":
            messages = _messages(prompt, place)
            return messages, messages[-1]["content"]
        if self.data.prompt_format == "text":
            question = _text(prompt, place, f"{self.key}.prompt_field")
            return question, question
        if not isinstance(prompt, list) or not prompt or any(type(token) is not int for token in prompt):
            raise ValueError(f"{place} is {shown(prompt)}; data.prompt_format: token_ids needs a list of whole numbers")
        return prompt, ""

    def _answered(self, chat: list[Message], fields: dict, where: str, name: str, key: str) -> list[Message]:
        """Return a chat with its answer, a text of the assistant or messages. Messages that begin with another role than the
        assistant's are a whole chat."""
        value, place = _value(fields, where, name, f"{self.key}.{key}"), _place(where, name)
        if isinstance(value, list) and self.data.chat_template:
            answer = _messages(value, place)
            return [*chat, *answer] if answer[0]["role"] in ANSWERERS else answer
        return [*chat, {"role": "assistant", "content": _text(value, place, f"{self.key}.{key}")}]


def load_rows(source: SourceSection, seed: int, data: DataSection, key: str, bad: BadRows) -> list[Row]:
    """Read all good rows of a source in order; `seed` is for a generator whose section has none, `key` the recipe key.

    Raises ValueError naming file, row and field for bad data that is not skipped, or the recipe key for a bad request.
    """
    form = Form(data, key, None if source.kind == "reasoning_gym" else source.rejected_field)
    check = form.question if data.max_tokens is None else form.examples
    rows: list[Row] = []
    for where, fields, prompt_field, answer_field in _read(source, seed, key):
        try:
            if isinstance(fields, ValueError):
                raise fields
            rows.append(check(fields, where, prompt_field, answer_field))
        except ValueError as error:
            bad.add(error)
    if not rows:
        left = f"; all {bad.count} that it had are left out, the first: {bad.first}" if bad.count else ""
        origin = f"task {source.task}" if source.kind == "reasoning_gym" else source.path
        raise ValueError(f"{key} has no rows ({origin}); give at least one question{left}")
    return rows


def _read(source: SourceSection, seed: int, key: str) -> Iterator[tuple[str, Any, str, str | None]]:
    """Yield each row's place, the fields (or the error of an unreadable row), and the names of prompt and answer fields."""
    if source.kind == "reasoning_gym":
        task_seed = seed if source.seed is None else source.seed
        for where, fields in generate(source.task, source.size, task_seed, source.options, key):
            yield where, fields, "question", "answer"
        return
    if source.kind == "huggingface":
        read = _read_huggingface(source, key)
    else:
        path = Path(source.path)
        if not path.is_file():
            raise ValueError(f"{key}.path is {str(path)!r}, which is no file; the path counts from {Path.cwd()}")
        read = _read_jsonl(path) if source.kind == "jsonl" else _read_parquet(path)
    for where, fields in read:
        yield where, fields, source.prompt_field, source.answer_field


def _place(where: str, field: str) -> str:
    return f"{where}: field {field!r}"


def _value(fields: dict, where: str, field: str, key: str) -> Any:
    """Return the value of a field; a dotted name (`reward_model.ground_truth`) goes into nested objects."""
    if field in fields:
        return fields[field]
    value: Any = fields
    for part in field.split("."):
        if not isinstance(value, dict) or part not in value:
            holder = value if isinstance(value, dict) else {}
            near = difflib.get_close_matches(part, holder, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            has = f"it has {sorted(value)}" if isinstance(value, dict) else f"what is before {part!r} is {shown(value)}"
            raise ValueError(f"{where}: no field {field!r} ({key}), {has}{hint}")
        value = value[part]
    return value


def _text(value: Any, place: str, key: str) -> str:
    # A list, null or NaN (pandas writes NaN for a missing value) would become a text that no completion equals.
    finite = isinstance(value, str | int) or (isinstance(value, float | Decimal) and math.isfinite(value))
    if not finite or isinstance(value, bool):
        wanted = "a text or a number is needed" + ("; for lists data.answer_format: json" if "answer" in key else "")
        raise ValueError(f"{place} is {shown(value)}; {wanted} ({key})")
    text = _digits(value) if isinstance(value, Decimal) else str(value)
    if not text.strip():
        raise ValueError(f"{place} is empty; a text or a number is needed ({key})")
    return text


def _digits(value: Decimal) -> str:
    """Return all digits of a number; `Decimal.normalize` would round to 28."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _plain(value: Any) -> Any:
    """Return the JSON form of a value of another type: a text, or a number unless a float would round the value."""
    if not isinstance(value, Decimal):
        return str(value)
    number = float(value)
    return number if Decimal(repr(number)) == value else int(value) if value == value.to_integral_value() else _digits(value)


def _messages(value: Any, place: str) -> list[dict[str, Any]]:
    """Return a chat with texts as contents: join text parts and drop nulls, with which tables fill missing fields."""
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        rule = "data.prompt_format: messages needs a list of objects with a role and a content"
        raise ValueError(f"{place} is {shown(value)}; {rule}")
    messages = []
    for number, given in enumerate(value):
        message = {name: field for name, field in given.items() if field is not None}
        where, content = f"{place}: message {number}", message.get("content", "" if message.get("tool_calls") else None)
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
                    raise ValueError(f"{where} has the part {shown(part)}; megarl trains on text: remove such rows or parts")
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where} is {shown(given)}; it needs a role and a content, a text or a list of parts of text")
        messages.append(message | {"content": content})
    return messages


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """Read one object per line, or one JSON array; UTF-8, or UTF-16 with a byte order mark; plain or gzip, by content."""
    check_fetched(path)
    try:
        with path.open("rb") as stream:
            is_gzip = stream.read(2) == b"\x1f\x8b"
        with BufferedReader(gzip.GzipFile(path)) if is_gzip else path.open("rb") as packed:
            content: IO[bytes] = packed
            if packed.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                text = packed.read().decode("utf-16", "surrogatepass")
                content = BytesIO(text.encode("utf-8", "surrogatepass"))
            yield from _json_rows(content, path)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read to its end: {error}; fetch or write it again") from error


def _json_rows(content: IO[bytes], path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of an array of objects, which may begin after blank lines; else yield one row per line."""
    lines = enumerate((line.removeprefix(codecs.BOM_UTF8) for line in content), start=1)
    start, first = next(((number, line) for number, line in lines if line.strip()), (0, b""))
    rest: Iterable[bytes] = content
    if first.lstrip().startswith(b"["):
        whole = first + content.read()
        rows = None
        with suppress(ValueError, RecursionError):  # for example several lists, one per line
            rows = json.loads(whole)
        if rows is not None and any(isinstance(row, dict) for row in rows):
            for place, fields in enumerate(rows):
                where = f"{path}, element {place}"
                yield where, _whole_characters(fields, where)
            return
        first, *rest = whole.splitlines()
    for number, line in enumerate(chain([first], rest), start=start):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield where, _whole_characters(json.loads(line), where)
            except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested too deeply
                yield where, ValueError(f"{where}: not JSON: {error}; each line holds one JSON object")


def _whole_characters(fields: Any, where: str) -> Any:
    """Return the fields, or an error if a text in them has a lone surrogate."""
    try:
        place = _half_character(fields)
    except RecursionError as error:
        return ValueError(f"{where}: too many lists in lists: {error}")
    if place is None:
        return fields
    rule = "half of a character (a lone surrogate), which no tokenizer takes; the text was cut within an emoji"
    return ValueError(f"{where}: field {place!r} has {rule}")


def _half_character(value: Any, place: str = "") -> str | None:
    """Return the dotted place of the first text with a lone surrogate, or None."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return place
        return None
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in pairs:
        inside = f"{place}.{name}".lstrip(".")
        half = _half_character(str(name), inside) or _half_character(inner, inside)
        if half is not None:
            return half
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
        except UnicodeDecodeError:  # in some row of the batch
            rows = [None] * len(batch)
        for at, fields in enumerate(rows):
            where = f"{path}, row {start + at}"
            yield where, _decoded(where, lambda row: row.to_pylist()[0], batch.slice(at, 1)) if fields is None else fields


def _decoded(where: str, read: Callable[..., Any], *arguments: Any) -> Any:
    """Return a row, or an error if a text is not UTF-8, because Arrow does not check texts."""
    try:
        return read(*arguments)
    except UnicodeDecodeError as error:
        return ValueError(f"{where}: a text is not UTF-8: {error}")


def _read_huggingface(source: HuggingFacePromptsSection, key: str) -> Iterator[tuple[str, Any]]:
    """Read a data set that `save_to_disk` wrote, or a data set that `load_dataset` loads."""
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
            table = splits[source.split]
        elif saved:
            table = datasets.load_from_disk(source.path)
            if table.split is not None and str(table.split) != source.split:
                raise ValueError(f"no split {source.split!r}, it is {str(table.split)!r} ({key}.split)")
        else:
            table = datasets.load_dataset(source.path, source.name, split=source.split)
    except (OSError, ValueError) as error:
        for file in path.rglob("*") if path.is_dir() else ():
            check_fetched(file)
        raise ValueError(
            f"{key}.path is {source.path!r}, from which no data set loads: {error}; give a directory that save_to_disk "
            "wrote, one of data files, or a hub name that this machine can reach or has cached"
        ) from error
    for number in range(len(table)):
        where = f"{source.path}, {source.split} row {number}"
        yield where, _decoded(where, table.__getitem__, number)
