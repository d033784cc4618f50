"""A run as a report reads it, finished or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from megarl.recipe.yaml_text import value_at
from megarl.telemetry.disk import read_lines
from megarl.telemetry.exit_status import starts_summary
from megarl.telemetry.metrics_file import is_number, mean_reward, read_metrics
from megarl.telemetry.run_directory import TRANSPORT

RECENT = 10  # steps whose means describe the run now


@dataclass(frozen=True)
class Run:
    """The files of a run. `steps` are the lines of metrics.jsonl, `evaluations` those of evaluations.jsonl; `transport` is
    that of weight syncs at the last start, with its reason."""

    path: Path
    name: str
    steps: list[dict[str, Any]]
    recipe: dict[str, Any] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    transport: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list)

    @cached_property
    def keys(self) -> list[str]:
        """All metrics of the run, in the order of appearance."""
        return list(dict.fromkeys(key for line in self.steps for key in line if key != "step"))

    def at(self, key: str) -> Any:
        """Return a value of the resolved recipe by its dotted key; None without it."""
        return value_at(self.recipe, key)

    def points(self, key: str) -> tuple[list[int], list[float]]:
        """Return steps and values of a metric, where it is a finite number."""
        lines = [line for line in self.steps if is_number(line.get(key))]
        return [line["step"] for line in lines], [line[key] for line in lines]

    @property
    def goal(self) -> str:
        """What a run that learns raises: the mean reward, or minus the loss where data take the place of rollouts."""
        return "mean reward" if self.at("run.kind") in (None, "rl") else "minus the loss"

    def rewards(self) -> tuple[list[int], list[float]]:
        """Return steps and what `goal` names; mean rewards are of all that the steps sampled."""
        if self.goal != "mean reward":
            steps, losses = self.points("preference/loss" if "preference/loss" in self.keys else "actor/loss")
            return steps, [-loss for loss in losses]
        pairs = [(line["step"], reward) for line in self.steps if is_number(reward := mean_reward(line))]
        return [step for step, _ in pairs], [reward for _, reward in pairs]

    def sampled(self) -> dict[int, int] | None:
        """Return how many completions were sampled by the end of each step, with the extra rounds of
        `algorithm.dynamic_sampling`; None without a recipe."""
        prompts, size = self.at("phases.rollout.prompts"), self.at("algorithm.group_size")
        if prompts is None or size is None:
            return None
        supervised = self.at("warmup.sft.steps") or 0
        extra = [line.get("rollout/extra_prompts") for line in self.steps]
        so_far = accumulate(number if is_number(number) else 0 for number in extra)
        steps = [line["step"] for line in self.steps]
        return {step: (max(0, step - supervised) * prompts + more) * size for step, more in zip(steps, so_far, strict=True)}

    def recent(self) -> dict[str, float]:
        """Return means over the last steps. The first step warms up and counts only in a short run."""
        lines = (self.steps[1:] if len(self.steps) > 3 else self.steps)[-RECENT:]
        values = {key: [line[key] for line in lines if is_number(line.get(key))] for key in self.keys}
        return {key: fmean(numbers) for key, numbers in values.items() if numbers}


def read_run(path: str | Path) -> Run:
    """Read a run directory. Raises ValueError where the run has made no step yet, or its files cannot be read."""
    path = Path(path)
    steps = read_metrics(path / "metrics.jsonl")
    if not steps:
        raise ValueError(f"{path / 'metrics.jsonl'} has no step yet; a run has one after its first step")
    recipe, transport = path / "recipe.yaml", path / TRANSPORT
    try:
        content = yaml.safe_load(recipe.read_text(encoding="utf-8")) if recipe.is_file() else None
    except yaml.YAMLError as error:
        raise ValueError(f"{recipe}: not YAML: {error}") from error
    tables = sorted((path / "samples").glob("step-*.jsonl"), reverse=True)
    return Run(
        path=path,
        name=path.resolve().name,
        steps=steps,
        recipe=content if isinstance(content, dict) else {},
        evaluations=read_metrics(path / "evaluations.jsonl") if (path / "evaluations.jsonl").is_file() else [],
        starts=starts_summary(path),
        transport=transport.read_text(encoding="utf-8") if transport.is_file() else "",
        samples=next((rows for table in tables if (rows := read_lines(table))), []),
    )


def smooth(values: Sequence[float], over: int) -> list[float]:
    """Return the moving average over `over` values, over fewer at the start."""
    return [fmean(values[max(0, end - over) : end]) for end in range(1, len(values) + 1)]


def thin(steps: Sequence[float], values: Sequence[float], most: int) -> tuple[list[float], list[float]]:
    """Average neighbors where there are more than `most` points, and round to the digits that a screen shows."""
    count = min(most, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)] if count else [0]
    parts = list(zip(edges, edges[1:], strict=False))
    middles = [steps[a] if b - a == 1 else fmean(steps[a:b]) for a, b in parts]
    return middles, [float(f"{fmean(values[a:b]):.5g}") for a, b in parts]
