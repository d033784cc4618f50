"""`runs/<name>/`: its files, which run may write there, and what a run may resume from."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import re
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

import psutil
import yaml
from pydantic import ValidationError

from megarl.recipe import Recipe, recipe_yaml
from megarl.recipe.yaml_text import parse_yaml
from megarl.telemetry.disk import write_whole
from megarl.telemetry.exit_status import started_in

_CHECKPOINT = re.compile(r"step-(\d{6})$")
# A resumed run keeps these, because they give a position in the prompts, or an adapter, its meaning.
_FIXED = ("model", "data", "run.seed", "algorithm.advantage", "algorithm.group_size", "phases.rollout.prompts", "actor.lora")
# --resume-if-saved also keeps these: nobody has looked at the directory.
_LEARNED = ("algorithm", "reward", "actor.optimizer", "actor.freeze", "critic.optimizer", "rollout.temperature")
# The holder of a lock touches it this often. Take over the lock of another host after three missing touches.
BEAT_S = 10.0
SILENT_BEATS = 3


class RunDirectoryError(ValueError):
    """A run may not write into this directory, or cannot resume from it."""


class Resume(Enum):
    """Whether a start resumes from its run directory; the value is the command-line option."""

    NEVER = ""
    ALWAYS = "--resume"
    IF_SAVED = "--resume-if-saved"

    @classmethod
    def of(cls, always: bool, if_saved: bool) -> Resume:
        """Raises ValueError if both are given."""
        if always and if_saved:
            raise ValueError("--resume and --resume-if-saved: give one; --resume requires a checkpoint to be there")
        return cls.ALWAYS if always else cls.IF_SAVED if if_saved else cls.NEVER


def latest_checkpoint(directory: str | Path) -> Path | None:
    """Return the complete checkpoint of the highest step under `directory`; None without one."""
    return max((path for path in Path(directory).glob("step-*") if _CHECKPOINT.match(path.name)), default=None)


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written."""
    match = _CHECKPOINT.match(checkpoint.name)
    assert match is not None, f"{checkpoint} is not named like a checkpoint"
    return int(match[1])


class RunDirectory:
    """The directory of one run. Nothing is created before `prepare`."""

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
        """Return the file of the answers to held-out prompts after a step."""
        return self.path / "evaluations" / f"step-{step:06d}.jsonl"

    def forget_evaluation_tables(self, step: int) -> None:
        """Remove the tables of steps after `step`, which a resumed run evaluates again."""
        for file in self.path.glob("evaluations/step-*.jsonl"):
            if file.stem > self.evaluation_table(max(step, 0)).stem or step < 0:
                file.unlink()

    def refuse_running(self) -> None:
        """Raise RunDirectoryError where a process of this host writes here; `lock` checks every host."""
        holder = self._lock.read()
        self._refuse(holder if _runs_here(holder) else None)

    def lock(self) -> None:
        """Keep other runs out until `unlock` or the end of this process. Raises RunDirectoryError where one writes."""
        self._refuse(self._lock.take())

    def unlock(self) -> None:
        """Let other runs write here."""
        self._lock.release()

    def _refuse(self, holder: dict[str, Any] | None) -> None:
        if holder is not None:
            raise RunDirectoryError(
                f"{self.path}: a run writes here already, process {holder['process']} on {holder['host']} since "
                f"{holder['since']}: wait for its end, take another run.name, or remove {self._lock.path} if it is gone"
            )

    def read_recipe(self) -> dict[str, Any]:
        """Return the run's resolved recipe as plain data. Raises RunDirectoryError where there is none."""
        try:
            content = parse_yaml(self.recipe.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RunDirectoryError(f"{self.recipe} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise RunDirectoryError(f"{self.recipe} holds no recipe; write the run's recipe there, or remove {self.path}")
        return content

    def moved_paths(self) -> list[str]:
        """Return overrides that make the recipe's relative paths absolute, where they exist in the working directory of the
        run's last start and this is another directory."""
        old_directory = started_in(self.path)
        if old_directory is None or old_directory == Path.cwd():
            return []
        return [
            f"{key}={json.dumps(str(old_directory / path))}"
            for key, path in _paths(self.read_recipe())
            if not Path(path).is_absolute() and (old_directory / path).exists()
        ]

    def check(self, recipe: Recipe, resume: Resume) -> Path | None:
        """Return the checkpoint to resume from; None for a new run. Raises RunDirectoryError where the run would overwrite
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
            with contextlib.suppress(ValidationError):  # add keys that are newer than the run
                old = parse_yaml(recipe_yaml(Recipe.model_validate(old)))
            for key in _FIXED if resume is Resume.ALWAYS else _FIXED + _LEARNED:
                if _at(old, key) != _at(new, key):
                    advice = "a resumed run keeps it; give another run.name to start another run"
                    advice += "" if key in _FIXED else ", or --resume to change it"
                    raise RunDirectoryError(
                        f"{resume.value}: {self.path} is the run directory of another recipe: {key} was {_at(old, key)!r} "
                        f"and is {_at(new, key)!r} now; {advice}"
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
        """When the run first started, which is the date in its prompts; now for a new run."""
        if not self._first_start.is_file():
            return datetime.now()
        try:
            return datetime.fromisoformat(self._first_start.read_text(encoding="utf-8").strip())
        except ValueError as error:
            rule = "the day of the run's first start, which chat templates may write into prompts"
            raise RunDirectoryError(f"{self._first_start}: {error}; write {rule}, as 2026-01-31T12:00:00") from error

    @property
    def can_go_on(self) -> bool:
        """Whether --resume-if-saved resumes from a checkpoint, or has nothing to lose."""
        return latest_checkpoint(self.checkpoints) is not None or not self._has_metrics

    @property
    def _has_metrics(self) -> bool:
        return self.metrics.is_file() and self.metrics.stat().st_size > 0


def _paths(content: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of every path that a recipe reads."""
    for key, value in enumerate(content) if isinstance(content, list) else content.items():
        if isinstance(value, dict | list):
            yield from _paths(value, f"{above}{key}.")
        elif key in ("path", "replay") and isinstance(value, str):
            yield f"{above}{key}", value


def _at(content: Any, key: str) -> Any:
    """Return the value of a dotted key; None where a recipe lacks it."""
    for part in key.split("."):
        content = None if content is None else content.get(part)
    return content


class RunLock:
    """`run.lock`, which names its holder's host and process; held from `take` until `release` or the end of this process.

    The kernel's record lock ends with its process or node. It works on one host and on file systems that carry locks between
    hosts (NFS 4, GPFS, Lustre with `flock`), but the kernel also drops it when the holder closes any other descriptor of the
    file. So where the lock is free and the file names a process, check the process: on this host by its id and start time,
    on another host by the file's time, which a live holder updates. Forked children would keep a `flock`.
    """

    def __init__(self, path: Path, beat_s: float = BEAT_S) -> None:
        self.path, self._beat_s = path, beat_s
        self._descriptor = -1
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)

    def take(self) -> dict[str, Any] | None:
        """Take the lock and return None, or return `host`, `process` and `since` of its holder."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked, has_locks = False, True
        except OSError as error:
            is_locked, has_locks = error.errno in (errno.EACCES, errno.EAGAIN), False
        holder = self.read()  # after the attempt, because a holder that leaves empties the file
        # Where locks work, this process may take its lock again: after an exec or a failed run.
        is_held_here = has_locks and holder is not None and holder["process"] == os.getpid()
        is_alive = is_locked or (not is_held_here and _runs_here(holder))
        if not is_alive and holder is not None and holder["host"] != platform.node():
            before, beats = self.path.stat().st_mtime_ns, 0
            while not is_alive and beats < SILENT_BEATS:
                time.sleep(self._beat_s)
                is_alive, beats = self.path.stat().st_mtime_ns != before, beats + 1
        if is_alive:
            os.close(self._descriptor)
            self._descriptor = -1
            return holder or {
                "host": "unknown",
                "process": "unknown",
                "since": "unknown",
            }  # the holder has not written its name yet
        holder = {"host": platform.node(), "process": os.getpid(), "created": psutil.Process().create_time(),
                  "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}  # fmt: skip
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)
        self._thread.start()
        return None

    def release(self) -> None:
        """Release the lock. The empty file stays, because removing it would be a race."""
        self._released.set()
        if self._descriptor >= 0:
            self._thread.join(self._beat_s)  # a touch may hang with its file system
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self) -> dict[str, Any] | None:
        """Return the holder that the file names; None for an absent, empty or torn file."""
        try:
            content = os.pread(self._descriptor, 4096, 0) if self._descriptor >= 0 else self.path.read_bytes()
            holder = json.loads(content)
        except (OSError, ValueError):
            return None
        return holder if isinstance(holder, dict) and {"host", "process", "created", "since"} <= holder.keys() else None

    def _beat(self) -> None:
        while not self._released.wait(self._beat_s):
            with contextlib.suppress(OSError):  # the file system may be away for a while
                os.utime(self.path)


def _runs_here(holder: dict[str, Any] | None) -> bool:
    if holder is None or holder["host"] != platform.node():
        return False
    try:
        process = psutil.Process(holder["process"])
        return abs(process.create_time() - holder["created"]) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
