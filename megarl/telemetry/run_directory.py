"""`runs/<name>/`: where a run's recipe, metrics, rollouts and checkpoints lie, and which run may write there."""

from __future__ import annotations

import re
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megarl.recipe import Recipe, recipe_yaml

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
            old, new = _with_defaults(yaml.safe_load(self.recipe.read_text())), yaml.safe_load(recipe_yaml(recipe))
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
        self.path.mkdir(parents=True, exist_ok=True)
        self.recipe.write_text(recipe_yaml(recipe))
        if not self._first_start.is_file():
            self._first_start.write_text(datetime.now().isoformat(timespec="seconds") + "\n")
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
            return datetime.fromisoformat(self._first_start.read_text().strip())
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
        return yaml.safe_load(recipe_yaml(Recipe.model_validate(content)))
    except ValidationError:
        return content


def _at(content: Any, key: str) -> Any:
    """The value of a dotted key; None where an older recipe does not have it."""
    for part in key.split("."):
        content = None if content is None else content.get(part)
    return content
