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
    """A Python function of yours."""
    target: Target
    """The function as `module:function`; it gets the completion's text and its Prompt and returns a number. Its name is in
    the metrics, as `reward/<function>`."""


class PatternRewardSection(RewardPart):
    kind: Literal["pattern"]
    """A regular expression: 1 where it is found in the completion, 0 elsewhere."""
    pattern: Annotated[str, Field(min_length=1)]
    """In Python's syntax. With a group `(?P<answer>...)` the last match must also hold the prompt's answer there."""

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
    """A JSON schema: 1 where the completion is a document that it allows, alone or in a fenced block, 0 elsewhere."""
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
    """Run the completion's Python code, its last fenced block or all of it, against the tests in the prompt's answer, in a
    sandbox: docs/data-and-rewards.md says what it keeps out. A completion that runs into a limit scores 0, and the metrics
    count which; where the sandbox itself fails, the sample is masked."""
    credit: Literal["all", "share"] = "all"
    """`all`: 1 where every test passes, else 0, and the first failure is the last test that runs. `share`: the share of the
    tests that pass."""
    timeout_s: Seconds = 5.0
    """Wall time of all tests of one completion together; a task of `phases.reward` must have room for it."""
    cpu_s: Positive = 5
    """Processor time of each process of a test, in seconds."""
    memory_mib: Positive = 512
    """Address space of each process of a test, and memory that all of them hold together, in MiB."""
    files_mib: Positive = 16
    """All files that a test writes, in MiB; they lie in memory, and are gone with it."""
    processes: Positive = 8
    """Processes and threads of a test, at a time."""
    output_kib: Positive = 256
    """What a test writes to standard output and standard error, in KiB."""


class HttpRewardSection(RewardPart):
    kind: Literal["http"]
    """A service of yours: it is sent prompts, completions and answers, and answers with a number for each.
    docs/data-and-rewards.md has the form of both. What it does not judge in time is masked and counted."""
    url: Annotated[str, Field(pattern=r"^https?://[^\s/@]+(/\S*)?$")]
    """Where to POST. Without a password: those travel in `headers_from_environment`."""
    headers_from_environment: dict[str, Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]] = {}
    """Headers by name, each with the NAME of the environment variable that holds its value, wherever reward workers run."""
    batch: Positive = 32
    """Completions of one request at most."""
    timeout_s: Seconds = 20.0
    """How long a request waits for the service to take it, or to go on answering; `phases.reward.timeout_s` ends all."""
    retries: Annotated[int, Field(ge=0, le=100)] = 3
    """How often a request is sent again, after longer and longer waits, where no connection was had, it broke, `timeout_s`
    passed, or the service said 429 or 5xx. A slow service is so given the same work more than once."""


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
    """What each part of a reward is called in the metrics, as `reward/<name>`; a repeated name gets its position added."""
    found: list[str] = []
    for position, part in enumerate(parts):
        name = part.target.rpartition(":")[2] if isinstance(part, FunctionRewardSection) else part.kind
        while name in found:
            name = f"{name}_{position}"
        found.append(name)
    return found


# A part's name stands behind `reward/` in a key of the metrics, where these names have other meanings.
METRIC_NAME = re.compile(r"[a-z0-9]\w*", re.ASCII | re.IGNORECASE)
OTHER_METRICS = frozenset(
    ("busy_s", "deviation", "environment", "greedy_mean", "mean", "model_mean", "num_greedy_masked", "num_masked",
     "num_timeouts", "num_workers", "overlong_masked", "overlong_penalty_mean", "sampled_mean",
     "num_zero_wall_time", "num_zero_memory", "num_zero_processes", "num_zero_crash", "num_zero_error",
     "num_masked_waiting", "num_masked_verifier", "num_masked_service", "num_masked_environment")
)  # fmt: skip
COUNTS = ("code", "http")  # kinds whose reasons are counted, as `reward/<name>_num_<reason>`


def reward_rules(recipe: Recipe) -> Violations:
    """Something gives rewards, and each function's name is free as the name of a metric."""
    if not recipe.reward and recipe.environment is None:
        rule = "must not be empty: without an environment nothing else gives rewards"
        yield Violation("reward", MISSING, rule, "[{kind: last_number}], or an environment")
    judges = [(number, part) for number, part in enumerate(recipe.reward) if part.kind != "model"]
    named = list(zip(judges, part_names([part for _, part in judges]), strict=True))
    counted = [f"{name}_num_" for (_, part), name in named if part.kind in COUNTS]
    for (number, part), name in named:
        if part.kind != "function":
            continue
        counts = [prefix for prefix in counted if name.startswith(prefix)]
        if not METRIC_NAME.fullmatch(name):
            rule = f"no metric can be called reward/{name}: letters are of ASCII, and the first is no underscore"
        elif name in OTHER_METRICS:
            rule = f"reward/{name} is a metric that a run has besides those of the reward's parts"
        elif counts:
            rule = f"reward/{counts[0]}... are counts of another part"
        else:
            continue
        module, _, function = part.target.partition(":")
        yield Violation(f"reward.{number}.target", part.target, rule, f"{module}:score, with score = {function} in {module}")
