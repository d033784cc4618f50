"""Rows of questions and answers from a file, a data set or a generator.

JSONL is read with the standard library and Parquet with pyarrow, not through `datasets`: its loaders copy
the file into a cache, and their errors name neither the line nor the key of a bad row.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.recipe.data_sections import (
    DataSection,
    FilePromptsSection,
    HuggingFacePromptsSection,
    SourceSection,
)

logger = logging.getLogger(__name__)
NUM_SHOWN = 3  # of the bad rows that are left out


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
            question = _messages(prompt, place)
        elif self.prompt_format == "token_ids":
            _token_ids(prompt, place)
            question = ""
        else:
            question = prompt = _text(prompt, place, f"{self.key}.prompt_field")
        answer = _value(fields, where, answer_field, f"{self.key}.answer_field")
        if self.answer_format == "json" and isinstance(answer, list | dict):
            text = json.dumps(answer, default=str)
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
        for where, fields in _generate(source.task, source.size, own_seed, source.options, key):
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
    if field not in fields:
        near = difflib.get_close_matches(field, fields, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{where}: no field {field!r} ({key}), it has {sorted(fields)}{hint}")
    return fields[field]


def _text(value: Any, place: str, key: str) -> str:
    # A number is a fine answer; a list or null would silently become a text that no completion can equal.
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        wanted = "a text or a number is needed" + ("; for lists data.answer_format: json" if "answer" in key else "")
        raise ValueError(f"{place} is {_shown(value)}; {wanted} ({key})")
    text = str(value)
    if not text.strip():
        raise ValueError(f"{place} is empty; a text or a number is needed ({key})")
    return text


def _messages(value: Any, place: str) -> str:
    """The last content of a chat, which is its question."""
    good = isinstance(value, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str) for one in value
    )
    if not good or not value:
        wanted = "data.prompt_format: messages needs a list of objects with a role and a content"
        raise ValueError(f"{place} is {_shown(value)}; {wanted}")
    return value[-1]["content"]


def _token_ids(value: Any, place: str) -> None:
    if not isinstance(value, list) or not value or any(isinstance(one, bool) or not isinstance(one, int) for one in value):
        raise ValueError(f"{place} is {_shown(value)}; data.prompt_format: token_ids needs a list of whole numbers")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                yield where, json.loads(line)
            except ValueError as error:  # of JSON or of UTF-8
                yield where, ValueError(f"{where}: not JSON: {error}; each line holds one JSON object")


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from error
    for number, fields in enumerate(table.to_pylist()):
        yield f"{path}, row {number}", fields


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
        raise ValueError(
            f"{key}.path is {source.path!r}, from which no data set loads: {error}; give a directory that save_to_disk "
            "wrote, one of data files, or a hub name that this machine can reach or has cached"
        ) from error
    for number, fields in enumerate(found):
        yield f"{source.path}, {source.split} row {number}", fields


def _generate(task: str, size: int, seed: int, options: dict, key: str) -> Iterator[tuple[str, Any]]:
    """Rows of a reasoning-gym task. Its configs check themselves with assertions, hence the odd except."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {len(DATASETS)} tasks"
        raise ValueError(f"{key}.task is {task!r}, which reasoning-gym does not have; {hint}")
    try:
        dataset = reasoning_gym.create_dataset(task, seed=seed, size=size, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"{key}.options is {options!r}, which reasoning-gym's {task} refuses: {error}") from error
    for i in range(size):
        yield f"reasoning-gym {task}, row {i}", dict(dataset[i])
