"""What a sink is, what it is opened with, and what it remembers from one start of a run to the next."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

FOLDER = "sinks"
Row = Mapping[str, Any]


class Sink(Protocol):
    """Somewhere else to write a run to. Its calls come from one thread, in the order of steps, and may raise anything."""

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        """Write the figures of a step, as a line of metrics.jsonl has them."""

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Write the sample table of a step, as its file in `samples/` has it."""

    def close(self, end: str) -> None:
        """Write what is held back; `end` of the run: COMPLETE, all its steps; REQUEUED, to go on later; or FAILED."""


@dataclass(frozen=True)
class Start:
    """What a sink is opened with. `recipe` is plain data, with every default; `done` is the step to go on behind, and 0 for
    a new run."""

    run: Path
    name: str
    recipe: dict[str, Any]
    done: int
    memory: Memory


class Memory:
    """What a sink keeps in the run directory for a later start: the id of the run there, and the last step it was given.

    The step is written down before the sink gets it: a sink has a step once or, where the run was killed in between, not.
    """

    def __init__(self, path: Path, new: bool) -> None:
        """`new`: the run begins anew, whatever an earlier start has left."""
        self._path = path
        known: dict[str, Any] = {"id": None, "step": 0}
        if path.is_file() and not new:
            with contextlib.suppress(ValueError):  # torn by a node that died: the sink begins another run
                known |= json.loads(path.read_bytes())
        self.id: str | None = known["id"]
        self.step: int = known["step"]

    def keep(self, id: str | None = None, step: int | None = None) -> None:
        """Write down what is given, and leave the rest."""
        self.id = self.id if id is None else id
        self.step = self.step if step is None else step
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps({"id": self.id, "step": self.step}), encoding="utf-8")
        os.replace(beside, self._path)


def numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    """The figures that are numbers: no sink draws a curve of texts or of what was not finite."""
    return {
        key: float(value)
        for key, value in figures.items()
        if isinstance(value, int | float) and math.isfinite(value) and key != "step"
    }


def flat(recipe: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """A recipe's values as texts, by dotted key."""
    found: dict[str, str] = {}
    for key, value in recipe.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return found
