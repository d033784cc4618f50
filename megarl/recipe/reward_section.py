"""`reward`: the parts of the reward, which is their weighted sum."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from megarl.recipe.section import Positive, Seconds, Section
from megarl.recipe.violation import MISSING, Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


class VerifierSection(Section):
    kind: Literal["exact", "last_number", "math_verify"]
    """Named verifier; it scores 1 for a correct completion and 0 for any other."""
    weight: float = 1.0
    """Factor of this part in the reward."""


class FunctionRewardSection(Section):
    kind: Literal["function"]
    """A Python function of yours."""
    target: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
    """The function as `module:function`; it gets the completion's text and its Prompt and returns a number. Its name is in
    the metrics, as `reward/<function>`."""
    weight: float = 1.0
    """Factor of this part in the reward."""


class PatternRewardSection(Section):
    kind: Literal["pattern"]
    """A regular expression: 1 where it is found in the completion, 0 elsewhere."""
    pattern: Annotated[str, Field(min_length=1)]
    """In Python's syntax. With a group `(?P<answer>...)` the last match must also hold the prompt's answer there."""
    weight: float = 1.0
    """Factor of this part in the reward."""


class SchemaRewardSection(Section):
    kind: Literal["json_schema"]
    """A JSON schema: 1 where the completion is a document that it allows, alone or in a fenced block, 0 elsewhere."""
    json_schema: dict[str, Any]
    """The schema, of draft 2020-12 unless its `$schema` says otherwise."""
    weight: float = 1.0
    """Factor of this part in the reward."""


class CodeRewardSection(Section):
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
    weight: float = 1.0
    """Factor of this part in the reward."""


class HttpRewardSection(Section):
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
    weight: float = 1.0
    """Factor of this part in the reward."""


class ModelRewardSection(Section):
    kind: Literal["model"]
    """The score that `reward_model` gives prompt and completion."""
    weight: float = 1.0
    """Factor of this part in the reward."""


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


# What may stand behind `reward/` in a key of the metrics, and what does for figures of no part.
NAME = re.compile(r"[a-z0-9]\w*", re.ASCII | re.IGNORECASE)


OWN_FIGURES = frozenset(
    ("busy_s", "deviation", "environment", "greedy_mean", "mean", "model_mean", "num_greedy_masked", "num_masked",
     "num_timeouts", "num_workers", "overlong_masked", "overlong_penalty_mean", "sampled_mean",
     "num_zero_wall_time", "num_zero_memory", "num_zero_processes", "num_zero_crash", "num_zero_error",
     "num_masked_waiting", "num_masked_verifier", "num_masked_service", "num_masked_environment")
)  # fmt: skip


COUNTS = ("code", "http")  # kinds whose reasons are counted, as `reward/<name>_num_<reason>`


def given(recipe: Recipe) -> Violations:
    """Something says how good a completion is."""
    if not recipe.reward and recipe.environment is None:
        rule = "must not be empty: without an environment nothing else gives rewards"
        yield Violation("reward", MISSING, rule, "[{kind: last_number}], or an environment")


def texts(recipe: Recipe) -> Violations:
    """A pattern is a regular expression, and a schema one of JSON."""
    for number, spec in enumerate(recipe.reward):
        if isinstance(spec, PatternRewardSection):
            try:
                re.compile(spec.pattern)
            except re.error as error:
                yield Violation(
                    f"reward.{number}.pattern", spec.pattern, f"no regular expression: {error}", "see Python's re"
                )
        if isinstance(spec, SchemaRewardSection):
            import jsonschema  # takes long, and few recipes have a schema

            try:
                jsonschema.validators.validator_for(spec.json_schema).check_schema(spec.json_schema)
            except jsonschema.SchemaError as error:
                where = "".join(f".{part}" for part in error.absolute_path)
                yield Violation(
                    f"reward.{number}.json_schema{where}", error.instance, error.message, "one of json-schema.org"
                )


def functions_have_figures(recipe: Recipe) -> Violations:
    """A function can be called anything, and its name is that of a figure, which must be one and nobody else's."""
    judges = [(number, part) for number, part in enumerate(recipe.reward) if part.kind != "model"]
    named = list(zip(judges, part_names([part for _, part in judges]), strict=True))
    counting = [f"{name}_num_" for (_, part), name in named if part.kind in COUNTS]
    for (number, part), name in named:
        if not isinstance(part, FunctionRewardSection):
            continue
        figure, counts = f"reward/{name}", [one for one in counting if name.startswith(one)]
        if not NAME.fullmatch(name):
            rule = f"no figure can be called {figure}: letters are of ASCII, and the first is no underscore"
        elif name in OWN_FIGURES:
            rule = f"{figure} is a figure that a run has besides those of the reward's parts"
        elif counts:
            rule = f"reward/{counts[0]}... are counts of another part"
        else:
            continue
        module, _, function = part.target.partition(":")
        yield Violation(f"reward.{number}.target", part.target, rule, f"{module}:score, with score = {function} in {module}")
