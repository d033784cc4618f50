"""Rows of questions and answers from a file or a generator.

JSONL is read with the standard library and Parquet with pyarrow, not through `datasets`: its loaders copy
the file into a cache, and their errors name neither the line nor the key of a bad row.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.recipe.data_sections import FilePromptsSection, ReasoningGymPromptsSection


@dataclass(frozen=True)
class Row:
    """One question with its answer, and everything else its source says about it."""

    question: str
    answer: str
    fields: dict


def load_rows(prompts: FilePromptsSection | ReasoningGymPromptsSection, seed: int) -> list[Row]:
    """All rows of `data.prompts`, in source order; `seed` is for a generator whose section gives none.

    Raises ValueError naming the file, the row and the key for bad data, or the recipe key for a bad request.
    """
    if prompts.kind == "reasoning_gym":
        own_seed = seed if prompts.seed is None else prompts.seed
        rows = _generate(prompts.task, prompts.size, own_seed, prompts.options)
    else:
        read = {"jsonl": _read_jsonl, "parquet": _read_parquet}[prompts.kind]
        rows = read(Path(prompts.path), prompts.prompt_field, prompts.answer_field)
    if not rows:
        raise ValueError(f"data.prompts has no rows ({_origin(prompts)}); give at least one question")
    return rows


def _origin(prompts: FilePromptsSection | ReasoningGymPromptsSection) -> str:
    return f"task {prompts.task}" if prompts.kind == "reasoning_gym" else str(prompts.path)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"data.prompts.path is {str(path)!r}, which is no file; the path counts from {Path.cwd()}")
    return path


def _row(fields: Any, where: str, prompt_field: str, answer_field: str) -> Row:
    """Check one row; `where` names its file and position."""
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: a row is an object of named fields, this is {type(fields).__name__}")
    question = _text(fields, where, prompt_field, "data.prompts.prompt_field")
    answer = _text(fields, where, answer_field, "data.prompts.answer_field")
    return Row(question, answer, fields)


def _text(fields: dict, where: str, field: str, key: str) -> str:
    if field not in fields:
        near = difflib.get_close_matches(field, fields, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{where}: no field {field!r} ({key}), it has {sorted(fields)}{hint}")
    value = fields[field]
    # A number is a fine answer; a list or null would silently become a text that no completion can equal.
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{where}: field {field!r} is {value!r}; a text or a number is needed ({key})")
    text = str(value)
    if not text.strip():
        raise ValueError(f"{where}: field {field!r} is empty; a text or a number is needed ({key})")
    return text


def _read_jsonl(path: Path, prompt_field: str, answer_field: str) -> list[Row]:
    rows = []
    with _existing(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                fields = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{where}: not JSON: {error}; each line holds one JSON object") from error
            rows.append(_row(fields, where, prompt_field, answer_field))
    return rows


def _read_parquet(path: Path, prompt_field: str, answer_field: str) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(_existing(path))
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from error
    return [
        _row(fields, f"{path}, row {number}", prompt_field, answer_field) for number, fields in enumerate(table.to_pylist())
    ]


def _generate(task: str, size: int, seed: int, options: dict) -> list[Row]:
    """Rows of a reasoning-gym task. Its configs check themselves with assertions, hence the odd except."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {len(DATASETS)} tasks"
        raise ValueError(f"data.prompts.task is {task!r}, which reasoning-gym does not have; {hint}")
    try:
        dataset = reasoning_gym.create_dataset(task, seed=seed, size=size, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"data.prompts.options is {options!r}, which reasoning-gym's {task} refuses: {error}") from error
    return [_row(dict(dataset[i]), f"reasoning-gym {task}, row {i}", "question", "answer") for i in range(size)]
