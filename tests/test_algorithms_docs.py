"""docs/algorithms.md names what the recipe takes, and no more."""

import re
import typing
from pathlib import Path

from megarl.algorithm.estimate import ADVANTAGES
from megarl.recipe.algorithm_sections import Advantage, AlgorithmSection, KlSection, PolicyLossSection
from megarl.recipe.structure import kinds, sections_of

TEXT = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text()


def rows(title: str) -> dict[str, str]:
    """Lines of the table below a heading, by the name in their first column."""
    (part,) = [part for part in TEXT.split("\n## ") if part.startswith(title)]
    return {name: line for line in part.splitlines() for name in re.findall(r"^\| `(\w+)` \|", line)}


def test_every_advantage_has_a_row() -> None:
    assert set(rows("Advantages")) == set(typing.get_args(Advantage)) == set(ADVANTAGES)


def test_every_policy_loss_has_a_row_with_its_keys() -> None:
    sections = {kinds(section)[0]: section for section in sections_of(PolicyLossSection)}
    found = rows("Policy losses")
    assert set(found) == set(sections)
    for kind, section in sections.items():
        assert re.findall(r"`(\w+)`", found[kind].split("|")[3]) == [key for key in section.model_fields if key != "kind"]


def test_every_other_choice_is_named() -> None:
    aggregations = typing.get_args(AlgorithmSection.model_fields["aggregation"].annotation)
    assert set(rows("Aggregation")) == set(aggregations)
    estimators = typing.get_args(KlSection.model_fields["estimator"].annotation)
    assert all(f"`{name}`" in TEXT or f"estimator: {name}`" in TEXT for name in estimators)
    assert all(f"`algorithm.{key}`" in TEXT for key in ("kl", "overlong", "mismatch", "dynamic_sampling", "early_stop"))
    assert all(f"`{key}" in TEXT for key in ("critic.warmup_steps", "reference.refresh_every", "min_lr_share"))
