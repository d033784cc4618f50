"""`metrics.jsonl`: one line of metrics a step, flushed at once, so that the file can be read during the run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.telemetry.disk import LineFile, read_lines, write_whole

KEY = re.compile(r"[a-z][a-z0-9_]*(/[a-z0-9][a-z0-9_.-]*)+", re.IGNORECASE)


class MetricsWriter:
    """Appends steps to a metrics file and creates its directory."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file = LineFile(self._path)

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Append a step and return its line. Keys are `area/name`; values are numbers (also of numpy and torch), lists of
        numbers, or texts. NaN and infinity become null, for JSON. Raises ValueError for other keys and values."""
        line: dict[str, Any] = {"step": step}
        for key, value in metrics.items():
            if not KEY.fullmatch(key):
                raise ValueError(f"metric {key!r} is not named area/name")
            line[key] = _plain(key, value)
        self._file.append(json.dumps(line, allow_nan=False))
        return line

    def truncate_after(self, step: int) -> None:
        """Drop lines after `step`, and a line that a kill cut short, so that a resumed run repeats no step."""
        lines = [json.dumps(line) + "\n" for line in read_lines(self._path) if line["step"] <= step]
        self._file.close()
        write_whole(self._path, "".join(lines))
        self._file = LineFile(self._path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, without one that was cut short. Raises ValueError if the file is missing."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is no file; a run directory has one after the run's first step")
    return read_lines(path)


def _plain(key: str, value: Any) -> Any:
    if hasattr(value, "item"):  # a numpy or torch number, without importing either
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list):
        return [_plain(key, item) for item in value]
    raise ValueError(f"metric {key!r} is a {type(value).__name__}; write a number, a list of numbers or a text")


def is_number(value: Any) -> bool:
    """Return whether a metric is a finite number, which can be drawn and averaged."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def mean_reward(metrics: Mapping[str, Any]) -> Any:
    """Return the mean reward of all rollouts that a step sampled; None if the step has no reward.

    Under `algorithm.dynamic_sampling`, `reward/mean` covers only groups whose rewards differ, and may not change while the
    policy learns; `reward/sampled_mean` covers all rounds.
    """
    return metrics["reward/sampled_mean"] if "reward/sampled_mean" in metrics else metrics.get("reward/mean")


def duration(seconds: float) -> str:
    """Return a time as text, in one or two units."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 2:
        return f"{60 * hours + minutes} min"
    return f"{hours} h {minutes:02d} min" if hours < 24 else f"{seconds / 86400:.1f} d"
