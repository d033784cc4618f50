"""The structure of a recipe: unknown keys, missing keys, wrong types, values out of range, and rules of single sections.

pydantic finds the faults; here they become violations with a dotted key and the nearest legal value."""

from __future__ import annotations

import difflib
import functools
import math
import operator
import re
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megarl.recipe.recipe import Recipe
from megarl.recipe.section import Section
from megarl.recipe.violation import MISSING, Violation, closest_text


def read_sections(data: dict[str, Any]) -> tuple[Recipe | None, list[Violation]]:
    """The recipe, or None and every violation of a single field or section."""
    try:
        return Recipe.model_validate(data), []
    except ValidationError as error:
        details = [dict(detail) for detail in error.errors(include_url=False)]
    # pydantic counts only the legal items of a list, so it also calls a list of one illegal item too short.
    return None, [_violation(detail, data) for detail in details if detail["type"] != "too_short" or not detail["input"]]


def sections_of(annotation: Any) -> list[type[Section]]:
    """The section classes inside a field's annotation: none for a plain value, several for a union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [found for argument in typing.get_args(annotation) for found in sections_of(argument)]


def kinds(section: type[Section]) -> tuple[str, ...]:
    """What `kind` may be in this section; () for a section without one."""
    field = section.model_fields.get("kind")
    return typing.get_args(field.annotation) if field else ()


def _violation(detail: dict[str, Any], data: Any) -> Violation:
    """Translate one of pydantic's error details."""
    path, owners, field = _locate(detail["loc"])
    key = ".".join(str(part) for part in path)
    value = MISSING if detail["type"] == "missing" else detail["input"]
    if detail["type"] == "extra_forbidden":
        siblings = functools.reduce(operator.getitem, path[:-1], data)
        return Violation(key, value, "unknown key", _meant_key(path, owners, siblings))
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        options = [kind for owner in sections_of(field.annotation if field else None) for kind in kinds(owner)]
        given = value.get("kind", MISSING) if isinstance(value, dict) else value
        rule = "required: one of " if given is MISSING else "must be one of "
        return Violation(f"{key}.kind", given, rule + ", ".join(options), closest_text(given, options))
    rule, nearest = _rule_and_nearest(detail, value, field)
    return Violation(key, value, rule, nearest)


def _locate(loc: tuple[Any, ...]) -> tuple[list[Any], list[type[Section]], FieldInfo | None]:
    """Follow pydantic's location through the sections: the path without union tags, the section and the field there."""
    path: list[Any] = []
    here: list[type[Section]] = [Recipe]
    owners: list[type[Section]] = []
    field: FieldInfo | None = None
    for part in loc:
        chosen = [section for section in here if len(here) > 1 and part in kinds(section)]
        if chosen:
            here = chosen
            continue
        if field is not None and not here and not isinstance(part, int):
            continue  # the tag of a union of plain values
        path.append(part)
        if isinstance(part, int):
            continue
        owners = here
        field = next((one.model_fields[part] for one in here if part in one.model_fields), None)
        here = sections_of(field.annotation) if field else []
    return path, owners, field


def _meant_key(path: list[Any], owners: list[type[Section]], given: dict[str, Any]) -> str:
    """The key that was probably meant: a sibling that is not given yet, else the same name elsewhere in the recipe."""
    name, above = str(path[-1]), ".".join(str(part) for part in path[:-1])
    siblings = [field for owner in owners for field in owner.model_fields]
    absent = [one for one in siblings if one not in given]
    close = difflib.get_close_matches(name, absent, 1, 0.6) or difflib.get_close_matches(name, siblings, 1, 0.6)
    if close:
        return f"{above}.{close[0]}" if above else close[0]
    elsewhere = {key.rsplit(".", 1)[-1]: key for key in reversed(list(_dotted_keys(Recipe)))}
    found = difflib.get_close_matches(name, elsewhere, 1, 0.8)
    return elsewhere[found[0]] if found else "one of " + ", ".join(siblings)


def _dotted_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in sections_of(field.annotation):
            yield from _dotted_keys(inner, f"{prefix}{name}.")


TYPE_WORDS = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
    "finite_number": "must be a finite number",
}


BOUND_WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _rule_and_nearest(detail: dict[str, Any], value: Any, field: FieldInfo | None) -> tuple[str, str]:
    """The rule that a value breaks, in words, and the nearest legal value."""
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
    if kind == "broken_rule":
        return context["rule"], context["nearest"]
    if kind == "value_error":
        return str(context["error"]), ""
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
