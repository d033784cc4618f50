"""`runs/<name>/`: where a run's recipe, metrics, rollouts and checkpoints lie, and which run may write there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megarl.recipe import Recipe, recipe_yaml
from megarl.recipe.yaml_text import parse_yaml
from megarl.telemetry.disk import write_whole
from megarl.telemetry.run_lock import RunLock, running_here
from megarl.telemetry.starts import started_in

_CHECKPOINT = re.compile(r"step-(\d{6})$")
# A prompt position means something only with these unchanged; adapters, only under their own rank and factor.
_FIXED = ("model", "data", "run.seed", "algorithm.advantage", "algorithm.group_size", "phases.rollout.prompts", "actor.lora")
# Whoever asks to go on from whatever is there has not looked: then the run must be the same one, as far as it learns.
_LEARNT = ("algorithm", "reward", "actor.optimizer", "actor.freeze", "critic.optimizer", "rollout.temperature")


class RunDirectoryError(ValueError):
    """A run may not write into this directory, or not go on from what is in it."""


class Resume(Enum):
    """How a start takes to what is in its run directory; the value is the option that asks for it."""

    NEVER = ""
    ALWAYS = "--resume"
    IF_SAVED = "--resume-if-saved"

    @classmethod
    def of(cls, always: bool, if_saved: bool) -> Resume:
        """Raises ValueError where both are asked for."""
        if always and if_saved:
            raise ValueError("--resume and --resume-if-saved: one of them, the first where a checkpoint must be there")
        return cls.ALWAYS if always else cls.IF_SAVED if if_saved else cls.NEVER


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The complete checkpoint of the highest step under `directory`; None if there is none."""
    found = {int(match[1]): path for path in Path(directory).glob("step-*") if (match := _CHECKPOINT.match(path.name))}
    return found[max(found)] if found else None


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint was written after."""
    match = _CHECKPOINT.match(checkpoint.name)
    assert match is not None, f"{checkpoint} is no name of a checkpoint"
    return int(match[1])


class RunDirectory:
    """The directory of one run; nothing is made before `prepare`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"
        self._first_start = self.path / "first_start.txt"
        self._lock = RunLock(self.path / "run.lock")

    @classmethod
    def of(cls, recipe: Recipe) -> RunDirectory:
        return cls(Path(recipe.run.dir) / recipe.run.name)

    def evaluation_table(self, step: int) -> Path:
        """What each held-out prompt was answered after a step."""
        return self.path / "evaluations" / f"step-{step:06d}.jsonl"

    def forget_evaluation_tables(self, step: int) -> None:
        """Remove those of later steps, which a resumed run makes again."""
        for file in self.path.glob("evaluations/step-*.jsonl"):
            if file.stem > self.evaluation_table(max(step, 0)).stem or step < 0:
                file.unlink()

    def refuse_running(self) -> None:
        """Raise RunDirectoryError where a process of this host writes here; `lock` says the same of every host."""
        self._refuse(running_here(self._lock.path))

    def lock(self) -> None:
        """Keep other runs out until `unlock` or the end of this process. Raises RunDirectoryError where a run is in."""
        self._refuse(self._lock.take())

    def unlock(self) -> None:
        """Let other runs in."""
        self._lock.release()

    def _refuse(self, holder: dict[str, Any] | None) -> None:
        if holder is not None:
            raise RunDirectoryError(
                f"{self.path}: a run writes here already, process {holder['process']} on {holder['host']} since "
                f"{holder['since']}: wait for its end, take another run.name, or remove {self._lock.path} if it is gone"
            )

    def read_recipe(self) -> dict[str, Any]:
        """The run's resolved recipe as plain data. Raises RunDirectoryError where it is absent or no recipe."""
        try:
            content = parse_yaml(self.recipe.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RunDirectoryError(f"{self.recipe} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise RunDirectoryError(f"{self.recipe} holds no recipe; write the run's recipe there, or remove {self.path}")
        return content

    def moved_paths(self) -> list[str]:
        """Overrides for relative paths of the run's recipe that exist in the directory of the run's last start: they mean
        what they meant there. None where that is the working directory."""
        there = started_in(self.path)
        if there is None or there == Path.cwd():
            return []
        found = []
        for key, path in _paths(self.read_recipe()):
            if not Path(path).is_absolute() and (there / path).exists():
                found.append(f"{key}={json.dumps(str(there / path))}")
        return found

    def check(self, recipe: Recipe, resume: Resume) -> Path | None:
        """The checkpoint to resume from; None for a new run.

        Raises RunDirectoryError where a run would write over another one, has nothing to resume from, or would go on with
        other data.
        """
        if resume is Resume.NEVER:
            if self._has_metrics:
                raise RunDirectoryError(
                    f"run.name = {recipe.run.name!r}: {self.path} holds a run already; "
                    "continue it with --resume, take another run.name, or remove the directory"
                )
            return None
        checkpoint = latest_checkpoint(self.checkpoints)
        if checkpoint is None and resume is Resume.ALWAYS:
            raise RunDirectoryError(f"--resume: {self.checkpoints} holds no complete checkpoint; start without --resume")
        if self.recipe.is_file():
            old, new = _with_defaults(self.read_recipe()), parse_yaml(recipe_yaml(recipe))
            for key in _FIXED if resume is Resume.ALWAYS else _FIXED + _LEARNT:
                if _at(old, key) != _at(new, key):
                    way = "a resumed run keeps it, another one starts under another run.name"
                    way += "" if key in _FIXED else ", and --resume goes on with it changed"
                    raise RunDirectoryError(
                        f"{resume.value}: {self.path} is the run directory of another recipe: {key} was {_at(old, key)!r} "
                        f"and is {_at(new, key)!r} now; {way}"
                    )
        return checkpoint

    def prepare(self, recipe: Recipe, checkpoint: Path | None) -> Path | None:
        """Make the directory and write the resolved recipe. Metrics of an earlier start that left no checkpoint are kept:
        under the name that is returned."""
        write_whole(self.recipe, recipe_yaml(recipe))
        if not self._first_start.is_file():
            write_whole(self._first_start, datetime.now().isoformat(timespec="seconds") + "\n")
        if checkpoint is not None or not self._has_metrics:
            return None
        number = 1
        while (kept := self.metrics.with_name(f"metrics.{number}.jsonl")).exists():
            number += 1
        return self.metrics.rename(kept)

    @property
    def first_start(self) -> datetime:
        """When the run started first, which is the date that its prompts have; now for a run that has not."""
        if not self._first_start.is_file():
            return datetime.now()
        try:
            return datetime.fromisoformat(self._first_start.read_text(encoding="utf-8").strip())
        except ValueError as error:
            rule = "the day of the run's first start, which chat templates may write into prompts"
            raise RunDirectoryError(f"{self._first_start}: {error}; it holds {rule}, as 2026-01-31T12:00:00") from error

    @property
    def can_go_on(self) -> bool:
        """Whether a start with --resume-if-saved goes on from something, or has nothing to lose."""
        return latest_checkpoint(self.checkpoints) is not None or not self._has_metrics

    @property
    def _has_metrics(self) -> bool:
        return self.metrics.is_file() and self.metrics.stat().st_size > 0


def _with_defaults(content: Any) -> Any:
    """A recipe as it was written, with the keys that have come since; as it is, where it is none of this version."""
    try:
        return parse_yaml(recipe_yaml(Recipe.model_validate(content)))
    except ValidationError:
        return content


def _paths(content: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and value of every path that a recipe reads from."""
    for key, value in enumerate(content) if isinstance(content, list) else content.items():
        if isinstance(value, dict | list):
            yield from _paths(value, f"{above}{key}.")
        elif key in ("path", "replay") and isinstance(value, str):
            yield f"{above}{key}", value


def _at(content: Any, key: str) -> Any:
    """The value of a dotted key; None where an older recipe does not have it."""
    for part in key.split("."):
        content = None if content is None else content.get(part)
    return content
