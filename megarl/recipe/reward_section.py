"""`reward`: the parts of the reward, which is their weighted sum."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from megarl.recipe.section import Positive, Seconds, Section, Target, broken_rule
from megarl.recipe.violation import MISSING, Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


class RewardPart(Section):
    weight: float = 1.0
    """Factor of this part in the reward."""


class VerifierSection(RewardPart):
    kind: Literal["exact", "last_number", "math_verify"]
    """Named verifier; it scores 1 for a correct completion and 0 for any other."""


class FunctionRewardSection(RewardPart):
    kind: Literal["function"]
    """Your Python function."""
    target: Target
    """The function as `module:function`: takes the completion's text and its Prompt, returns a number. Its metric is
    `reward/<function>`."""


class PatternRewardSection(RewardPart):
    kind: Literal["pattern"]
    """A regular expression: 1 if it matches in the completion, else 0."""
    pattern: Annotated[str, Field(min_length=1)]
    """In Python's syntax. A group `(?P<answer>...)` of the last match must equal the prompt's answer."""

    @field_validator("pattern")
    @classmethod
    def _is_a_regular_expression(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise broken_rule(f"no regular expression: {error}", "see Python's re") from error
        return pattern


class SchemaRewardSection(RewardPart):
    kind: Literal["json_schema"]
    """A JSON schema: 1 if the completion, or its fenced block, is a valid document, else 0."""
    json_schema: dict[str, Any]
    """The schema, of draft 2020-12 unless its `$schema` says otherwise."""

    @field_validator("json_schema")
    @classmethod
    def _is_a_json_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        import jsonschema  # takes long, and few recipes have a schema

        try:
            jsonschema.validators.validator_for(schema).check_schema(schema)
        except jsonschema.SchemaError as error:
            place = ".".join(map(str, error.absolute_path))
            raise broken_rule(f"{place}: {error.message}", "one of json-schema.org") from error
        return schema


class CodeRewardSection(RewardPart):
    kind: Literal["code"]
    """Run the completion's Python code, its last fenced block or all of it, against the tests in the prompt's answer, in the
    sandbox of docs/data-and-rewards.md. A completion that meets a limit scores 0, and metrics count the limit; if the
    sandbox fails, the sample is masked."""
    credit: Literal["all", "share"] = "all"
    """`all`: 1 if every test passes, else 0, and the first failure ends the tests. `share`: the share of tests that pass."""
    timeout_s: Seconds = 5.0
    """Wall time of all tests of one completion; `phases.reward.timeout_s` must have room for it."""
    cpu_s: Positive = 5
    """Processor time of each process of a test, in seconds."""
    memory_mib: Positive = 512
    """Address space of each process of a test, and memory of all of them together, in MiB."""
    files_mib: Positive = 16
    """All files that a test writes, in MiB; they lie in memory and end with the test."""
    processes: Positive = 8
    """Processes and threads of a test at a time."""
    output_kib: Positive = 256
    """What a test writes to standard output and standard error, in KiB."""


class HttpRewardSection(RewardPart):
    kind: Literal["http"]
    """Your service: gets prompts, completions and answers, returns a number for each (docs/data-and-rewards.md). Completions
    that it does not score in time are masked and counted."""
    url: Annotated[str, Field(pattern=r"^https?://[^\s/@]+(/\S*)?$")]
    """Where to POST. Passwords belong in `headers_from_environment`."""
    headers_from_environment: dict[str, Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]] = {}
    """Headers, each with the NAME of the environment variable that holds its value where reward workers run."""
    batch: Positive = 32
    """Most completions of one request."""
    timeout_s: Seconds = 20.0
    """Timeout of connecting and of each read; `phases.reward.timeout_s` ends the whole task."""
    retries: Annotated[int, Field(ge=0, le=100)] = 3
    """Retries, with growing waits, after a failed or broken connection, `timeout_s`, 429 or 5xx. A slow service may get the
    same work more than once."""


class ModelRewardSection(RewardPart):
    kind: Literal["model"]
    """The score that `reward_model` gives prompt and completion."""


JudgeSection = (
    VerifierSection
    | PatternRewardSection
    | SchemaRewardSection
    | FunctionRewardSection
    | CodeRewardSection
    | HttpRewardSection
)


RewardSection = Annotated[JudgeSection | ModelRewardSection, Field(discriminator="kind")]


def part_names(parts: Sequence[JudgeSection]) -> list[str]:
    """The metric name of each part, as in `reward/<name>`; a repeated name gets its position added."""
    names: list[str] = []
    for position, part in enumerate(parts):
        name = part.target.rpartition(":")[2] if isinstance(part, FunctionRewardSection) else part.kind
        while name in names:
            name = f"{name}_{position}"
        names.append(name)
    return names


# Names of parts become metrics `reward/<name>`; these names have other meanings there.
METRIC_NAME = re.compile(r"[a-z0-9]\w*", re.ASCII | re.IGNORECASE)
OTHER_METRICS = frozenset(
    ("busy_s", "deviation", "environment", "greedy_mean", "mean", "model_mean", "num_greedy_masked", "num_masked",
     "num_timeouts", "num_workers", "overlong_masked", "overlong_penalty_mean", "sampled_mean",
     "num_zero_wall_time", "num_zero_memory", "num_zero_processes", "num_zero_crash", "num_zero_error",
     "num_masked_waiting", "num_masked_verifier", "num_masked_service", "num_masked_environment")
)  # fmt: skip
COUNTS = ("code", "http")  # kinds whose reasons are counted, as `reward/<name>_num_<reason>`


def reward_rules(recipe: Recipe) -> Violations:
    """Recipes without rewards, and functions whose name is taken by another metric."""
    is_needed = recipe.environment is None and not recipe.run.is_supervised and recipe.algorithm.advantage != "none"
    if not recipe.reward and is_needed:
        rule = "must not be empty: without an environment nothing else gives rewards"
        yield Violation("reward", MISSING, rule, "[{kind: last_number}], algorithm.advantage: none, or an environment")
    judges = [(number, part) for number, part in enumerate(recipe.reward) if part.kind != "model"]
    named = list(zip(judges, part_names([part for _, part in judges]), strict=True))
    counted = [f"{name}_num_" for (_, part), name in named if part.kind in COUNTS]
    for (number, part), name in named:
        if part.kind != "function":
            continue
        is_counted = any(name.startswith(prefix) for prefix in counted)
        if METRIC_NAME.fullmatch(name) and name not in OTHER_METRICS and not is_counted:
            continue
        rule = f"reward/{name} is no name for its metric: another metric has it, or letters are not of ASCII"
        module, _, function = part.target.partition(":")
        yield Violation(f"reward.{number}.target", part.target, rule, f"{module}:score, with score = {function} in {module}")
