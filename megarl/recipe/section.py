"""The base of every recipe section, and the types that fields of several sections share."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]


Count = Annotated[int, Field(ge=0)]


Seconds = Annotated[float, Field(gt=0, le=86400)]


Share = Annotated[float, Field(ge=0, le=1)]


Weight = Annotated[float, Field(ge=0)]


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


FilePath = Annotated[str, Field(min_length=1), AfterValidator(expand_path)]


class UnknownField(LookupError):
    """A field without a legal value was read; only a recipe with violations has such fields (see `load.py`)."""


class Section(BaseModel):
    """Base of every section: frozen, strict, no unknown keys, no infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def __getattr__(self, name: str) -> Any:
        # Reached only when the instance has no such attribute. Not an AttributeError, which a property would swallow.
        if name in type(self).model_fields:
            raise UnknownField(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


Above = Annotated[float, Field(gt=0)]


Below = Annotated[float, Field(gt=0, lt=1)]


# A function of a user's own module.
Target = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
