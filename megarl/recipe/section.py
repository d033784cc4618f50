"""The base of every recipe section, and the types that fields of several sections share."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=86400)]
Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0)]
Above = Annotated[float, Field(gt=0)]
Below = Annotated[float, Field(gt=0, lt=1)]
# A name that the recipe gives; it becomes a part of keys and metrics.
Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]
# A function or class of a user's own module.
Target = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]


def expand_path(path: str) -> str:
    """Replace a leading `~` and environment variables, as a shell does. Raises ValueError for unknown ones."""
    expanded = os.path.expandvars(os.path.expanduser(path))
    if expanded.startswith("~"):
        raise ValueError(
            f"no user {path.partition('/')[0][1:]!r} is known here, and HOME is not set; write ./~ for a file named ~"
        )
    if (unset := re.search(r"\$(?:\w+|\{[^}]*\})", expanded)) is not None:
        raise ValueError(f"the environment variable {unset[0].strip('${}')} is not set")
    return expanded


def broken_rule(rule: str, nearest: str) -> PydanticCustomError:
    """Make the error for a value that breaks a rule, with the nearest legal value."""
    return PydanticCustomError("broken_rule", "{rule}", {"rule": rule, "nearest": nearest})


FilePath = Annotated[str, Field(min_length=1), AfterValidator(expand_path)]


def refuse_repeats(words: tuple[str, ...]) -> tuple[str, ...]:
    """Validate a list whose entries must differ."""
    if len(set(words)) < len(words):
        raise broken_rule("names an entry twice", f"[{', '.join(dict.fromkeys(words))}]")
    return words


# Each broken rule as its field ("" for the section as a whole), the rule, and the nearest legal value.
BrokenRules = Iterator[tuple[str, str, str]]


class Section(BaseModel):
    """Base of every section: frozen, strict, no unknown keys, no infinities.

    A rule of one field is in the field's type, or in a validator under the field. Rules of several fields are under all
    fields, in `broken_rules`, and wait until each field is legal by itself.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def broken_rules(self) -> BrokenRules:
        """Yield the rules of several fields that the section breaks."""
        yield from ()

    @model_validator(mode="after")
    def _breaks_no_rule(self) -> Self:
        faults = []
        for field, rule, nearest in self.broken_rules():
            given = self.model_dump(mode="json", exclude_unset=True)
            value, loc = (given.get(field, getattr(self, field)), (field,)) if field else (given, ())
            faults.append(InitErrorDetails(type=broken_rule(rule, nearest), loc=loc, input=value))
        if faults:
            raise ValidationError.from_exception_data(type(self).__name__, faults)
        return self
