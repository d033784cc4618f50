"""`runs/<name>/`: the files of a run, the lock against a second writer, and the rules of a resume."""

from __future__ import annotations

import contextlib
import platform
import re
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from filelock import SoftFileLease, Timeout
from pydantic import ValidationError

from megarl.recipe import Recipe, recipe_yaml
from megarl.recipe.yaml_text import parse_yaml, value_at
from megarl.telemetry.disk import write_whole

_CHECKPOINT = re.compile(r"step-(\d{6})$")
# A resumed run must keep these keys, because they give a position in the prompts, or an adapter, its meaning.
_FIXED = ("model", "data", "run.seed", "algorithm.advantage", "algorithm.group_size", "phases.rollout.prompts", "actor.lora",
          "warmup.sft.steps", "warmup.sft.data", "warmup.sft.actor_update.mini_batch")  # fmt: skip
# --resume-if-saved must also keep these keys, because no person has looked at the directory.
_LEARNED = ("algorithm", "reward", "actor.optimizer", "actor.freeze", "critic.optimizer", "rollout.temperature", "warmup")
TRANSPORT = "weight_sync.txt"  # file of a run: how its weights travel to the engines, and why
# How long a lock lives without a touch, and how long a start waits for a lock that no living process holds.
LEASE_S, ANSWER_S = 30.0, 0.5


class RunDirectoryError(ValueError):
    """A run may not write into this directory, or cannot resume from it."""


class Resume(Enum):
    """Whether a start resumes from its run directory; the value is the command-line option."""

    NEVER = ""
    ALWAYS = "--resume"
    IF_SAVED = "--resume-if-saved"

    @classmethod
    def of(cls, always: bool, if_saved: bool) -> Resume:
        """Return the value for the two options. Raises ValueError if both are given."""
        if always and if_saved:
            raise ValueError("--resume and --resume-if-saved: give one; --resume requires a checkpoint to be there")
        return cls.ALWAYS if always else cls.IF_SAVED if if_saved else cls.NEVER


def latest_checkpoint(directory: str | Path) -> Path | None:
    """Return the complete checkpoint of the highest step under `directory`; None without a checkpoint."""
    return max((path for path in Path(directory).glob("step-*") if _CHECKPOINT.match(path.name)), default=None)


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written."""
    match = _CHECKPOINT.match(checkpoint.name)
    assert match is not None, f"{checkpoint} is not named like a checkpoint"
    return int(match[1])


class RunDirectory:
    """The directory of one run. Before `prepare` no file is created."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"
        self._first_start = self.path / "first_start.txt"
        # The holder touches the file. A run takes over the lock of a dead process, on another host after LEASE_S without a
        # touch.
        self._lock = SoftFileLease(self.path / "run.lock", lease_duration=LEASE_S, thread_local=False, is_singleton=True)

    @classmethod
    def of(cls, recipe: Recipe) -> RunDirectory:
        return cls(Path(recipe.run.dir) / recipe.run.name)

    def evaluation_table(self, step: int) -> Path:
        """Return the file for the answers to held-out prompts after a step."""
        return self.path / "evaluations" / f"step-{step:06d}.jsonl"

    def forget_tables(self, folder: str, step: int) -> None:
        """Remove the tables in `folder` of steps after `step`, which a resumed run repeats."""
        for file in (self.path / folder).glob("step-*.jsonl"):
            number = file.stem.removeprefix("step-")
            if number.isdecimal() and int(number) > step:
                file.unlink()

    def refuse_running(self) -> None:
        """Raise RunDirectoryError if a process of this host writes here; `lock` checks every host."""
        if self._is_local and not self._lock.is_locked:
            self._take(ANSWER_S)
            self.unlock()

    def lock(self) -> None:
        """Keep other runs out until `unlock` or the end of this process. Raises RunDirectoryError if a run writes here: soon
        for a process of this host, and after LEASE_S for a process of another host that touches the lock."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._take(ANSWER_S)
        except RunDirectoryError:
            if self._is_local:
                raise
            self._take(LEASE_S + ANSWER_S)

    def unlock(self) -> None:
        """Let other runs write here."""
        self._lock.release(force=True)

    @property
    def _is_local(self) -> bool:
        # The host name of another container has a suffix, so its process counts as a process of another host.
        return self._lock.owner is not None and self._lock.owner.hostname == platform.node()

    def _take(self, timeout_s: float) -> None:
        try:
            self._lock.acquire(timeout=timeout_s)
        except Timeout as error:
            owner = self._lock.owner
            holder = "another process" if owner is None else f"process {owner.pid} on {owner.hostname.partition('?')[0]}"
            raise RunDirectoryError(
                f"{self.path}: a run writes here already, {holder}: wait for its end, take another run.name, or remove "
                f"{self._lock.lock_file} if it is gone"
            ) from error

    def read_recipe(self) -> dict[str, Any]:
        """Return the run's resolved recipe as plain data. Raises RunDirectoryError if there is no recipe."""
        try:
            content = parse_yaml(self.recipe.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RunDirectoryError(f"{self.recipe} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise RunDirectoryError(f"{self.recipe} holds no recipe; write the run's recipe there, or remove {self.path}")
        return content

    def check(self, recipe: Recipe, resume: Resume) -> Path | None:
        """Return the checkpoint to resume from; None for a new run. Raises RunDirectoryError if the run would overwrite
        another run, has nothing to resume from, or would resume with another recipe."""
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
            old, new = self.read_recipe(), parse_yaml(recipe_yaml(recipe))
            with contextlib.suppress(ValidationError):  # this adds keys that are newer than the run
                old = parse_yaml(recipe_yaml(Recipe.model_validate(old)))
            for key in _FIXED if resume is Resume.ALWAYS else _FIXED + _LEARNED:
                before, after = value_at(old, key), value_at(new, key)
                if before != after:
                    advice = "a resumed run keeps it; give another run.name to start another run"
                    advice += "" if key in _FIXED else ", or --resume to change it"
                    raise RunDirectoryError(
                        f"{resume.value}: {self.path} is the run directory of another recipe: {key} was {before!r} "
                        f"and is {after!r} now; {advice}"
                    )
        return checkpoint

    def prepare(self, recipe: Recipe, checkpoint: Path | None) -> Path | None:
        """Create the directory and write the resolved recipe. Rename the metrics of an earlier start without a checkpoint
        and return their new path."""
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
        """The time of the run's first start, which is the date in the run's prompts; now for a new run."""
        if not self._first_start.is_file():
            return datetime.now()
        return datetime.fromisoformat(self._first_start.read_text(encoding="utf-8").strip())

    @property
    def can_go_on(self) -> bool:
        """Whether --resume-if-saved resumes from a checkpoint, or has nothing to lose."""
        return latest_checkpoint(self.checkpoints) is not None or not self._has_metrics

    @property
    def _has_metrics(self) -> bool:
        return self.metrics.is_file() and self.metrics.stat().st_size > 0


def dotted(content: Any, key: str = "") -> dict[str, Any]:
    """Return all values of a recipe by dotted key."""
    if not isinstance(content, dict) or not content:
        return {key: content}
    parts = [dotted(value, f"{key}.{name}" if key else name) for name, value in content.items()]
    return {name: value for part in parts for name, value in part.items()}
