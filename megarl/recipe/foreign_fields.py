"""The fields of another library's dataclass, read from its source: `megarl check` imports neither the library nor torch."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megarl.recipe.violation import Violation, Violations, closest_text

_TYPES: dict[str, tuple[type, str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "text"),
}


# Types of fields that a recipe cannot write.
_OBJECTS = re.compile(r"Callable|torch\.|ContextManager|RecipeConfig|AttnBackend")
_OPTIONAL = re.compile(r"Optional\[(.*)\]|(\w+) \| None|None \| (\w+)")


def option_rules(
    section: str,
    given: Mapping[str, Any],
    fields: Mapping[str, str] | None,
    refused: Mapping[str, tuple[str, str]],
    owner: str,
) -> Violations:
    """Options under `section` that are no fields of the class `owner` of another library, or have the wrong type.

    `fields` are names and annotations of the class, or None where the library is not installed. `refused` are names that a
    recipe must not set: the rule, and the recipe key to use instead, or "".
    """
    for name, value in given.items():
        key = f"{section}.{name}"
        if name in refused:
            rule, way_out = refused[name]
            yield Violation(key, value, rule, way_out or f"remove {key}")
        elif fields is not None and name not in fields:
            nearest = closest_text(name, [*sorted(fields.keys() - refused.keys()), *refused])
            rule, way_out = f"{owner} has no such field", f"{section}.{nearest}"
            if nearest in refused:
                reason, way_out = refused[nearest]
                rule, way_out = f"{rule}, and of the nearest, {nearest}, holds: {reason}", way_out or f"remove {key}"
            yield Violation(key, value, rule, way_out)
        elif fields is not None:
            yield from _type_rules(key, value, fields[name])


def _type_rules(key: str, value: Any, annotation: str) -> Violations:
    """A value that is not of its field's type, for plain types."""
    optional = _OPTIONAL.fullmatch(annotation)
    inner = annotation if optional is None else next(part for part in optional.groups() if part is not None)
    if _OBJECTS.search(inner):
        yield Violation(key, value, f"is a Python object ({annotation}), which a recipe cannot hold", f"remove {key}")
    if value is None and optional is not None:
        return
    if inner in _TYPES:
        kind, words = _TYPES[inner]
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) != (kind is bool):
            yield Violation(key, value, f"must be {words}: the field is {annotation}")
    elif inner.startswith("Literal["):
        options = re.findall(r"'([^']*)'", inner)
        if options and value not in options:
            yield Violation(key, value, f"must be one of {', '.join(options)}", closest_text(value, options))


@cache
def dataclass_fields(module: str, class_name: str) -> dict[str, str] | None:
    """The public fields of a dataclass and its base classes: name -> text of the annotation, of the base classes first.

    Base classes are followed through `from ... import` within the top package. None where the package is not installed.
    Raises LookupError where the package has no such class.
    """
    # `find_spec` of a dotted name would import the packages above it, so look up each part in the directory before it.
    name, *parts = module.split(".")
    spec = importlib.util.find_spec(name)
    for part in parts:
        if spec is None:
            return None
        name = f"{name}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(name, spec.submodule_search_locations)
    if spec is None or spec.origin is None:
        return None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if class_name not in classes:
        raise LookupError(f"{module} has no class {class_name}")
    fields: dict[str, str] = {}
    for base in classes[class_name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            fields |= dataclass_fields(module, base.id) or {}
        elif isinstance(base, ast.Name):
            fields |= _imported_fields(module, tree, base.id)
    for statement in classes[class_name].body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            annotation = ast.unparse(statement.annotation)
            if not statement.target.id.startswith("_") and not annotation.startswith(("ClassVar", "InitVar")):
                fields[statement.target.id] = annotation.strip("'\"")
    return fields


def _imported_fields(module: str, tree: ast.Module, name: str) -> dict[str, str]:
    """The fields of a base class that `module` imports; none for a class of another top package."""
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
        original = next((alias.name for alias in node.names if (alias.asname or alias.name) == name), None)
        if original is not None:
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), module.rpartition(".")[0])
            same_package = source.partition(".")[0] == module.partition(".")[0]
            return (dataclass_fields(source, original) or {}) if same_package else {}
    return {}
