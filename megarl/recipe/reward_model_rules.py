"""Rules of a reward model: that something reads it, and that it gives one number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megarl.recipe.checkpoint import Fetch, ModelNotFound, find_model
from megarl.recipe.recipe import Recipe
from megarl.recipe.reward_sections import ModelRewardSection
from megarl.recipe.violation import GIVEN, MISSING, Violation

Violations = Iterator[Violation]
_PATH = "reward_model.path"


def reward_model_is_read(recipe: Recipe) -> Violations:
    """A reward model and one part of the reward that reads it come together."""
    parts = [number for number, part in enumerate(recipe.reward) if isinstance(part, ModelRewardSection)]
    if recipe.reward_model is not None and not parts:
        rule = "no part of reward reads it"
        yield Violation("reward_model", GIVEN, rule, "remove reward_model, or add {kind: model} to reward")
    if recipe.reward_model is None and parts:
        rule = f"required: reward.{parts[0]} is of kind: model"
        yield Violation("reward_model", MISSING, rule, "reward_model: {path: ...}")
    for number in parts:
        if recipe.reward[number].weight == 0:
            rule = "a whole model would run for nothing"
            yield Violation(f"reward.{number}.weight", 0.0, rule, f"remove reward.{number} and reward_model")
    for number in parts[1:]:
        yield Violation(f"reward.{number}.kind", "model", "there is one reward model", f"remove reward.{number}")


def reward_model_files(recipe: Recipe, fetch: Fetch | None) -> Violations:
    """A classifier with one label. A model that is not found has a violation of its own, and so has its tokenizer."""
    if recipe.reward_model is None:
        return
    path = recipe.reward_model.path
    try:
        own = find_model(path, fetch)
    except ModelNotFound:
        return
    config = json.loads((own / "config.json").read_text(encoding="utf-8"))
    for architecture in config.get("architectures") or ():
        if not architecture.endswith("ForSequenceClassification"):
            rule = f"is a {architecture}, and a reward model is a sequence classifier"
            yield Violation(_PATH, path, rule, "a checkpoint of a ...ForSequenceClassification")
    labels = _num_labels(config)
    if labels != 1:
        yield Violation(_PATH, path, f"its config.json has {labels} labels, and a reward is one number", "one label")


def _num_labels(config: dict[str, Any]) -> int:
    """As transformers reads it: 2 where the file says nothing."""
    if config.get("id2label"):
        return len(config["id2label"])
    return int(config.get("num_labels", 2))
