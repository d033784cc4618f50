"""The lengths that a step is planned for: drawn from a distribution, read from a file, or drawn like an earlier run's.

- A distribution gives completion lengths in 1 ... `rollout.max_new_tokens`. Each group gets one prompt length, uniform
  from half of `data.max_prompt_tokens` to all of it: that key is set with a look at the data, so prompts come near it.
- A file has one sequence a row: LENGTH, or PROMPT COMPLETION, or a JSON object with `prompt_tokens` and
  `completion_tokens`. A row with one number is a whole sequence; its prompt is the share that the prompt has of the longest
  legal sequence. If the file has not one row for each sequence of the step, rows are drawn with replacement.
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

from megarl.planner.memory_estimate import BatchLimits

# The quantiles of a step's completion lengths in `metrics.jsonl`, in per cent.
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
    """Lengths of one step from a distribution's name, a file or a run directory.

    Raises LengthsError naming `--lengths`, its value and what is wrong; for a file also the row.
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
    if path.is_file():
        return _from_file(path, limits, seed)
    choices = ", ".join(DISTRIBUTIONS)
    raise LengthsError(
        f"--lengths = {source!r}: no such file or directory; one of {choices}, a file of lengths, or a run directory"
    )


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

    keys = [f"rollout/completion_length_p{percent:02d}" for percent in QUANTILES]
    means = [mean(key, limits.max_completion, "rollout.max_new_tokens") for key in keys]
    prompt = max(1, round(mean("rollout/prompt_length_mean", limits.max_prompt, "data.max_prompt_tokens")))
    generator, completions = random.Random(f"{seed}/completions"), []
    for _ in range(limits.num_sequences):
        percent = 100 * generator.random()
        above = min(bisect_right(QUANTILES, percent), len(QUANTILES) - 1)
        low, high = QUANTILES[above - 1], QUANTILES[above]
        length = means[above - 1] + (means[above] - means[above - 1]) * (percent - low) / (high - low)
        completions.append(max(1, round(length)))
    origin = f"completions drawn by the quantiles of {len(steps)} steps of {directory}, seed {seed}"
    return Lengths((prompt,) * limits.num_sequences, tuple(completions), origin)


def _from_file(path: Path, limits: BatchLimits, seed: int) -> Lengths:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        raise LengthsError(f"--lengths = {str(path)!r}: is no UTF-8 text: {error.reason} at byte {error.start}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append(_row(line.strip(), f"--lengths = {str(path)!r}, row {number}", limits))
    if not rows:
        raise LengthsError(f"--lengths = {str(path)!r}: the file has no row")
    origin = f"{len(rows)} rows of {path}"
    if len(rows) != limits.num_sequences:
        generator = random.Random(f"{seed}/rows")
        rows = [generator.choice(rows) for _ in range(limits.num_sequences)]
        origin += f", {limits.num_sequences} drawn with replacement, seed {seed}"
    return Lengths(tuple(prompt for prompt, _ in rows), tuple(completion for _, completion in rows), origin)


def _row(line: str, where: str, limits: BatchLimits) -> tuple[int, int]:
    """(prompt, completion) of one line. Raises LengthsError where the recipe does not allow the row."""
    try:
        if line.startswith("{"):
            fields = json.loads(line)
            numbers = [fields.get("prompt_tokens"), fields.get("completion_tokens")]
        else:
            numbers = [int(word) for word in line.replace(",", " ").split()]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or any(type(number) is not int for number in numbers):
        raise LengthsError(
            f"{where}: {line!r} is no length; give LENGTH, or PROMPT and COMPLETION, in whole tokens, or "
            '{"prompt_tokens": ..., "completion_tokens": ...}'
        )
    prompt = numbers[0] if len(numbers) == 2 else max(1, numbers[0] * limits.max_prompt // limits.longest)
    completion = numbers[1] if len(numbers) == 2 else numbers[0] - prompt
    total = prompt + completion
    if prompt < 1 or completion < 1:
        raise LengthsError(f"{where}: {total} tokens; a sequence has at least one prompt token and one completion token")
    if total > limits.longest:
        raise LengthsError(
            f"{where}: {total} tokens, above data.max_prompt_tokens {limits.max_prompt} + "
            f"rollout.max_new_tokens {limits.max_completion} = {limits.longest}"
        )
    if prompt > limits.max_prompt:
        raise LengthsError(f"{where}: a prompt of {prompt} tokens, above data.max_prompt_tokens = {limits.max_prompt}")
    if completion > limits.max_completion:
        limit = f"rollout.max_new_tokens = {limits.max_completion}"
        raise LengthsError(f"{where}: a completion of {completion} tokens, above {limit}")
    return prompt, completion


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
