"""The fields of another library's dataclass, read from its source: `megarl check` imports neither the library nor torch."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

_TYPES: dict[str, tuple[type, str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "text"),
}


_OPTIONAL = re.compile(r"Optional\[(.*)\]|(\w+) \| None|None \| (\w+)")


def needed_type(value: Any, annotation: str) -> str | None:
    """What a value must be for a field of a plain type, as "a whole number", where it is not; None for a fitting value and
    for annotations that are no plain type."""
    optional = _OPTIONAL.fullmatch(annotation)
    inner = annotation if optional is None else next(part for part in optional.groups() if part is not None)
    if inner not in _TYPES or (value is None and optional is not None):
        return None
    kind, words = _TYPES[inner]
    fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    return None if fits else words


@cache
def dataclass_fields(module: str, class_name: str) -> dict[str, str] | None:
    """The public fields of a dataclass and its base classes: name -> text of the annotation, of the base classes first.

    Base classes are followed through `from ... import` within the top package. None where the package is not installed.
    Raises LookupError where the package has no such class.
    """
    tree = _parse(module)
    if tree is None:
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            fields: dict[str, str] = {}
            for base in node.bases:
                if isinstance(base, ast.Name):
                    fields |= _fields_of_base(module, tree, base.id)
            return fields | dict(_own_fields(node))
    raise LookupError(f"{module} has no class {class_name}")


def _fields_of_base(module: str, tree: ast.Module, name: str) -> dict[str, str]:
    if any(isinstance(node, ast.ClassDef) and node.name == name for node in tree.body):
        return dataclass_fields(module, name) or {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), module.rpartition(".")[0])
            if source.partition(".")[0] != module.partition(".")[0]:
                return {}  # of the standard library
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            return dataclass_fields(source, original) or {}
    return {}


def _own_fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            annotation = ast.unparse(statement.annotation)
            if not statement.target.id.startswith("_") and not annotation.startswith(("ClassVar", "InitVar")):
                yield statement.target.id, annotation.strip("'\"")


def _parse(module: str) -> ast.Module | None:
    """The syntax tree of a module; None where its package is not installed. `find_spec` of a dotted name would import the
    packages above it, so each part is looked up in the directory of the part before."""
    top, *parts = module.split(".")
    spec = importlib.util.find_spec(top)
    for part in parts:
        if spec is None:
            return None
        top = f"{top}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(top, spec.submodule_search_locations)
    if spec is None or spec.origin is None:
        return None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
