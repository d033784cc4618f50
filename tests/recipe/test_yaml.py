"""A recipe's YAML means what other tools read in it, also once megarl has written it, and its paths what a shell reads;
whatever stands in a recipe, the answer is a recipe or violations, never another exception."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from megarl.planner.check import phase_table
from megarl.recipe import RecipeError, load_recipe, parse_recipe
from megarl.recipe.yaml_text import apply_overrides, dump_yaml, parse_yaml, read_yaml
from tests.recipe_cases import PPO, edited, fields_of, refusals, write

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
    parsed = parse_yaml(MERGES)
    assert parsed == yaml.safe_load(MERGES)
    assert parsed["sections"]["deep"] == {"kind": "jsonl", "path": "c", "weight": 1}
    assert parsed["other"] == {"kind": "jsonl", "path": "b", "weight": 2}
    assert parsed["several"] == {"kind": "jsonl", "path": "d", "weight": 1}


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: {b: 1, b: 2}", "line 1, column 11", "'b' is given twice"),
        ("a: &a {b: 1}\nc: {<<: *a, d: 1, d: 2}", "line 2, column 19", "'d' is given twice"),
        ("a: &a {b: 1}\nc:\n  d:\n    <<: *a\n    b: 2\n    b: 3", "line 6, column 5", "'b' is given twice"),
        ("a: &a {b: 1}\nc: {<<: *a, <<: *a}", "line 2, column 13", "<<: [*a, *b]"),
        ("a:\n\tb: 1", "line 2, column 1", "a tab; YAML is indented with spaces"),
        ("a: {<<: 3}", "line 1, column 9", "for merging"),
    ],
)
def test_what_no_tool_should_read_is_refused_with_its_place(tmp_path: Path, text: str, place: str, words: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    data, (violation,) = read_yaml(file)
    assert data is None and f"{place}: " in violation.rule and words in violation.rule


@pytest.mark.parametrize(
    ("text", "value"),
    [("010", "010"), ("1:30", "1:30"), ("2026-11-25", "2026-11-25"), ("yes", "yes"), ("1_000", 1000), ("0x10", 16),
     ("-0", 0), ("1e-5", 1e-5), ("1.0e-5", 1e-5), ("-2E3", -2000.0), (".5", 0.5), ("3", 3), ("no", "no"), ("on", "on"),
     ("true", True), ("1.2.3", "1.2.3"), ("e5", "e5"), ("null", None)],
)  # fmt: skip
def test_a_scalar_means_what_people_mean_and_never_what_yaml_1_1_makes_of_it(text: str, value: object) -> None:
    parsed = parse_yaml(f"run: {{name: {text}}}")["run"]["name"]
    assert parsed == value and type(parsed) is type(value)


@given(st.one_of(st.text(), st.from_regex(r"[-+]?[0-9._:eExob]{1,8}", fullmatch=True)))
def test_every_loader_reads_a_written_text_back_as_that_text(text: str) -> None:
    written = dump_yaml({"text": text})
    for loaded in (parse_yaml(written), yaml.safe_load(written)):
        assert loaded == {"text": text}


def test_a_home_directory_and_variables_in_any_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("SCRATCH", str(folder / "scratch"))
    source = {"kind": "jsonl", "path": "~/qa.jsonl", "prompt_field": "q", "answer_field": "a"}
    paths = [("run.dir", "$SCRATCH/${USER_RUNS}x"), ("model.path", "~/tiny"), ("data.prompts", source)]
    refused = refusals(*paths)
    assert refused.keys() == {"run.dir"} and "the environment variable USER_RUNS is not set" in refused["run.dir"]
    file = write(folder, edited(*paths))
    monkeypatch.setenv("USER_RUNS", "mine-")
    recipe = load_recipe(file)
    assert recipe.run.dir == str(folder / "scratch" / "mine-x")
    assert recipe.model.path == str(folder / "tiny")
    assert recipe.data.prompts.path == str(folder / "qa.jsonl")  # type: ignore[union-attr]
    with pytest.raises(RecipeError, match="no user 'nobody-of-this-name'"):
        load_recipe(file, ["run.dir=~nobody-of-this-name/runs"])


def test_every_path_of_a_recipe_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    seen: set[tuple[type, str]] = set()
    for section, name, field in fields_of():
        if name in ("path", "dir", "replay", "uri"):
            kind: Any = TypeAdapter(Annotated[field.annotation, *field.metadata, None])  # type: ignore[arg-type]
            assert kind.validate_python("~/x") == "/home/user/x", f"{section.__name__}.{name}"
            seen.add((section, name))
    assert len(seen) >= 8


scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.integers(0, 40) | st.floats() | st.text(max_size=8)
words = st.sampled_from(
    ["grpo", "gae", "reward", "loss", "jsonl", "exact", "function", "sequences", "max_tokens", "kind", "path"]
)
anything = st.recursive(
    scalars | words,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(words | st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


def paths(data: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items: list[tuple[Any, Any]] = []
    if isinstance(data, dict):
        items = list(data.items())
    elif isinstance(data, list):
        items = list(enumerate(data))
    return [key_path for key, value in items for key_path in [(*above, key), *paths(value, (*above, key))]]


dotted_keys = st.sampled_from([".".join(map(str, path)) for path in paths(PPO)])


@pytest.mark.usefixtures("folder")
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(paths(PPO)), anything, st.sampled_from(["set", "remove", "add"])), max_size=4))
def test_a_damaged_recipe_is_a_recipe_or_violations(damage: list[tuple[tuple[Any, ...], Any, str]]) -> None:
    data: Any = copy.deepcopy(PPO)
    for path, value, how in damage:
        here = data
        for part in path[:-1]:
            try:
                here = here[part]
            except (KeyError, IndexError, TypeError):
                here = None
        if how == "remove" and isinstance(here, dict):
            here.pop(path[-1], None)
        elif how == "add" and isinstance(here, dict):
            here[str(value)] = value
        elif isinstance(here, dict) or (isinstance(here, list) and path[-1] in range(len(here))):
            here[path[-1]] = value
    try:
        recipe = parse_recipe(data)
    except RecipeError as error:
        assert error.violations
        assert all(str(violation) for violation in error.violations)
    else:
        assert phase_table(recipe)


@pytest.mark.usefixtures("folder")
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.text(max_size=12) | st.builds("{}={}".format, dotted_keys, st.text(max_size=8)), max_size=3))
def test_any_override_is_applied_or_a_violation(overrides: list[str]) -> None:
    data = copy.deepcopy(PPO)
    if apply_overrides(data, overrides):
        return
    try:
        parse_recipe(data)
    except RecipeError as error:
        assert error.violations
