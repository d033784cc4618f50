"""A recipe's YAML means what other tools read in it, also once megarl has written it, and its paths what a shell reads."""

from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from megarl.recipe import RecipeError, load_recipe
from megarl.recipe.load import sections_of
from megarl.recipe.recipe import Recipe
from megarl.recipe.section import Section
from megarl.recipe.yaml_text import dump_yaml, parse_yaml, read_yaml
from tests.recipe_cases import edited, make_folder, write

MERGES = """
sections:
  deep: &third
    <<: &second
      <<: &first {kind: jsonl, path: a, weight: 1}
      path: b
    path: c
other: {<<: *second, weight: 2}
several: {<<: [*third, *first], path: d}
"""


def test_a_merge_of_a_merge_is_read_as_other_tools_read_it() -> None:
    found = parse_yaml(MERGES)
    assert found == yaml.safe_load(MERGES)
    assert found["sections"]["deep"] == {"kind": "jsonl", "path": "c", "weight": 1}
    assert found["other"] == {"kind": "jsonl", "path": "b", "weight": 2}
    assert found["several"] == {"kind": "jsonl", "path": "d", "weight": 1}


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("a: {b: 1, b: 2}", "line 1, column 11", "'b' is given twice"),
        ("a: &a {b: 1}\nc: {<<: *a, d: 1, d: 2}", "line 2, column 19", "'d' is given twice"),
        ("a: &a {b: 1}\nc:\n  d:\n    <<: *a\n    b: 2\n    b: 3", "line 6, column 5", "'b' is given twice"),
        ("a: &a {b: 1}\nc: {<<: *a, <<: *a}", "line 2, column 13", "<<: [*a, *b]"),
        ("a:\n\tb: 1", "line 2, column 1", "a tab; YAML is indented with spaces"),
        ("a: {<<: 3}", "line 1, column 9", "for merging"),
    ],
)
def test_what_no_tool_should_read_is_refused_with_its_place(tmp_path: Path, text: str, place: str, said: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    data, (violation,) = read_yaml(file)
    assert data is None and f"{place}: " in violation.rule and said in violation.rule


@pytest.mark.parametrize(
    ("text", "value"),
    [("010", "010"), ("1:30", "1:30"), ("2026-11-25", "2026-11-25"), ("yes", "yes"), ("1_000", 1000), ("0x10", 16),
     ("-0", 0), ("1e-5", 1e-5), ("1.0e-5", 1e-5), ("-2E3", -2000.0), (".5", 0.5), ("3", 3), ("no", "no"), ("on", "on"),
     ("true", True), ("1.2.3", "1.2.3"), ("e5", "e5"), ("null", None)],
)  # fmt: skip
def test_a_scalar_means_what_people_mean_and_never_what_yaml_1_1_makes_of_it(text: str, value: object) -> None:
    found = parse_yaml(f"run: {{name: {text}}}")["run"]["name"]
    assert found == value and type(found) is type(value)


@given(st.one_of(st.text(), st.from_regex(r"[-+]?[0-9._:eExob]{1,8}", fullmatch=True)))
def test_every_loader_reads_a_written_text_back_as_that_text(text: str) -> None:
    written = dump_yaml({"text": text})
    for loaded in (parse_yaml(written), yaml.safe_load(written)):
        assert loaded == {"text": text}


def test_a_home_directory_and_variables_in_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path, monkeypatch)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    source = {"kind": "jsonl", "path": "~/qa.jsonl", "prompt_field": "q", "answer_field": "a"}
    paths = [("run.dir", "$SCRATCH/${USER_RUNS}x"), ("model.path", "~/tiny"), ("data.prompts", source)]
    file = write(folder, edited(*paths))
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert [(one.key, one.rule) for one in caught.value.violations] == [
        ("run.dir", "the environment variable USER_RUNS is not set")
    ]
    monkeypatch.setenv("USER_RUNS", "mine-")
    recipe = load_recipe(file)
    assert recipe.run.dir == str(tmp_path / "scratch" / "mine-x")
    assert recipe.model.path == str(folder / "tiny")
    assert recipe.data.prompts.path == str(folder / "qa.jsonl")  # type: ignore[union-attr]
    with pytest.raises(RecipeError, match="no user 'nobody-of-this-name'"):
        load_recipe(file, ["run.dir=~nobody-of-this-name/runs"])


def test_every_path_of_a_recipe_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    seen: set[tuple[type, str]] = set()
    left: list[type[Section]] = [Recipe]
    while left:
        section = left.pop()
        for name, field in section.model_fields.items():
            left += sections_of(field.annotation)
            if name in ("path", "dir", "replay", "uri"):
                kind: Any = TypeAdapter(Annotated[field.annotation, *field.metadata, None])  # type: ignore[arg-type]
                assert kind.validate_python("~/x") == "/home/user/x", f"{section.__name__}.{name}"
                seen.add((section, name))
    assert len(seen) >= 8
