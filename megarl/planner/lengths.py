"""The lengths that a step is planned for: drawn from a distribution, or like an earlier run's.

- A distribution gives completion lengths in 1 ... `rollout.max_new_tokens`. Each group gets one prompt length, uniform
  from half of `data.max_prompt_tokens` to all of it: that key is set with a look at the data, so prompts come near it.
- A run directory gives the quantiles of completion lengths, as their mean over steps; lengths are drawn by inverse
  interpolation between them. Every prompt has the run's mean length.
- A run directory of `run.kind: sft`, `dpo` or `reward_model` gives those of whole sequences, for a recipe of such a kind,
  whose prompts have one token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.planner.memory_estimate import BatchLimits

# The quantiles of a step's lengths in `metrics.jsonl`, in per cent.
QUANTILES = (0, 10, 25, 50, 75, 90, 99, 100)
DISTRIBUTIONS = ("uniform", "log-normal", "long-tail")
# Median and spread as shares of the longest length; completions of reasoning models look like the second and third.
_LOG_NORMAL_MEDIAN, _LOG_NORMAL_SIGMA = 1 / 6, 0.7
_LONG_TAIL_SHORTEST, _LONG_TAIL_EXPONENT = 1 / 32, 1.2

# Reads the steps of a run's metrics.jsonl and raises ValueError without steps. `telemetry` has the reader, which is on a
# higher floor than the planner, so the caller passes it.
ReadMetrics = Callable[[Path], list[dict[str, Any]]]


class LengthsError(ValueError):
    """`--lengths` cannot be read, or has lengths that the recipe does not allow."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of each sequence of one step, in batch order; `origin` says where they come from."""

    prompts: tuple[int, ...]
    completions: tuple[int, ...]
    origin: str

    @property
    def totals(self) -> tuple[int, ...]:
        return tuple(prompt + completion for prompt, completion in zip(self.prompts, self.completions, strict=True))


def find_lengths(source: str, limits: BatchLimits, seed: int, read_metrics: ReadMetrics | None = None) -> Lengths:
    """Lengths of one step from a distribution's name or a run directory.

    Raises LengthsError naming `--lengths`, its value and what is wrong.
    """
    path = Path(source)
    if source in DISTRIBUTIONS:
        completions = draw(source, limits.num_sequences, limits.max_completion, seed)
        generator = random.Random(f"{seed}/prompts")
        prompts: list[int] = []
        for _ in range(limits.num_sequences // limits.group_size):
            prompts += [generator.randint(-(-limits.max_prompt // 2), limits.max_prompt)] * limits.group_size
        origin = f"{source} completions up to {limits.max_completion} tokens, seed {seed}"
        return Lengths(tuple(prompts), tuple(completions), origin)
    if source and path.is_dir():  # an empty path is the working directory
        assert read_metrics is not None, "lengths of a run need a reader of metrics"
        return _from_run(path, limits, seed, read_metrics)
    choices = ", ".join(DISTRIBUTIONS)
    raise LengthsError(f"--lengths = {source!r}: is neither a run directory nor one of {choices}")


def _from_run(directory: Path, limits: BatchLimits, seed: int, read_metrics: ReadMetrics) -> Lengths:
    where = f"--lengths = {str(directory)!r}"
    try:
        steps = read_metrics(directory / "metrics.jsonl")
    except ValueError as error:
        raise LengthsError(f"{where}: {error}") from error

    def mean(key: str, limit: int, limit_key: str) -> float:
        values = [step[key] for step in steps if isinstance(step.get(key), int | float)]
        if not values:
            raise LengthsError(f"{where}: no step in metrics.jsonl has {key}")
        value = float(sum(values) / len(values))
        if value > limit:
            raise LengthsError(f"{where}: the run's {key} is {value:.0f} on average, above {limit_key} = {limit}")
        return value

    whole = any("data/length_p00" in step for step in steps)
    if whole != (limits.max_prompt <= 1):
        lacks, needed = ("prompts and completions", "rl") if whole else ("whole sequences", "sft, dpo or reward_model")
        raise LengthsError(f"{where}: its steps have no lengths of {lacks}; give a run of run.kind: {needed}")
    if whole:
        means = [mean(f"data/length_p{percent:02d}", limits.longest, "data.max_tokens") - 1 for percent in QUANTILES]
        prompt = 1
    else:
        keys = [f"rollout/completion_length_p{percent:02d}" for percent in QUANTILES]
        means = [mean(key, limits.max_completion, "rollout.max_new_tokens") for key in keys]
        prompt = max(1, round(mean("rollout/prompt_length_mean", limits.max_prompt, "data.max_prompt_tokens")))
    import numpy as np  # `megarl check` without lengths of a run starts without it

    generator, completions = random.Random(f"{seed}/completions"), []
    for _ in range(limits.num_sequences):
        completions.append(max(1, round(float(np.interp(100 * generator.random(), QUANTILES, means)))))
    kind = "sequences" if whole else "completions"
    origin = f"{kind} drawn by the quantiles of {len(steps)} steps of {directory}, seed {seed}"
    return Lengths((prompt,) * limits.num_sequences, tuple(completions), origin)


def draw(kind: str, count: int, longest: int, seed: int) -> list[int]:
    """`count` lengths in 1..longest, the same for the same arguments.

    `uniform`: every length alike. `log-normal`: median a sixth of `longest`, sigma 0.7. `long-tail`: a Pareto law with
    exponent 1.2 that starts at 1/32 of `longest`. A draw above `longest` becomes `longest`, as a completion that meets
    its limit is cut there.
    """
    generator = random.Random(f"{kind}/{seed}")
    if kind == "uniform":
        return [generator.randint(1, longest) for _ in range(count)]
    if kind == "log-normal":
        shares = (_LOG_NORMAL_MEDIAN * generator.lognormvariate(0.0, _LOG_NORMAL_SIGMA) for _ in range(count))
    else:
        shares = (_LONG_TAIL_SHORTEST * generator.paretovariate(_LONG_TAIL_EXPONENT) for _ in range(count))
    return [max(1, min(longest, round(share * longest))) for share in shares]
