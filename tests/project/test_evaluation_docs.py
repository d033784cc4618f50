"""docs/reading-a-run.md: its parts of recipes are legal, and its section on evaluation has every key and every metric."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import yaml

from megarl.data.sample import Prompt
from megarl.recipe.evaluation_section import EvaluationSection
from megarl.recipe.telemetry_section import TelemetrySection
from megarl.rollout.evaluation import Evaluation

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reading-a-run.md").read_text(encoding="utf-8")
BLOCKS = {
    key: section
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    for key, section in yaml.safe_load(block).items()
}
# What stands for a part of a name, and the pattern of that part.
NAMES = {"<k>": r"\d+", "<n>": r"\d+", "<each>": r"\w+"}


def test_the_sinks_are_legal() -> None:
    assert len(TelemetrySection.model_validate(BLOCKS["telemetry"]).sinks) == 3


def test_the_recipe_is_legal_and_has_every_key() -> None:
    EvaluationSection.model_validate(BLOCKS["evaluation"])
    assert set(BLOCKS["evaluation"]) == set(EvaluationSection.model_fields)


def test_the_table_has_every_metric_and_no_other() -> None:
    section = EvaluationSection.model_validate(BLOCKS["evaluation"])
    count = section.completions
    prompts = [Prompt(index, np.array([index], np.int32), "1+1", "2", {}) for index in range(2)]
    rewards = [np.arange(count, dtype=np.float32)] * 2
    answers: list[list[str | None]] = [["2"] * count] * 2
    counts: dict[str, float] = {f"evaluation/num_{name}": 0 for name in ("prompts", "left_out", "dropped", "bad_rows")}
    metrics = Evaluation(prompts, counts, rewards, answers, [1], [False]).metrics(section)
    rows = re.findall(r"^\| (`evaluation/[^|]*`) \|", PAGE, re.MULTILINE)
    named = {name.removeprefix("evaluation/") for row in rows for name in re.findall(r"`([^`]+)`", row)}
    patterns = {name: "evaluation/" + re.sub("<.>|<each>", lambda part: NAMES[part[0]], name) for name in named}
    matched = {name: {key for key in metrics if re.fullmatch(pattern, key)} for name, pattern in patterns.items()}
    assert all(matched.values()), matched
    assert set().union(*matched.values()) == set(metrics)
