"""Which lengths a step is planned for: drawn from a distribution, read from a file, or drawn like an earlier run's.

- A distribution gives completion lengths in 1 ... `rollout.max_new_tokens`. Each group gets one prompt length, uniform
  from half of `data.max_prompt_tokens` to all of it: that key is set with a look at the data, so prompts come near it.
- A file gives one sequence a row. A row of one number is a whole sequence; its prompt is the share that the prompt has
  of the longest legal sequence. With other than one row a sequence of the step, rows are drawn with replacement.
- A run directory gives the quantiles of completion lengths, as their mean over steps; lengths are drawn by inverse
  interpolation between them. Every prompt has the run's mean length.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.planner.memory import BatchLimits

# What `metrics.jsonl` says of a step's completion lengths, in per cent.
QUANTILES = (0, 10, 25, 50, 75, 90, 99, 100)


# Reads the steps of a run's metrics.jsonl; raises ValueError where there are none. The caller hands it over: `telemetry`,
# which has it, is above the planner.
ReadMetrics = Callable[[Path], list[dict[str, Any]]]


class LengthsError(ValueError):
    """`--lengths` are none, or none that the recipe allows."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of each sequence of one step, in batch order; `origin` says where they came from."""

    prompts: tuple[int, ...]
    completions: tuple[int, ...]
    origin: str

    @property
    def totals(self) -> tuple[int, ...]:
        return tuple(prompt + completion for prompt, completion in zip(self.prompts, self.completions, strict=True))


def find_lengths(source: str, limits: BatchLimits, seed: int, read_metrics: ReadMetrics | None = None) -> Lengths:
    """Lengths of one step from a distribution's name, a file or a run directory.

    Raises LengthsError naming `--lengths`, its value and what is wrong; for a file also the row.
    """
    if source in DISTRIBUTIONS:
        return _from_distribution(source, limits, seed)
    path = Path(source)
    if source and path.is_dir():  # the path of nothing is the working directory
        assert read_metrics is not None, "lengths of a run need a reader of metrics"
        return _from_run(path, limits, seed, read_metrics)
    if path.is_file():
        return _from_file(path, limits, seed)
    choices = ", ".join(DISTRIBUTIONS)
    raise LengthsError(
        f"--lengths = {source!r}: no such file or directory; one of {choices}, a file of lengths, or a run directory"
    )


def _from_distribution(kind: str, limits: BatchLimits, seed: int) -> Lengths:
    completions = draw(kind, limits.num_sequences, limits.max_completion, seed)
    chance = random.Random(f"{seed}/prompts")
    prompts: list[int] = []
    for _ in range(limits.num_sequences // limits.group_size):
        prompts += [chance.randint(-(-limits.max_prompt // 2), limits.max_prompt)] * limits.group_size
    return Lengths(
        tuple(prompts), tuple(completions), f"{kind} completions up to {limits.max_completion} tokens, seed {seed}"
    )


def _from_run(directory: Path, limits: BatchLimits, seed: int, read_metrics: ReadMetrics) -> Lengths:
    where = f"--lengths = {str(directory)!r}"
    try:
        steps = read_metrics(directory / "metrics.jsonl")
    except ValueError as error:
        raise LengthsError(f"{where}: {error}") from error
    keys = [f"rollout/completion_length_p{percent:02d}" for percent in QUANTILES]
    means = [_mean_over_steps(steps, key, where) for key in keys]
    prompt = round(_mean_over_steps(steps, "rollout/prompt_length_mean", where))
    for found, limit, name, key in (
        (means[-1], limits.max_completion, keys[-1], "rollout.max_new_tokens"),
        (prompt, limits.max_prompt, "rollout/prompt_length_mean", "data.max_prompt_tokens"),
    ):
        if found > limit:
            raise LengthsError(f"{where}: the run's {name} is {found:.0f} on average, above {key} = {limit}")
    chance = random.Random(f"{seed}/completions")
    completions = [max(1, round(_interpolate(means, chance.random()))) for _ in range(limits.num_sequences)]
    return Lengths(
        (max(1, prompt),) * limits.num_sequences,
        tuple(completions),
        f"completions drawn by the quantiles of {len(steps)} steps of {directory}, seed {seed}",
    )


def _mean_over_steps(steps: list[dict[str, Any]], key: str, where: str) -> float:
    found = [step[key] for step in steps if isinstance(step.get(key), int | float)]
    if not found:
        raise LengthsError(f"{where}: no step in metrics.jsonl has {key}")
    return float(sum(found) / len(found))


def _interpolate(values: list[float], share: float) -> float:
    """The value at `share` (0 ... 1) of a distribution that has `values` at QUANTILES."""
    percent = 100 * share
    above = min(bisect_right(QUANTILES, percent), len(QUANTILES) - 1)
    low, high = QUANTILES[above - 1], QUANTILES[above]
    return values[above - 1] + (values[above] - values[above - 1]) * (percent - low) / (high - low)


def _from_file(path: Path, limits: BatchLimits, seed: int) -> Lengths:
    rows = [_checked(pair, row, path, limits) for row, pair in _read_rows(path, limits)]
    if not rows:
        raise LengthsError(f"--lengths = {str(path)!r}: the file has no row")
    origin = f"{len(rows)} rows of {path}"
    if len(rows) != limits.num_sequences:
        chance = random.Random(f"{seed}/rows")
        rows = [chance.choice(rows) for _ in range(limits.num_sequences)]
        origin += f", {limits.num_sequences} drawn with replacement, seed {seed}"
    return Lengths(tuple(prompt for prompt, _ in rows), tuple(completion for _, completion in rows), origin)


def _read_rows(path: Path, limits: BatchLimits) -> list[tuple[int, tuple[int, int]]]:
    """(row, (prompt, completion)) of each row; rows count from 1, lines of a text as items of a JSON list."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        raise LengthsError(f"--lengths = {str(path)!r}: is no UTF-8 text: {error.reason} at byte {error.start}") from error
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except json.JSONDecodeError as error:
            raise LengthsError(f"--lengths = {str(path)!r}: starts like a JSON list and is none: {error}") from error
        return [(row, _pair(item, row, path, limits)) for row, item in enumerate(items, start=1)]
    lines = [(row, line.strip()) for row, line in enumerate(text.splitlines(), start=1)]
    return [(row, _pair(_item(line, row, path), row, path, limits)) for row, line in lines if line]


def _item(line: str, row: int, path: Path) -> Any:
    """A line's numbers, or its JSON object."""
    try:
        return json.loads(line) if line.startswith("{") else [int(word) for word in line.replace(",", " ").split()]
    except ValueError:
        raise _row_error(path, row, line) from None


def _pair(item: Any, row: int, path: Path, limits: BatchLimits) -> tuple[int, int]:
    """(prompt, completion) of one row of any form."""
    numbers = item
    if isinstance(item, dict):
        pair = [item.get("prompt_tokens"), item.get("completion_tokens")]
        numbers = [item.get("length")] if pair == [None, None] else pair
    elif not isinstance(item, list):
        numbers = [item]
    # A bool is an int to Python; JSON's true is no length.
    if len(numbers) not in (1, 2) or any(type(number) is not int for number in numbers):
        raise _row_error(path, row, item)
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    prompt = max(1, numbers[0] * limits.max_prompt // limits.longest)
    return prompt, numbers[0] - prompt


def _row_error(path: Path, row: int, value: Any) -> LengthsError:
    return LengthsError(
        f"--lengths = {str(path)!r}, row {row}: {value!r} is no length; give LENGTH, or PROMPT and COMPLETION, in whole "
        'tokens, or {"length": ...}, or {"prompt_tokens": ..., "completion_tokens": ...}'
    )


def _checked(pair: tuple[int, int], row: int, path: Path, limits: BatchLimits) -> tuple[int, int]:
    """The row if the recipe allows it."""
    prompt, completion = pair
    where = f"--lengths = {str(path)!r}, row {row}"
    if prompt < 1 or completion < 1:
        raise LengthsError(
            f"{where}: {prompt + completion} tokens; a sequence has at least one prompt token and one completion token"
        )
    if prompt + completion > limits.longest:
        raise LengthsError(
            f"{where}: {prompt + completion} tokens, above data.max_prompt_tokens {limits.max_prompt} + "
            f"rollout.max_new_tokens {limits.max_completion} = {limits.longest}"
        )
    for found, limit, name, key in (
        (prompt, limits.max_prompt, "prompt", "data.max_prompt_tokens"),
        (completion, limits.max_completion, "completion", "rollout.max_new_tokens"),
    ):
        if found > limit:
            raise LengthsError(f"{where}: a {name} of {found} tokens, above {key} = {limit}")
    return pair


DISTRIBUTIONS = ("uniform", "log-normal", "long-tail")

# Median and spread as shares of the longest length; completions of reasoning models look like the second and third.
_LOG_NORMAL_MEDIAN, _LOG_NORMAL_SIGMA = 1 / 6, 0.7
_LONG_TAIL_SHORTEST, _LONG_TAIL_EXPONENT = 1 / 32, 1.2


def draw(kind: str, count: int, longest: int, seed: int) -> list[int]:
    """`count` lengths in 1..longest, the same for the same arguments.

    `uniform`: every length alike. `log-normal`: median a sixth of `longest`, sigma 0.7. `long-tail`: a Pareto law with
    exponent 1.2 that starts at 1/32 of `longest`. A draw above `longest` becomes `longest`, as a completion that meets
    its limit is cut there. Raises ValueError for another `kind` and for sizes below 1.
    """
    if kind not in DISTRIBUTIONS:
        raise ValueError(f"length distribution {kind!r} is not one of {', '.join(DISTRIBUTIONS)}")
    if count < 1 or longest < 1:
        raise ValueError(f"{count} lengths up to {longest} tokens: both numbers must be at least 1")
    generator = random.Random(f"{kind}/{seed}")
    if kind == "uniform":
        return [generator.randint(1, longest) for _ in range(count)]
    if kind == "log-normal":
        shares = (_LOG_NORMAL_MEDIAN * generator.lognormvariate(0.0, _LOG_NORMAL_SIGMA) for _ in range(count))
    else:
        shares = (_LONG_TAIL_SHORTEST * generator.paretovariate(_LONG_TAIL_EXPONENT) for _ in range(count))
    return [max(1, min(longest, round(share * longest))) for share in shares]
