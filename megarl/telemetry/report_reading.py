"""What a run directory holds for a report, read whole or half there."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from megarl.telemetry.mean_reward import mean_reward
from megarl.telemetry.metrics import read_metrics
from megarl.telemetry.starts import starts_summary
from megarl.telemetry.trace import RankSteps, read_ranks

RECENT = 10  # steps that say how a run does now
LAST_STEPS = 3  # of the timeline
MOST_RANKS = 16  # in the timeline


@dataclass(frozen=True)
class Run:
    """`steps` are the lines of metrics.jsonl, `evaluations` those on held-out prompts; `ranks` the last steps of the first
    ranks with a trace, of `num_traced`."""

    path: Path
    name: str
    steps: list[dict[str, Any]]
    recipe: dict[str, Any] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[RankSteps] = field(default_factory=list)
    num_traced: int = 0

    @cached_property
    def keys(self) -> list[str]:
        """Every figure that some step has, in the order in which they come up."""
        return list(dict.fromkeys(key for line in self.steps for key in line if key != "step"))

    @property
    def planned_steps(self) -> int:
        """How many the recipe asks for; those that were made, where there is no recipe."""
        return int(self.at("run.steps") or self.steps[-1]["step"])

    @property
    def sequences(self) -> int | None:
        """Completions of a step's batch; None where no recipe says it."""
        prompts, size = self.at("phases.rollout.prompts"), self.at("algorithm.group_size")
        return None if prompts is None or size is None else int(prompts) * int(size)

    def sampled(self) -> dict[int, int] | None:
        """Completions that were sampled by the end of each step, by its number: those of its batch, and under
        `algorithm.dynamic_sampling` those of the rounds behind the first. None where no recipe says how many."""
        sequences, size = self.sequences, self.at("algorithm.group_size")
        if sequences is None or size is None:
            return None
        extra, sampled = 0, {}
        for line in self.steps:
            if _is_number(line.get("rollout/extra_prompts")):
                extra += int(line["rollout/extra_prompts"]) * int(size)
            sampled[line["step"]] = line["step"] * sequences + extra
        return sampled

    def at(self, key: str) -> Any:
        """A value of the resolved recipe by its dotted key; None where it has none."""
        content: Any = self.recipe
        for part in key.split("."):
            content = content.get(part) if isinstance(content, dict) else None
        return content

    def points(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a figure, where it is a number."""
        pairs = [(line["step"], line[key]) for line in self.steps if _is_number(line.get(key))]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def rewards(self) -> tuple[list[int], list[float]]:
        """Steps and mean rewards of what they sampled, where they are numbers."""
        pairs = [(line["step"], mean_reward(line)) for line in self.steps]
        known = [(step, reward) for step, reward in pairs if _is_number(reward)]
        return [step for step, _ in known], [reward for _, reward in known]

    def nulls(self, key: str) -> list[int]:
        """Steps in which a figure was no finite number."""
        return [line["step"] for line in self.steps if key in line and line[key] is None]

    def recent(self) -> dict[str, float]:
        """Figures as means over the last steps. The first step of a run, which warms up, counts only where there are few."""
        lines = (self.steps[1:] if len(self.steps) > 3 else self.steps)[-RECENT:]
        keys = dict.fromkeys(key for line in lines for key in line if key != "step")
        found = {key: [line[key] for line in lines if _is_number(line.get(key))] for key in keys}
        return {key: fmean(values) for key, values in found.items() if values}


def read_run(path: str | Path) -> Run:
    """Raises ValueError where the run has made no step yet, or its metrics cannot be read."""
    path = Path(path)
    steps = read_metrics(path / "metrics.jsonl")
    if not steps:
        raise ValueError(f"{path / 'metrics.jsonl'} has no step yet; a run has one after its first step")
    ranks, num_traced = read_ranks(path, LAST_STEPS, MOST_RANKS)
    return Run(
        path=path,
        name=path.resolve().name,
        steps=steps,
        recipe=_recipe(path / "recipe.yaml"),
        evaluations=read_metrics(path / "evaluations.jsonl") if (path / "evaluations.jsonl").is_file() else [],
        starts=starts_summary(path),
        samples=_samples(path / "samples"),
        ranks=ranks,
        num_traced=num_traced,
    )


def _recipe(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {error}") from error
    return content if isinstance(content, dict) else {}


def _samples(folder: Path) -> list[dict[str, Any]]:
    """The samples of the last step that has any; lines cut short by a kill are left out."""
    for path in sorted(folder.glob("step-*.jsonl"), reverse=True):
        found = [line for text in path.read_text(encoding="utf-8").split("\n") if (line := _object(text))]
        if found:
            return found
    return []


def _object(text: str) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def smooth(values: Sequence[float], over: int) -> list[float]:
    """The mean of each value and the `over` - 1 before it; of as many as there are, at the start."""
    means, total = [], 0.0
    for index, value in enumerate(values):
        total += value - (values[index - over] if index >= over else 0.0)
        means.append(total / min(index + 1, over))
    return means
