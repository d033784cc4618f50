"""The table of docs/architecture.md, read off the family registry and the recipe's sections, so that it follows the code.

`python -m tests.recipe.feature_table` prints it; test_features.py compares it with the page.
"""

from __future__ import annotations

import typing
from dataclasses import fields
from typing import NamedTuple

from pydantic.fields import FieldInfo

from megarl.models import FAMILIES
from megarl.models.layout import RolloutLayout
from megarl.recipe.load import kinds, sections_of
from megarl.recipe.recipe import Recipe
from megarl.recipe.role_sections import ActorSection
from megarl.recipe.section import Section
from megarl.recipe.trainer_section import TrainerSection
from megarl.recipe.weight_sync_section import WeightSyncSection

# The number of a layout that no key holds.
DATA = "data (what the others leave of `trainer.ranks`, with a distributed optimizer)"


DEVICES = "CPU and gloo: what CI tests; CUDA, NCCL and Transformer Engine: what has run is in `docs/results.md`"


# Options that turn a feature off, or leave the choice to megarl.
NEUTRAL = ("none", "auto")


# Keys of a role that have their own rows, or need none.
ROLE_KEYS = ("path", "layout")


# Keys whose options are rows: (what a user looks for, dotted key).
OPTIONS = (
    ("what a run learns from", "run.kind"),
    ("advantages", "algorithm.advantage"),
    ("policy loss", "algorithm.policy_loss.kind"),
    ("KL term", "algorithm.kl.place"),
    ("distillation", "algorithm.distillation.divergence"),
    ("distillation, compared tokens", "algorithm.distillation.over"),
    ("rewards", "reward.kind"),
    ("prompts", "data.prompts.kind"),
    ("sinks, besides JSONL", "telemetry.sinks.kind"),
)


class Feature(NamedTuple):
    """A row of the table: what it is about, the recipe key, and its legal values."""

    area: str
    key: str
    values: str


def features() -> list[Feature]:
    """The rows, models first."""
    rows = [Feature("models, by `model_type`", "model.path", _listed(sorted(FAMILIES)))]
    roles = [role for role, field in Recipe.model_fields.items() if "layout" in _keys(field)]
    rows.append(Feature("roles", "`, `".join(roles), "each a Megatron engine with its own layout, on the same ranks"))
    rows.append(Feature("layout", "ROLE.layout", f"{_listed(_keys(_field('actor.layout')))}, {DATA}"))
    rows.append(Feature("engine layout", "rollout", f"{_listed([size.name for size in fields(RolloutLayout)])}, in vLLM"))
    rows.append(Feature("engine weights", "rollout.quantization", _listed(_options(_field("rollout.quantization")))))
    for area, key in OPTIONS:
        rows.append(Feature(area, key, _listed(_options(_field(key)))))
    rows.append(
        Feature(
            "agents and environments", "environment", _listed(list(dict.fromkeys(_keys(Recipe.model_fields["environment"]))))
        )
    )
    rows.append(Feature("supervised steps ahead of rollouts", "warmup.sft", _listed(_keys(_field("warmup.sft")))))
    sync = {key: _options(field) for key, field in WeightSyncSection.model_fields.items() if _options(field)}
    rows.append(Feature("weight sync", "weight_sync", "; ".join(f"`{key}`: {_listed(sync[key])}" for key in sync)))
    for key, field in TrainerSection.model_fields.items():
        if field.annotation is bool or _options(field):
            rows.append(Feature(key, f"trainer.{key}", _listed(_options(field)) or "`true`"))
    for key, field in ActorSection.model_fields.items():
        if key not in ROLE_KEYS:
            rows.append(Feature(key, f"actor.{key}", _values(field)))
    rows.append(Feature("device", "", DEVICES))
    return rows


def markdown(rows: list[Feature]) -> str:
    """The table as docs/architecture.md has it."""
    lines = ["| feature | recipe key | supported |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {row.area} | {f'`{row.key}`' if row.key else ''} | {row.values} |" for row in rows)])


def _listed(values: list[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _keys(field: FieldInfo) -> list[str]:
    """The keys below a field."""
    return [key for section in sections_of(field.annotation) for key in section.model_fields]


def _field(dotted: str) -> FieldInfo:
    """The field of a dotted key; one that ends in `kind` may be the union of the sections that have kinds. Raises KeyError
    where the recipe has no such key."""
    sections: list[type[Section]] = [Recipe]
    field = None
    for part in dotted.split("."):
        if field is not None and part == "kind" and len(sections) > 1:
            return field
        (section,) = sections
        field = section.model_fields[part]
        sections = sections_of(field.annotation)
    assert field is not None, "a dotted key has a part"
    return field


def _options(field: FieldInfo) -> list[str]:
    """The words that a field may be."""
    words = [kind for section in sections_of(field.annotation) for kind in kinds(section)] or _words(field.annotation)
    return [word for word in words if word not in NEUTRAL]


def _words(annotation: typing.Any) -> list[str]:
    if isinstance(annotation, str):
        return [annotation]
    return [word for argument in typing.get_args(annotation) for word in _words(argument)]


def _values(field: FieldInfo) -> str:
    """The keys below a field, each with the words that it may be."""
    parts = []
    for section in sections_of(field.annotation):
        for key, below in section.model_fields.items():
            words = _options(below)
            parts.append(f"`{key}`" + (f" ({', '.join(words)})" if words else ""))
    return ", ".join(parts) or _listed(_options(field) or ["true"])  # a switch has no words


if __name__ == "__main__":
    print(markdown(features()))
