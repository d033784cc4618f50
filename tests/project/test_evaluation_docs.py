"""docs/evaluation.md says what the code does: its recipe is legal and has every key, its figures are all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megarl.data.sample import Prompt
from megarl.recipe.evaluation_section import EvaluationSection
from megarl.rollout.evaluation import Evaluation

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
# What stands for a part of a name, and the pattern of that part.
NAMES = {"<k>": r"\d+", "<n>": r"\d+", "<each>": r"\w+"}


def shown() -> dict[str, Any]:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    section: dict[str, Any] = yaml.safe_load(block)["evaluation"]
    return section


def test_the_recipe_is_legal_and_has_every_key() -> None:
    EvaluationSection.model_validate(shown())
    assert set(shown()) == set(EvaluationSection.model_fields)


def test_the_table_has_every_figure_and_no_other() -> None:
    section = EvaluationSection.model_validate(shown())
    count = section.completions
    prompts = [Prompt(index, np.array([index], np.int32), "1+1", "2", {}) for index in range(2)]
    rewards, answers = [np.arange(count, dtype=np.float32)] * 2, [["2"] * count] * 2
    lengths = np.ones(2 * count, int)
    figures = Evaluation(prompts, rewards, answers, lengths, lengths == 0, 0, 0, 0).metrics(section)
    rows = re.findall(r"^\| (`[^|]*`) \|", PAGE, re.MULTILINE)
    named = {name.removeprefix("evaluation/") for row in rows for name in re.findall(r"`([^`]+)`", row)}
    patterns = {name: "evaluation/" + re.sub("<.>|<each>", lambda part: NAMES[part[0]], name) for name in named}
    matched = {name: {key for key in figures if re.fullmatch(pattern, key)} for name, pattern in patterns.items()}
    assert all(matched.values()), matched
    assert set().union(*matched.values()) == set(figures)
