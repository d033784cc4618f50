"""`warmup`, and what a run without rollouts (`run.kind` other than `rl`) has in the sections that describe rollouts.

Such a run is the same engine with other data: `data` gives the sequences, and one update a step trains on them. The sections
that a user leaves out get the values that say so; a resolved recipe shows them, and no others are legal. A warm-up is such a
run ahead of the first rollout, with the same roles and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from megarl.recipe.algorithm_section import AlgorithmSection
from megarl.recipe.data_section import DataSection
from megarl.recipe.evaluation_section import EvaluationSection
from megarl.recipe.phases_section import UpdatePhaseSection
from megarl.recipe.role_sections import LearningRateSection
from megarl.recipe.section import Positive, Section
from megarl.recipe.violation import GIVEN, MISSING, Violation, Violations
from megarl.recipe.yaml_text import value_at

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe

SFT = "warmup.sft"
# The section `algorithm` of each kind, and the keys of it that a user may set.
_OF_PAIRS = {"group_size": 2, "policy_loss": {"kind": "policy_gradient"}, "aggregation": "sequence_sum"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "sft": {"advantage": "supervised", "group_size": 1, "policy_loss": {"kind": "policy_gradient"}},
    "dpo": {"advantage": "dpo", **_OF_PAIRS, "dpo": {}},
    "reward_model": {"advantage": "bradley_terry", **_OF_PAIRS},
}
FREE = {"sft": ("aggregation", "entropy_coefficient"), "dpo": ("dpo",), "reward_model": ()}
# Keys that a supervised run does not read, as pydantic's `exclude`; keys of `algorithm` that it reads are in `FREE`.
UNREAD: dict[str, Any] = {
    "run": {"dump_rollouts"},
    "data": {"max_prompt_tokens", "answer_format", "curriculum"},
    "actor": {"router_replay"},
    "phases": {"rollout", "reward"},
    "evaluation": EvaluationSection.model_fields.keys() - {"prompts", "max_prompts", "every"},
    **dict.fromkeys(("reward", "environment", "warmup", "critic", "reward_model", "rollout", "weight_sync"), True),
}


def fill_sections(given: Any) -> Any:
    """Return a recipe's plain data with the sections that a supervised run leaves out; of any other kind as it is."""
    kind = value_at(given, "run.kind")
    if kind not in list(ALGORITHMS):  # `kind` may be a list here, which a dict cannot look up
        return given

    def number(key: str) -> int:
        """Return a number that the user gave, or one that lets other rules speak."""
        value = value_at(given, key)
        return value if type(value) is int and value > 1 else 2

    filled: dict[str, dict[str, Any]] = {
        "algorithm": ALGORITHMS[kind],
        "data": {"max_prompt_tokens": 1},
        "rollout": {"max_new_tokens": number("data.max_tokens") - 1},
        "phases": {"rollout": {"prompts": number("phases.actor_update.mini_batch") // ALGORITHMS[kind]["group_size"]}},
    }
    sections = {name: given.get(name, {}) for name in filled}
    rollout_phase = value_at(given, "phases.rollout")
    if isinstance(rollout_phase, dict):  # `supervised_rules` refuses its keys; a missing one is no fault
        sections["phases"] = sections["phases"] | {"rollout": filled["phases"]["rollout"] | rollout_phase}
    return given | {name: filled[name] | section for name, section in sections.items() if isinstance(section, dict)}


def supervised_rules(recipe: Recipe) -> Violations:
    """A supervised run has a longest sequence, whole pairs, one update a step, and nothing of a rollout."""
    kind, data = recipe.run.kind, recipe.data
    if kind == "rl":
        if data.max_tokens is not None:
            rule = "run.kind: rl limits prompt and completion each for itself"
            yield Violation("data.max_tokens", data.max_tokens, rule, "data.max_prompt_tokens and rollout.max_new_tokens")
        if recipe.algorithm.advantage in [algorithm["advantage"] for algorithm in ALGORITHMS.values()]:
            rule = "learns from data, and run.kind is rl"
            yield Violation("algorithm.advantage", recipe.algorithm.advantage, rule, "grpo, or another run.kind")
        if recipe.algorithm.dpo is not None:
            yield Violation("algorithm.dpo", GIVEN, "only run.kind: dpo reads it", "remove algorithm.dpo")
        if recipe.rollout_steps < 0:
            rule = f"must not pass run.steps = {recipe.run.steps}"
            yield Violation(f"{SFT}.steps", recipe.sft_steps, rule, str(recipe.run.steps))
        return
    if data.max_tokens is None:
        yield Violation("data.max_tokens", MISSING, f"required with run.kind: {kind}", "data.max_tokens: 1024")
    for key in _changed(recipe, _without_rollouts(recipe)):
        rule = f"run.kind: {kind} samples no rollouts, and nothing else than the default can have an effect"
        yield Violation(key, GIVEN, rule, f"remove {key}")
    if kind == "reward_model" and recipe.actor.lora is not None:
        yield Violation("actor.lora", GIVEN, "the new head of a reward model must be trained", "remove actor.lora")
    size, update = recipe.algorithm.group_size, recipe.phases.actor_update
    if update.mini_batch % size:
        nearest = str(max(1, update.mini_batch // size) * size)
        yield Violation("phases.actor_update.mini_batch", update.mini_batch, "must have whole pairs", nearest)
    if update.epochs > 1:
        rule = f"run.kind: {kind} takes one update a step; rows come again epoch by epoch (data/epochs)"
        yield Violation("phases.actor_update.epochs", update.epochs, rule, "1, and more run.steps")


def _without_rollouts(recipe: Recipe) -> Recipe:
    """Return the recipe of a run without rollouts with the values that say so in every key that describes rollouts."""
    unread = UNREAD | {"algorithm": AlgorithmSection.model_fields.keys() - FREE[recipe.run.kind]}
    if recipe.data.prompt_format == "token_ids":
        unread["data"] = UNREAD["data"] | {"prompt_format"}
    return type(recipe).model_validate(recipe.model_dump(exclude=unread))


def _changed(section: Section, expected: Section, above: str = "") -> Iterator[str]:
    """Yield the dotted keys in which a section differs from the expected one."""
    for (name, value), (_, default) in zip(section, expected, strict=True):
        if isinstance(value, Section) and type(value) is type(default):
            yield from _changed(value, default, f"{above}{name}.")
        elif value != default:
            yield f"{above}{name}"


# Keys of the supervised run that the warm-up is, and the keys that give their values.
NAMES = {
    "data.": f"{SFT}.data.",
    "phases.actor_update": f"{SFT}.actor_update",
    "phases.rollout.prompts": f"{SFT}.actor_update.mini_batch",
    "actor.optimizer": f"{SFT}.optimizer",
    "evaluation.": f"{SFT}.evaluation.",
    "run.steps": f"{SFT}.steps",
}


def _fill_max_prompt_tokens(given: Any) -> Any:
    return {"max_prompt_tokens": 1} | given if isinstance(given, dict) else given


class SupervisedStepsSection(Section):
    steps: Positive
    """The first steps of the run, among `run.steps`, which fine-tune the actor as a run of `run.kind: sft` does. Rollouts
    begin after them."""
    data: Annotated[DataSection, BeforeValidator(_fill_max_prompt_tokens)]
    """The rows of these steps, as `data` of a run of `run.kind: sft`, with its `max_tokens`."""
    actor_update: UpdatePhaseSection
    """How these steps divide their rows: one update a step, of `mini_batch` rows."""
    optimizer: LearningRateSection
    """The learning rate of these steps; all else is `actor.optimizer`'s. After them Adam forgets its moments, and the
    learning rate of `actor.optimizer` begins."""
    evaluation: EvaluationSection | None = None
    """The loss on held-out rows before the first of these steps, every `every` of them and after the last, as `evaluation`
    of a run of `run.kind: sft`; null for none."""

    def run_of(self, recipe: Recipe) -> Recipe:
        """Return the recipe of the supervised steps: a run of `run.kind: sft` of the same model, ranks and actor."""
        others = dict.fromkeys(("algorithm", "data", "evaluation", "reference", "teachers"), True)
        sections = recipe.model_dump(exclude=UNREAD | others)
        sections["run"] |= {"kind": "sft", "steps": self.steps}
        rate = self.optimizer
        rates = {"lr": rate.lr, "warmup_steps": rate.warmup_steps, "decay": rate.decay, "min_lr_share": rate.min_lr_share}
        sections["actor"]["optimizer"] |= rates
        sections["phases"] = {"actor_update": self.actor_update.model_dump()}
        sections["data"] = self.data.model_dump()
        sections["evaluation"] = None if self.evaluation is None else self.evaluation.model_dump()
        return type(recipe).model_validate(sections)


class WarmupSection(Section):
    sft: SupervisedStepsSection
    """Supervised fine-tuning on rows of data."""


def named_as_warmup(faults: list[Violation]) -> list[Violation]:
    """Return the faults of the supervised run that are the warm-up's own, under the keys of the warm-up."""

    def renamed(text: str) -> str:
        for name, key in NAMES.items():
            text = text.replace(name, key)
        return text

    return [
        Violation(renamed(fault.key), fault.value, renamed(fault.rule), renamed(fault.nearest))
        for fault in faults
        if fault.key.startswith(tuple(NAMES))
    ]
