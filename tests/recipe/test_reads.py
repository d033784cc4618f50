"""A recipe key that nothing reads is a bug (slime's `--log-probs-max-tokens-per-gpu`, verl #7462, #7815)."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest

from megarl.recipe import Recipe
from megarl.recipe.load import sections_of
from megarl.recipe.section import Section
from tests.recipe_reads import Member, read_members

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
        for one in inner:
            keys |= all_keys(one, chosen_by_kind=len(inner) > 1)
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
    only_written: int = 0
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
    alias.only_written = 3
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
