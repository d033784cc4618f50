"""The rule a single value breaks, in words, and the nearest legal value."""

from __future__ import annotations

import difflib
import math
import re
import typing
from collections.abc import Callable, Iterable
from typing import Any

from pydantic.fields import FieldInfo

TYPE_WORDS = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
    "finite_number": "must be a finite number",
}
# How far from a wrong number a legal one is looked for; sizes in a recipe may be huge.
SEARCH = 10_000
BOUND_WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def closest_text(value: Any, options: Iterable[Any]) -> str:
    """The option that looks most like the value; the first where none does."""
    options = [str(option) for option in options]
    return (difflib.get_close_matches(str(value).lower(), options, 1, 0.4) or options[:1] or [""])[0]


def closest_number(value: int, legal: Callable[[int], bool], high: int) -> str:
    """The legal number in 1 ... `high` nearest to the value, the smaller of two; '' where none is near."""
    start = min(max(value, 1), high)
    for distance in range(min(high, SEARCH) + 1):
        for candidate in (start - distance, start + distance):
            if 1 <= candidate <= high and legal(candidate):
                return str(candidate)
    return ""


def way_out(detail: dict[str, Any], value: Any, field: FieldInfo | None) -> tuple[str, str]:
    """Rule and nearest legal value for one of pydantic's error details."""
    kind, context = detail["type"], detail.get("ctx", {})
    options = _options(field.annotation) if field else []
    if kind == "missing":
        about = f": {field.description.rstrip('.')}" if field and field.description else ""
        return f"required{about}", " | ".join(options)
    if kind == "literal_error" and field is not None and _takes_numbers(field.annotation):
        return f"must be a whole number or {' or '.join(options)}", _converted("int_type", value) or options[0]
    if kind == "literal_error":
        return f"must be one of {', '.join(options)}" if len(options) > 1 else f"must be {options[0]}", closest_text(
            value, options
        )
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        (name, bound), *_ = context.items()
        return f"must be {BOUND_WORDS[name]} {bound}", _inside(name, bound, field)
    if kind in TYPE_WORDS:
        return TYPE_WORDS[kind], _converted(kind, value)
    if kind in ("model_type", "model_attributes_type"):
        return "must be a section, a mapping of keys to values", ""
    if kind == "string_pattern_mismatch":
        pattern = context["pattern"]
        cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-._")
        return f"must match {pattern}", cleaned if re.search(
            pattern, cleaned
        ) else "module:function" if ":" in pattern else "run-1"
    if kind == "value_error":
        return str(context["error"]), _one_of(value)
    if kind in ("too_short", "string_too_short"):
        return "must not be empty", ""
    return detail["msg"][:1].lower() + detail["msg"][1:], ""


def _options(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is typing.Literal:
        return [str(option) for option in typing.get_args(annotation)]
    return [option for argument in typing.get_args(annotation) for option in _options(argument)]


def _takes_numbers(annotation: Any) -> bool:
    return annotation is int or any(_takes_numbers(argument) for argument in typing.get_args(annotation))


def _inside(name: str, bound: float, field: FieldInfo | None) -> str:
    """A legal value at the bound; an open bound (above, below) has no nearest value, so the default is named."""
    if name in ("ge", "le"):
        return str(bound)
    if field is not None and isinstance(field.default, (int, float)):
        return str(field.default)
    return f"a value {BOUND_WORDS[name]} {bound}"


def _converted(kind: str, value: Any) -> str:
    """What a value of another type probably meant."""
    if kind == "string_type":
        return f'"{value}"' if isinstance(value, (int, float)) else ""
    if kind == "tuple_type":
        return f"[{value}]"
    if kind == "bool_type":
        return "false" if str(value).lower() in ("no", "off", "0", "none", "false") else "true"
    if isinstance(value, bool):
        return str(int(value))
    try:
        number = float(str(value).replace("_", "").replace(",", ""))
    except ValueError:
        return ""
    if not math.isfinite(number):
        return ""
    return str(max(1, round(number))) if kind == "int_type" else str(number)


def _one_of(value: Any) -> str:
    given = [f"{{{key}: {number}}}" for key, number in value.items()] if isinstance(value, dict) else []
    return " or ".join(given) or "{max_tokens: ...} or {sequences: ...}"
