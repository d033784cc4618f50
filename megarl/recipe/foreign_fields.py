"""The fields of another library's dataclass, read from its source: `megarl check` imports neither the library nor torch."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megarl.recipe.violation import Violation, Violations, closest_text


def option_rules(
    section: str,
    given: Mapping[str, Any],
    fields: Mapping[str, str] | None,
    refused: Mapping[str, tuple[str, str]],
    owner: str,
) -> Violations:
    """Options under `section` that are no fields of the class `owner` of another library, or belong to megarl.

    `fields` are those of the class, or None where the library is not installed. `refused` are names that a recipe must not
    set: the rule, and the recipe key to use instead, or "".
    """
    for name, value in given.items():
        key = f"{section}.{name}"
        if name in refused:
            rule, way_out = refused[name]
            yield Violation(key, value, rule, way_out or f"remove {key}")
        elif fields is not None and name not in fields:
            nearest = closest_text(name, [*sorted(fields.keys() - refused.keys()), *refused])
            way_out = (refused[nearest][1] or f"remove {key}") if nearest in refused else f"{section}.{nearest}"
            yield Violation(key, value, f"{owner} has no such field", way_out)


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
