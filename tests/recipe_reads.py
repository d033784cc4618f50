"""Which members of recipe sections the package reads, by the types mypy finds for every expression.

A read is an attribute access on a value whose type is a section: the same name on anything else, in a string or in
`getattr` does not count. A property or method of a section passes its own reads on only if something reads it in turn.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from mypy import build, nodes, types
from mypy.modulefinder import BuildSource
from mypy.options import Options

Member = tuple[str, str]  # class, attribute
Access = tuple[int, Member]  # line, what is read there


def read_members(root: Path, package: str, recipe: str, unread_files: tuple[str, ...] = ()) -> set[Member]:
    """Members of classes in the package `recipe` (dotted) that the rest of `package` under `root` reads.

    `unread_files` are dotted modules whose reads do not count (they only show values).
    """
    files = {_module(file.relative_to(root)): file for file in sorted((root / package).rglob("*.py"))}
    of_recipe = {name for name in files if name == recipe or name.startswith(recipe + ".")}
    accesses = _accesses(files, of_recipe)
    readers = files.keys() - of_recipe - set(unread_files)
    reads = {member for name in readers for _, member in accesses[name]}
    passed_on: dict[Member, set[Member]] = {}
    for name in of_recipe:
        for method, first, last in _methods(files[name]):
            passed_on[method] = {member for line, member in accesses[name] if first <= line <= last}
    todo = list(reads)
    while todo:
        for member in passed_on.get(todo.pop(), set()) - reads:
            reads.add(member)
            todo.append(member)
    return reads


def _module(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def _accesses(files: dict[str, Path], of_recipe: set[str]) -> dict[str, list[Access]]:
    """For each module, the attribute accesses on instances of classes of `of_recipe`; assignments are none."""
    options = Options()
    options.export_types = options.preserve_asts = options.check_untyped_defs = True
    options.ignore_missing_imports = options.ignore_errors = True
    # The types of other libraries are not needed to recognise a section, and torch's take a minute.
    options.follow_imports = "skip"
    options.incremental = False
    # mypy's expressions know their line but not their file, so each file gets lines of its own.
    texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    offsets, end = {}, 0
    for name, text in texts.items():
        offsets[name], end = end, end + text.count("\n") + 1
    sources = [BuildSource(str(files[name]), name, "\n" * offsets[name] + text) for name, text in texts.items()]
    type_map = build.build(sources, options=options).types
    by_line: dict[int, list[tuple[int, Member]]] = {}
    for access in type_map:
        if isinstance(access, nodes.MemberExpr):
            for owner in _instances(type_map.get(access.expr)):
                if owner.type.module_name in of_recipe:
                    by_line.setdefault(access.line, []).append((access.column, (owner.type.name, access.name)))
    found: dict[str, list[Access]] = {}
    for name, text in texts.items():
        found[name] = [
            (line, member)
            for line in range(1, text.count("\n") + 2)
            for column, member in by_line.get(offsets[name] + line, [])
            if (line, column, member[1]) not in _written(text)
        ]
    return found


def _instances(found: types.Type | None) -> list[types.Instance]:
    """The classes an expression can be an instance of."""
    proper = types.get_proper_type(found)
    if isinstance(proper, types.UnionType):
        return [instance for item in proper.items for instance in _instances(item)]
    if isinstance(proper, types.TypeVarType):
        return _instances(proper.upper_bound)
    return [proper] if isinstance(proper, types.Instance) else []


@functools.cache
def _written(text: str) -> set[tuple[int, int, str]]:
    """Line, column and name of attributes that are assigned or deleted."""
    return {
        (node.lineno, node.col_offset, node.attr)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
    }


def _methods(file: Path) -> list[tuple[Member, int, int]]:
    """Class and name of each method or property, with its first and last line."""
    return [
        ((owner.name, method.name), method.lineno, method.end_lineno or method.lineno)
        for owner in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef)
    ]
