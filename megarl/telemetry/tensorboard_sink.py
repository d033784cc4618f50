"""TensorBoard's event files, in `tensorboard/` of the run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from torch.utils.tensorboard import SummaryWriter

from megarl.recipe.telemetry_section import TensorboardSinkSection
from megarl.telemetry.sink import Row, Start, numbers

FOLDER = "tensorboard"
COLUMNS = ("sample", "reward", "advantage", "completion_tokens", "finish_reason", "prompt", "completion")


def open_sink(section: TensorboardSinkSection, start: Start) -> TensorboardSink:
    """Event files of this start; what earlier ones have of later steps is not shown any more."""
    return TensorboardSink(start)


class TensorboardSink:
    """Figures are scalars, samples a table of text."""

    def __init__(self, start: Start) -> None:
        # Readers drop the events of earlier files from that step on.
        self._writer = SummaryWriter(str(start.run / FOLDER), purge_step=start.done + 1)
        text = yaml.safe_dump(start.recipe, sort_keys=False)
        self._writer.add_text("recipe", f"```\n{text}\n```", start.done + 1)

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        for key, value in numbers(figures).items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        self._writer.add_text("samples", markdown(rows), step)
        self._writer.flush()

    def close(self, end: str) -> None:
        self._writer.close()


def markdown(rows: Sequence[Row]) -> str:
    """A table that keeps a cell on its line, whatever is in it."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    for row in rows:
        cells = [str(row[column]).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ↵ ") for column in COLUMNS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
