"""docs/algorithms.md names every value and key of the recipe, with the objective of its paper."""

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import BaseModel

from megarl.algorithm.estimate import ADVANTAGES
from megarl.recipe.algorithm_section import Advantage, AlgorithmSection, KlSection, MismatchSection, PolicyLossSection
from megarl.recipe.load import kinds, sections_of

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def rows(title: str) -> dict[str, str]:
    """Return the lines of the table below a heading, by the name in their first column."""
    (part,) = [part for part in TEXT.split("\n## ") if part.startswith(title)]
    lines = {name: line for line in part.splitlines() for name in re.findall(r"^\| `(\w+)` \|", line)}
    for line in lines.values():  # formula and source; a loss without keys has none to name
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[1] and cells[-1], line
    return lines


def test_every_advantage_has_a_row() -> None:
    assert set(rows("Advantages")) == set(typing.get_args(Advantage)) == set(ADVANTAGES)


def test_every_policy_loss_has_a_row_with_its_keys() -> None:
    sections = {kinds(section)[0]: section for section in sections_of(PolicyLossSection)}
    losses = rows("Policy losses")
    assert set(losses) == set(sections)
    for kind, section in sections.items():
        assert re.findall(r"`(\w+)`", losses[kind].split("|")[3]) == [key for key in section.model_fields if key != "kind"]


def keys_of(section: type[BaseModel]) -> Iterator[str]:
    """All keys below a section of the recipe."""
    for key, field in section.model_fields.items():
        yield key
        for part in sections_of(field.annotation):
            yield from keys_of(part)


def test_every_key_is_named() -> None:
    spans = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    named = {word for span in re.findall(r"`([^`]+)`", spans) for word in re.findall(r"\w+", span)}
    assert set(keys_of(AlgorithmSection)) - named - {"kind"} == set()


def test_the_user_functions_of_the_page_run() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, typing.Any] = {}
    exec(code, names)
    rewards, valid = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False])
    assert names["centred"](rewards, torch.zeros(3), valid).tolist() == [-0.5, 0.5, 7.5]
    old, new, ones = torch.tensor([-1.0, -1.0]), torch.tensor([-1.05, -2.0]), torch.ones(2)
    tokens = SimpleNamespace(logprobs=new, old_logprobs=old, advantages=2 * ones)
    loss, beyond = names["bounded"](tokens, 0.1)
    assert beyond.tolist() == [False, True] and loss.tolist() == pytest.approx([2.1, 0.0])


def test_every_other_choice_is_named() -> None:
    aggregations = typing.get_args(AlgorithmSection.model_fields["aggregation"].annotation)
    assert set(rows("Aggregation")) == set(aggregations)
    for title, section in (("KL:", KlSection), ("The engine is not the trainer", MismatchSection)):
        (part,) = [part for part in TEXT.split("\n## ") if part.startswith(title)]
        words = {word for span in re.findall(r"`([^`]+)`", part) for word in re.findall(r"\w+", span)}
        for key, field in section.model_fields.items():
            choices = {choice for choice in typing.get_args(field.annotation) if isinstance(choice, str)}
            assert choices <= words, f"{title} {key}: {choices - words}"
    assert all(f"`algorithm.{key}`" in TEXT for key in ("kl", "overlong", "mismatch", "dynamic_sampling", "early_stop"))
    assert all(f"`{key}" in TEXT for key in ("critic.warmup_steps", "reference.refresh_every", "min_lr_share"))
