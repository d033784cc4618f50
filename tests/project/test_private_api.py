"""docs/architecture.md lists every private name of another project that the package uses.

Private is a name with one leading underscore. It belongs to another project where it is imported from there, is reached
through `super()`, or is an attribute that no file of the package defines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# Documented by Python, and by torch (CUDA memory), despite the underscore.
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit", "_current_frames", "_record_memory_history", "_dump_snapshot"}
ACCESS = ("getattr", "setattr", "hasattr", "delattr")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC and name != "_"


def defined(trees: dict[str, ast.Module]) -> set[str]:
    """Private names that the package gives to functions, classes, variables and attributes of its own."""
    names = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return names


def used(tree: ast.Module, defined_names: set[str]) -> Iterator[str]:
    """Private names of other projects that a file uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] != "megarl":
            yield from filter(is_private, [*node.module.split("."), *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names for part in alias.name.split(".")]
            yield from filter(is_private, parts)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            inherited = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
            if inherited or node.attr not in defined_names:
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ACCESS:
            words = [
                argument.value
                for argument in node.args[1:2]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            ]
            yield from (word for word in words if is_private(word) and word not in defined_names)


def table() -> list[tuple[str, str, list[str]]]:
    """Of each row the file, the cell of names, and all cells."""
    section = PAGE.split("## Private API of other projects")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")]
    return [(row[0].strip("`"), row[1], row) for row in rows]


def test_the_table_lists_every_private_name() -> None:
    listed: dict[str, set[str]] = {}
    for file, names, _ in table():
        listed.setdefault(file, set()).update(re.findall(r"\b_\w+", names))
    files = sorted((ROOT / "megarl").rglob("*.py"))
    trees = {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}
    package_names = defined(trees)
    uses = {(file, name) for file, tree in trees.items() for name in used(tree, package_names)}
    assert sorted(f"{file}: {name}" for file, name in uses if name not in listed.get(file, set())) == []


def test_every_row_is_complete_and_its_names_are_in_the_file() -> None:
    for file, names, row in table():
        text = (ROOT / file).read_text(encoding="utf-8")
        assert len(row) == 5 and all(row), row
        assert [name for name in re.findall(r"`(\w+)`", names) if name not in text] == [], file
    assert f"These are {len(table())} rows" in PAGE
