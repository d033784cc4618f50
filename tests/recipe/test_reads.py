"""A recipe key that nothing reads is a bug (slime's `--log-probs-max-tokens-per-gpu`, verl #7462, #7815).

Which members of recipe sections the package reads is told by the types that mypy finds for every expression. A read is an
attribute access on a value whose type is a section: the same name on anything else, in a string or in `getattr` does not
count. A property or method of a section passes its own reads on only if something reads it in turn."""

from __future__ import annotations

import ast
import typing
from pathlib import Path

import pytest
from mypy import build, nodes, types
from mypy.modulefinder import BuildSource
from mypy.options import Options

from megarl.recipe import Recipe
from megarl.recipe.load import sections_of
from megarl.recipe.section import Section

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
    """For each module, the attribute accesses on instances of classes of `of_recipe`, which are frozen: all are reads."""
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
    by_line: dict[int, list[Member]] = {}
    for access in type_map:
        if isinstance(access, nodes.MemberExpr):
            for owner in _instances(type_map.get(access.expr)):
                if owner.type.module_name in of_recipe:
                    by_line.setdefault(access.line, []).append((owner.type.name, access.name))
    accesses: dict[str, list[Access]] = {}
    for name, text in texts.items():
        accesses[name] = [
            (line, member) for line in range(1, text.count("\n") + 2) for member in by_line.get(offsets[name] + line, [])
        ]
    return accesses


def _instances(expression_type: types.Type | None) -> list[types.Instance]:
    """The classes an expression can be an instance of."""
    proper = types.get_proper_type(expression_type)
    if isinstance(proper, types.UnionType):
        return [instance for item in proper.items for instance in _instances(item)]
    if isinstance(proper, types.TypeVarType):
        return _instances(proper.upper_bound)
    return [proper] if isinstance(proper, types.Instance) else []


def _methods(file: Path) -> list[tuple[Member, int, int]]:
    """Class and name of each method or property, with its first and last line."""
    return [
        ((owner.name, method.name), method.lineno, method.end_lineno or method.lineno)
        for owner in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef)
    ]


ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def all_keys(section: type[Section], chosen_by_kind: bool = False) -> set[Member]:
    """Class and name of every field of every section; both leaves and sections, since two keys may share a section class.

    A `kind` with one legal value, in a section that is no member of a union, holds no decision, so nothing has to read it.
    """
    keys = set()
    for name, field in section.model_fields.items():
        inner = sections_of(field.annotation)
        if name != "kind" or chosen_by_kind or len(typing.get_args(field.annotation)) > 1:
            keys.add((section.__name__, name))
        for subsection in inner:
            keys |= all_keys(subsection, chosen_by_kind=len(inner) > 1)
    return keys


def test_something_reads_every_recipe_key() -> None:
    # `check` and its table only show values
    reads = read_members(ROOT, "megarl", "megarl.recipe", unread_files=("megarl.cli",))
    unread = all_keys(Recipe) - reads
    assert not unread, f"recipe keys that nothing outside megarl/recipe reads: {sorted(unread)}"


RECIPE = """
class Inner:
    read: int = 0
    only_in_text: int = 0
    only_shown: int = 0


class Outer:
    inner: Inner | None = None
    in_read_property: int = 0
    in_unread_property: int = 0

    @property
    def derived(self) -> int:
        return self.in_read_property

    @property
    def nobody_asks(self) -> int:
        return self.in_unread_property
"""
READER = """
from synthetic.recipe import Outer


def work(outer: Outer) -> int:
    alias = outer.inner
    return alias.read + outer.derived + len("inner.only_in_text")
"""
SHOWER = """
from synthetic.recipe import Inner


def show(inner: Inner) -> None:
    print(inner.only_shown)
"""


def test_an_unread_key_would_be_found(tmp_path: Path) -> None:
    package = tmp_path / "synthetic"
    package.mkdir()
    for name, text in (("__init__", ""), ("recipe", RECIPE), ("reader", READER), ("shower", SHOWER)):
        (package / f"{name}.py").write_text(text)
    reads = read_members(tmp_path, "synthetic", "synthetic.recipe", unread_files=("synthetic.shower",))
    assert reads == {("Inner", "read"), ("Outer", "inner"), ("Outer", "derived"), ("Outer", "in_read_property")}
