"""docs/data-and-rewards.md says what the code does: its kinds are all, its recipes are legal, its metrics are there."""

import re
from pathlib import Path

import yaml

from megarl.recipe import Recipe
from megarl.recipe.data_section import DataSection
from megarl.recipe.load import kinds, sections_of
from megarl.reward.workers import REASONS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data-and-rewards.md").read_text()


def kinds_of(annotation):
    return {kind for section in sections_of(annotation) for kind in kinds(section)}


def test_the_tables_have_every_kind():
    rows = re.findall(r"^\| (`[^|]*`) \|", PAGE, re.MULTILINE)
    shown = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
    assert shown == kinds_of(DataSection.model_fields["prompts"].annotation) | kinds_of(
        Recipe.model_fields["reward"].annotation
    )


def test_every_part_of_a_recipe_is_legal(tmp_path):
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    assert [set(block) for block in blocks] == [{"data"}, {"reward", "phases"}, {"reward"}]
    DataSection.model_validate(blocks[0]["data"])
    for block in blocks[1:]:
        for part in block["reward"]:
            (section,) = [one for one in sections_of(Recipe.model_fields["reward"].annotation) if part["kind"] in kinds(one)]
            section.model_validate(part)


def test_every_reason_is_named():
    for reasons in REASONS.values():
        for reason in reasons:
            assert re.search(rf"`(reward/\w+_num)?_{reason}`", PAGE), reason
