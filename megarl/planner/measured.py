"""Seconds and peaks that an earlier run measured, in place of a device's rate: `megarl check --plan --from RUN`.

An engine phase took s seconds for F operations on R ranks at its plan's efficiency e: its rate is F / (R s e), and the
forecast divides by that in place of `tflops`. F and e come from the run's recipe and the lengths that it had.
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
    """`--from` is no run, or a run that says nothing about this recipe."""


@dataclass(frozen=True)
class Measured:
    """An earlier run: median seconds of a step by phase, operations a second and rank by engine phase, the largest peak in
    bytes (None where the run measured none), and the planner's forecast of that run."""

    directory: Path
    num_steps: int
    seconds: Mapping[str, float]
    rates: Mapping[str, float]
    peak_bytes: int | None
    run: Forecast

    @property
    def estimated_bytes(self) -> int:
        """The estimate for the run's fullest trainer rank at worst."""
        return self.run.trainer_peak

    def other_seconds(self, plan: Forecast, phase: str) -> float | None:
        """Seconds of a phase that no Megatron role runs: a rollout's scaled by the operations of each engine worker, those
        of rewards and advantages by sequences, and a sync's as it was."""
        if phase not in self.seconds:
            return None
        factor = 1.0
        if phase == "rollout":
            before, after = (1 if step.job.engines is None else step.job.engines.workers for step in (self.run, plan))
            factor = plan.rollout_flops / self.run.rollout_flops * before / after
        elif phase != "weight_sync":
            factor = plan.job.limits.num_sequences / self.run.job.limits.num_sequences
        return self.seconds[phase] * factor

    @property
    def text(self) -> str:
        """Where the seconds come from, and the measured peak with its estimate."""
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
    for key, before, now in _differences(earlier, recipe):
        raise MeasuredError(f"{where}: the run had {key} = {before}, and the recipe has {now}; give a run that has the same")
    seconds = {}
    for phase in recipe.running_phases:
        times = [step[f"time/{phase}"] for step in steps if isinstance(step.get(f"time/{phase}"), int | float)]
        if not any(value > 0 for value in times):
            rule = f"no step in metrics.jsonl has time/{phase}, a phase of this recipe; give a run that has it"
            raise MeasuredError(f"{where}: {rule}")
        seconds[phase] = median(value for value in times if value > 0)  # the first step may have compiled or waited
    # The models are the same, and the recipe's paths are the ones that exist on this machine.
    updates = {}
    for role in ("model", "reference", "critic", "reward_model"):
        section, current = getattr(earlier, role), getattr(recipe, role)
        if section is not None and current is not None:
            updates[role] = section.model_copy(update={"path": current.path})
    try:
        # At one operation a second and rank a phase takes its operations by rank and efficiency.
        job = job_of(earlier.model_copy(update=updates), source, seed, tflops=1e-12, read_metrics=read_metrics)
        run = forecast(job)
    except ValueError as error:
        raise MeasuredError(f"{where}: {error}") from error
    operations = {phase.phase: phase.seconds for phase in run.phases}
    rates = {phase: operations[phase] / seconds[phase] for phase in ENGINE_PHASES if phase in seconds}  # type: ignore[operator]
    peaks = [int(step[PEAK]) for step in steps if isinstance(step.get(PEAK), int | float)]
    return Measured(directory, len(steps), seconds, rates, max(peaks, default=None), run)


def _differences(earlier: Recipe, recipe: Recipe) -> list[tuple[str, Any, Any]]:
    """(key, value of the run, value of the recipe) of keys that must be the same for seconds to carry over."""
    pairs: list[tuple[str, Any, Any]] = [
        ("trainer.precision", earlier.trainer.precision, recipe.trainer.precision),
        ("trainer.fp8", earlier.trainer.fp8, recipe.trainer.fp8),
    ]
    if earlier.device is not None and recipe.device is not None:
        for key in ("kind", "memory_gib"):
            pairs.append((f"device.{key}", getattr(earlier.device, key), getattr(recipe.device, key)))
    differences = [pair for pair in pairs if pair[1] != pair[2]]
    for role in recipe.roles:
        name = "model" if role == "actor" else role
        before, now = earlier.path(name), recipe.path(name)
        try:
            same = before == now or model_shape(before) == model_shape(now)
        except (ModelNotFound, ValueError, OSError):
            same = False  # one of the models is not on this machine
        if not same:
            differences.append((f"{name}.path", before, now))
    return differences
