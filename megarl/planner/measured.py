"""Seconds and peaks that an earlier run measured, in place of a device's rate: `megarl check --plan --from RUN`.

An engine phase took s seconds for F operations on R ranks at its plan's efficiency e: its rate is F / (R s e), and the
forecast divides by that in place of `tflops`. F and e are those of the run's own recipe for lengths as it had them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from pydantic import ValidationError

from megarl.planner.advice import gib
from megarl.planner.forecast import Forecast, forecast, job_of
from megarl.planner.lengths import ReadMetrics
from megarl.recipe import ENGINE_PHASES, Recipe
from megarl.recipe.model_section import ModelNotFound, model_shape

# Bytes that the allocators of the fullest trainer rank's device reserved in a step.
PEAK = "memory/reserved"


class MeasuredError(ValueError):
    """`--from` is no run, or none that says anything of this recipe."""


@dataclass(frozen=True)
class Measured:
    """An earlier run: median seconds of a step by phase, operations a second and rank by engine phase, and the largest peak
    in bytes with what the planner says of that run at worst; None for a run that measured none."""

    directory: Path
    num_steps: int
    seconds: Mapping[str, float]
    rates: Mapping[str, float]
    peak_bytes: int | None
    run: Forecast

    @property
    def estimated_bytes(self) -> int:
        """What the planner says of the run's fullest trainer rank at worst."""
        return self.run.trainer_peak

    def other_seconds(self, found: Forecast, phase: str) -> float | None:
        """Seconds of a phase that no engine phase is: a rollout's by the operations of each of the engines' workers, those
        of rewards and advantages by sequences, and a sync's as it was."""
        if phase not in self.seconds:
            return None
        before, after = self.run, found
        factor = 1.0
        if phase == "rollout":
            workers = [1 if one.job.engines is None else one.job.engines.workers for one in (before, after)]
            factor = after.rollout_flops / before.rollout_flops * workers[0] / workers[1]
        elif phase != "weight_sync":
            factor = after.job.limits.num_sequences / before.job.limits.num_sequences
        return self.seconds[phase] * factor

    @property
    def text(self) -> str:
        """Where the seconds come from, and the measured peak beside its estimate."""
        line = f"seconds: from {self.num_steps} steps of {self.directory}, by operations"
        if self.peak_bytes is None:
            return f"{line}; it measured no {PEAK}"
        ratio = self.estimated_bytes / self.peak_bytes
        return (
            f"{line}; its fullest trainer rank reserved {gib(self.peak_bytes)}, estimated at worst "
            f"{gib(self.estimated_bytes)} ({ratio:.2f} of it)"
        )


def measured(source: str, recipe: Recipe, seed: int, read_metrics: ReadMetrics) -> Measured:
    """What the run directory `source` measured, for `recipe`.

    Raises MeasuredError naming `--from`, its value and what is wrong: no run, another model or device, or no seconds of a
    phase that the recipe has.
    """
    directory, where = Path(source), f"--from = {source!r}"
    if not (directory / "recipe.yaml").is_file() or not (directory / "metrics.jsonl").is_file():
        raise MeasuredError(f"{where}: no recipe.yaml and metrics.jsonl there; give a run directory, as runs/NAME")
    try:
        earlier = Recipe.model_validate(yaml.safe_load((directory / "recipe.yaml").read_text(encoding="utf-8")))
        steps = read_metrics(directory / "metrics.jsonl")
    except (ValidationError, ValueError, yaml.YAMLError) as error:
        raise MeasuredError(f"{where}: cannot be read: {' '.join(str(error).split())[:200]}") from error
    for key, was, now in _unlike(earlier, recipe):
        raise MeasuredError(f"{where}: the run had {key} = {was}, and the recipe has {now}; give a run that has the same")
    seconds = {phase: _seconds(steps, phase, where) for phase in recipe.running_phases}
    # The models are the same; they need to be on this machine once.
    paths = {role: getattr(recipe, role) for role in ("model", "reference", "critic", "reward_model")}
    earlier = earlier.model_copy(update={role: _with_path(getattr(earlier, role), owner) for role, owner in paths.items()})
    try:
        found = forecast(job_of(earlier, source, seed, tflops=1e-12, read_metrics=read_metrics))
    except ValueError as error:
        raise MeasuredError(f"{where}: {error}") from error
    # At one operation a second and rank a phase takes its operations by rank and efficiency.
    operations = {one.phase: one.seconds for one in found.phases}
    rates = {phase: operations[phase] / seconds[phase] for phase in ENGINE_PHASES if phase in seconds}  # type: ignore[operator]
    peaks = [int(step[PEAK]) for step in steps if isinstance(step.get(PEAK), int | float)]
    return Measured(directory, len(steps), seconds, rates, max(peaks, default=None), found)


def _unlike(earlier: Recipe, recipe: Recipe) -> list[tuple[str, Any, Any]]:
    """(key, value of the run, value of the recipe) of what must be the same for seconds to say anything."""
    pairs: list[tuple[str, Any, Any]] = [
        ("trainer.precision", earlier.trainer.precision, recipe.trainer.precision),
        ("trainer.fp8", earlier.trainer.fp8, recipe.trainer.fp8),
    ]
    if earlier.device is not None and recipe.device is not None:
        pairs += [
            (f"device.{key}", getattr(earlier.device, key), getattr(recipe.device, key)) for key in ("kind", "memory_gib")
        ]
    found = [pair for pair in pairs if pair[1] != pair[2]]
    for role in recipe.roles:
        key = "model.path" if role == "actor" else f"{role}.path"
        paths = [one.path("model" if role == "actor" else role) for one in (earlier, recipe)]
        if paths[0] != paths[1] and not _same_shape(*paths):
            found.append((key, paths[0], paths[1]))
    return found


def _same_shape(first: str, second: str) -> bool:
    """Whether two paths have models of the same sizes; not where one is not on this machine."""
    try:
        return model_shape(first) == model_shape(second)
    except (ModelNotFound, ValueError, OSError):
        return False


def _with_path(section: Any, owner: Any) -> Any:
    """A section of the run with the path that the recipe has for the same model."""
    if section is None or owner is None:
        return section
    return section.model_copy(update={"path": owner.path})


def _seconds(steps: list[dict[str, Any]], phase: str, where: str) -> float:
    """Median over the steps that had the phase: the first may have compiled or waited."""
    found = [step[f"time/{phase}"] for step in steps if isinstance(step.get(f"time/{phase}"), int | float)]
    if not any(value > 0 for value in found):
        raise MeasuredError(
            f"{where}: no step in metrics.jsonl has time/{phase}, a phase of this recipe; give a run that has it"
        )
    return median(value for value in found if value > 0)
