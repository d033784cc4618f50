"""What can be written under `reward` in a recipe: its parts, of which the reward is the weighted sum."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.recipe.sections import Section


class VerifierSection(Section):
    kind: Literal["exact", "last_number", "math_verify"]
    """Named verifier; it scores 1 for a correct completion and 0 for any other."""
    weight: float = 1.0
    """Factor of this part in the reward."""


class FunctionRewardSection(Section):
    kind: Literal["function"]
    """A Python function of yours."""
    target: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
    """The function as `module:function`; it gets the completion's text and its Prompt and returns a number."""
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


class ModelRewardSection(Section):
    kind: Literal["model"]
    """The score that `reward_model` gives prompt and completion."""
    weight: float = 1.0
    """Factor of this part in the reward."""


JudgeSection = VerifierSection | PatternRewardSection | SchemaRewardSection | FunctionRewardSection
RewardSection = Annotated[JudgeSection | ModelRewardSection, Field(discriminator="kind")]
