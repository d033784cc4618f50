"""`warmup`, and what a run without rollouts (`run.kind` other than `rl`) has in the sections that describe rollouts.

Such a run is the same engine with other data: `data` gives the sequences, and one update a step trains on them. The sections
that a user leaves out get the values that say so; a resolved recipe shows them, and no others are legal. A warm-up is such a
run ahead of the first rollout, with the same roles and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from megarl.recipe.algorithm_section import AlgorithmSection
from megarl.recipe.data_section import DataSection
from megarl.recipe.evaluation_section import EvaluationSection
from megarl.recipe.phases_section import PhasesSection, RewardPhaseSection, RolloutPhaseSection, UpdatePhaseSection
from megarl.recipe.role_sections import LearningRateSection
from megarl.recipe.rollout_section import RolloutSection
from megarl.recipe.section import Positive, Section
from megarl.recipe.violation import GIVEN, MISSING, Violation, Violations
from megarl.recipe.weight_sync_section import WeightSyncSection

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe

# The section `algorithm` of each kind, and the keys of it that a user may set.
_OF_PAIRS = {"group_size": 2, "policy_loss": {"kind": "policy_gradient"}, "aggregation": "sequence_sum"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "sft": {"advantage": "supervised", "group_size": 1, "policy_loss": {"kind": "policy_gradient"}},
    "dpo": {"advantage": "dpo", **_OF_PAIRS, "dpo": {}},
    "reward_model": {"advantage": "bradley_terry", **_OF_PAIRS},
}
FREE = {"sft": ("aggregation", "entropy_coefficient"), "dpo": ("dpo",), "reward_model": ()}
FREE_OF_EVALUATION = ("prompts", "max_prompts", "every")


def fill_sections(given: Any) -> Any:
    """Return a recipe's plain data with the sections that a supervised run leaves out; of any other kind as it is."""
    kind = given["run"].get("kind") if isinstance(given, dict) and isinstance(given.get("run"), dict) else None
    if kind not in ALGORITHMS:
        return given
    filled, algorithm = dict(given), ALGORITHMS[kind]

    def fill(name: str, **values: Any) -> None:
        if isinstance(section := filled.get(name, {}), dict):
            filled[name] = values | section

    def number(*path: str) -> int:
        """Return a number that the user gave, or one that lets other rules speak."""
        value: Any = given
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value if type(value) is int and value > 1 else 2

    fill("algorithm", **algorithm)
    fill("data", max_prompt_tokens=1)
    fill("rollout", max_new_tokens=number("data", "max_tokens") - 1)
    mini_batch = number("phases", "actor_update", "mini_batch")
    fill("phases", rollout={"prompts": max(1, mini_batch // algorithm["group_size"])})
    return filled


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
        return
    if data.max_tokens is None:
        yield Violation("data.max_tokens", MISSING, f"required with run.kind: {kind}", "data.max_tokens: 1024")
        return
    for key in _changed(recipe, _without_rollouts(recipe)):
        rule = f"run.kind: {kind} samples no rollouts, and nothing else than the default can have an effect"
        yield Violation(key, GIVEN, rule, f"remove {key}")
    if kind == "reward_model" and recipe.actor.lora is not None:
        yield Violation("actor.lora", GIVEN, "the new head of a reward model must be trained", "remove actor.lora")
    if kind == "reward_model" and recipe.actor.freeze.head:
        yield Violation("actor.freeze.head", True, "the new head of a reward model must be trained", "false")
    size, update = recipe.algorithm.group_size, recipe.phases.actor_update
    if update.mini_batch % size:
        yield Violation("phases.actor_update.mini_batch", update.mini_batch, "must have whole pairs", f"{size}")
    if update.epochs > 1:
        rule = f"run.kind: {kind} takes one update a step; rows come again epoch by epoch (data/epochs)"
        yield Violation("phases.actor_update.epochs", update.epochs, rule, "1, and more run.steps")


def _without_rollouts(recipe: Recipe) -> Recipe:
    """Return the recipe of a run without rollouts with the values that say so in every key that describes rollouts."""
    data, phases, evaluation = recipe.data, recipe.phases, recipe.evaluation
    free = {name: getattr(recipe.algorithm, name) for name in FREE[recipe.run.kind]}
    algorithm = AlgorithmSection.model_validate(ALGORITHMS[recipe.run.kind] | free)
    prompts = RolloutPhaseSection(prompts=max(1, phases.actor_update.mini_batch // algorithm.group_size))
    rows: dict[str, Any] = {"max_prompt_tokens": 1, "answer_format": "text", "curriculum": None}
    if data.prompt_format == "token_ids":
        rows["prompt_format"] = "text"
    if evaluation is not None:
        evaluation = EvaluationSection(**{name: getattr(evaluation, name) for name in FREE_OF_EVALUATION})
    sections: dict[str, Any] = {
        "run": recipe.run.model_copy(update={"dump_rollouts": False}),
        "algorithm": algorithm,
        "data": data.model_copy(update=rows),
        "actor": recipe.actor.model_copy(update={"router_replay": False}),
        "rollout": RolloutSection(max_new_tokens=(data.max_tokens or 2) - 1),
        "phases": phases.model_copy(update={"rollout": prompts, "reward": RewardPhaseSection()}),
        "weight_sync": WeightSyncSection(),
        "evaluation": evaluation,
        "reward": (),
    }
    return recipe.model_copy(update=sections | dict.fromkeys(("environment", "critic", "reward_model")))


def _changed(section: Section, expected: Section, above: str = "") -> Iterator[str]:
    """Yield the dotted keys in which a section differs from the expected one."""
    for (name, value), (_, default) in zip(section, expected, strict=True):
        if isinstance(value, Section) and type(value) is type(default):
            yield from _changed(value, default, f"{above}{name}.")
        elif value != default:
            yield f"{above}{name}"


SFT = "warmup.sft"
# Keys of the supervised run that the warm-up is, and the keys that give their values.
NAMES = {
    "data.": f"{SFT}.data.",
    "phases.actor_update": f"{SFT}.actor_update",
    "phases.rollout.prompts": f"{SFT}.actor_update.mini_batch",
    "actor.optimizer": f"{SFT}.optimizer",
    "evaluation.": f"{SFT}.evaluation.",
    "run.steps": f"{SFT}.steps",
}


class SupervisedStepsSection(Section):
    steps: Positive
    """The first steps of the run, among `run.steps`, which fine-tune the actor as a run of `run.kind: sft` does. Rollouts
    begin after them."""
    data: DataSection
    """The rows of these steps, as `data` of a run of `run.kind: sft`, with its `max_tokens`."""
    actor_update: UpdatePhaseSection
    """How these steps divide their rows: one update a step, of `mini_batch` rows."""
    optimizer: LearningRateSection
    """The learning rate of these steps; all else is `actor.optimizer`'s. After them Adam forgets its moments, and the
    learning rate of `actor.optimizer` begins."""
    evaluation: EvaluationSection | None = None
    """The loss on held-out rows before the first of these steps, every `every` of them and after the last, as `evaluation`
    of a run of `run.kind: sft`; null for none."""

    @model_validator(mode="before")
    @classmethod
    def _limits_whole_sequences(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(data := given.get("data"), dict):
            return given | {"data": {"max_prompt_tokens": 1} | data}
        return given

    def run_of(self, recipe: Recipe) -> Recipe:
        """Return the recipe of the supervised steps: a run of `run.kind: sft` of the same model, ranks and actor."""
        rate = self.optimizer
        rates = {"lr": rate.lr, "warmup_steps": rate.warmup_steps, "decay": rate.decay, "min_lr_share": rate.min_lr_share}
        optimizer = recipe.actor.optimizer.model_copy(update=rates)
        of_rows = {"data": self.data, "evaluation": self.evaluation}
        sections: dict[str, Any] = {
            "run": recipe.run.model_copy(update={"kind": "sft", "steps": self.steps}),
            "algorithm": AlgorithmSection.model_validate(ALGORITHMS["sft"]),
            "actor": recipe.actor.model_copy(update={"optimizer": optimizer}),
            "phases": PhasesSection(rollout=recipe.phases.rollout, actor_update=self.actor_update),
            "teachers": {},
        }
        absent = dict.fromkeys(("reference", "warmup"))
        # The warm-up's own sections stay as they are, so that the rules of a supervised run see them.
        return _without_rollouts(recipe.model_copy(update=sections | of_rows | absent)).model_copy(update=of_rows)


class WarmupSection(Section):
    sft: SupervisedStepsSection
    """Supervised fine-tuning on rows of data."""


def warmup_rules(recipe: Recipe) -> Violations:
    """A warm-up precedes rollouts, is no longer than the run, and has its own numbers."""
    if recipe.warmup is None:
        return
    if recipe.run.is_supervised:
        rule = f"every step of run.kind: {recipe.run.kind} is supervised"
        yield Violation("warmup", GIVEN, rule, "remove warmup, or run.kind: rl")
    section, steps = recipe.warmup.sft, recipe.run.steps
    if section.steps > steps:
        yield Violation(f"{SFT}.steps", section.steps, f"must not pass run.steps = {steps}", str(steps))
    if recipe.reference_is_warm and recipe.layout_section("reference") != recipe.actor.layout:
        rule = "after warmup.sft each rank copies the actor's shards to the reference, and this is not actor.layout"
        nearest = "remove reference.layout, or name the reference's model in reference.path"
        yield Violation("reference.layout", GIVEN, rule, nearest)


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
