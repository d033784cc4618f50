"""`metrics.jsonl`: one line of figures a step, appended and flushed, readable while the run goes on."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.telemetry.disk import LineFile

KEY = re.compile(r"[a-z][a-z0-9_]*(/[a-z0-9][a-z0-9_.-]*)+", re.IGNORECASE)


class MetricsWriter:
    """Appends steps to a metrics file; its directory is made if need be."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file = LineFile(self._path)

    def write(self, step: int, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Append one step, and return the line. Keys are `area/name`; values are numbers (of numpy or torch too), lists of
        them (one of each device) or texts.

        JSON knows no NaN and no infinity: they are written as null. Raises ValueError for a key or a value of
        another form.
        """
        line: dict[str, Any] = {"step": step}
        for key, value in figures.items():
            if not KEY.fullmatch(key):
                raise ValueError(f"metric {key!r} is not named area/name")
            line[key] = _plain(key, value)
        self._file.append(json.dumps(line, allow_nan=False))
        return line

    def truncate_after(self, step: int) -> None:
        """Drop every line behind `step`, and one cut short by a kill, so that a resumed run repeats none."""
        kept = [line for line in _complete_lines(self._path) if line["step"] <= step]
        self._file.close()
        beside = self._path.with_suffix(".truncated")
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._path)
        self._file = LineFile(self._path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Every complete line of a metrics file, in order; raises ValueError where there is no such file."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is no file; a run directory holds one once its first step is done")
    return _complete_lines(path)


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not text.endswith("\n"):
            break  # the last line of a run that was killed while it wrote
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(line, dict):
            raise ValueError(f"{path}, line {number}: a {type(line).__name__}, and a line is an object of numbers")
        lines.append(line)
    return lines


def _plain(key: str, value: Any) -> Any:
    if hasattr(value, "item"):  # a numpy or torch number, without importing either
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list):
        return [_plain(key, one) for one in value]
    raise ValueError(f"metric {key!r} is a {type(value).__name__}; a number, a list of numbers or a text is needed")
