"""A run of Weights & Biases (wandb 0.31), on disk or sent as it goes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

# Before the import, which starts the reports: megarl's errors go to whoever runs it.
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
import wandb

from megarl.recipe.telemetry_section import WandbSinkSection
from megarl.telemetry.sink import Row, Start, numbers
from megarl.telemetry.starts import COMPLETE

# Nobody has asked to send code, the console, the packages, or what machine this is.
QUIET: dict[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "save_code": False,
    "disable_job_creation": True,
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
FINISH_S = 20.0  # to send what is left at the end; the files stay


def open_sink(section: WandbSinkSection, start: Start) -> WandbSink:
    """The run of an earlier start, if there is one, else a new one."""
    return WandbSink(section, start)


class WandbSink:
    """Figures are the run's history, samples a table of each step under the key `samples`."""

    def __init__(self, section: WandbSinkSection, start: Start) -> None:
        if start.memory.id is None:
            start.memory.keep(id=secrets.token_hex(4))
        self._run = wandb.init(
            project=section.project,
            name=start.name,
            id=start.memory.id,
            resume="allow",
            config=start.recipe,
            dir=str(start.run),
            settings=wandb.Settings(mode=section.mode, finish_timeout=FINISH_S, **QUIET),
        )

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        self._run.log(numbers(figures), step=step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        data = [[_cell(value) for value in row.values()] for row in rows]
        self._run.log({"samples": wandb.Table(columns=[*rows[0]], data=data)}, step=step)

    def close(self, end: str) -> None:
        self._run.finish(exit_code=0 if end == COMPLETE else 1)


def _cell(value: Any) -> Any:
    """A column has one type: the parts of a reward, which have names of their own, are a text."""
    return str(value) if isinstance(value, dict) else value
