"""What can be written under `reward` in a recipe: its parts, of which the reward is the weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.recipe.sections import Positive, Seconds, Section


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
