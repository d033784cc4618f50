"""`warmup`: supervised steps ahead of the first rollout, which are a supervised run of the same roles and ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from megarl.recipe.algorithm_section import AlgorithmSection
from megarl.recipe.data_section import DataSection
from megarl.recipe.phases_section import PhasesSection, RolloutPhaseSection, UpdatePhaseSection
from megarl.recipe.role_sections import LearningRateSection
from megarl.recipe.rollout_section import RolloutSection
from megarl.recipe.section import Positive, Section
from megarl.recipe.supervised import ALGORITHMS
from megarl.recipe.violation import GIVEN, Violation, Violations
from megarl.recipe.weight_sync_section import WeightSyncSection

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe

SFT = "warmup.sft"
# Keys of the supervised run that the warm-up is, and the keys that give their values.
NAMES = {
    "data.": f"{SFT}.data.",
    "phases.actor_update": f"{SFT}.actor_update",
    "phases.rollout.prompts": f"{SFT}.actor_update.mini_batch",
    "actor.optimizer": f"{SFT}.optimizer",
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

    @model_validator(mode="before")
    @classmethod
    def _limits_whole_sequences(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(data := given.get("data"), dict):
            return given | {"data": {"max_prompt_tokens": 1} | data}
        return given

    def run_of(self, recipe: Recipe) -> Recipe:
        """Return the recipe of the supervised steps: a run of `run.kind: sft` of the same model, ranks and actor."""
        rates, update = self.optimizer, self.actor_update
        optimizer = recipe.actor.optimizer.model_copy(
            update={
                "lr": rates.lr,
                "warmup_steps": rates.warmup_steps,
                "decay": rates.decay,
                "min_lr_share": rates.min_lr_share,
            }
        )
        sections: dict[str, Any] = {
            "run": recipe.run.model_copy(update={"kind": "sft", "steps": self.steps, "dump_rollouts": False}),
            "algorithm": AlgorithmSection.model_validate(ALGORITHMS["sft"]),
            "data": self.data,
            "actor": recipe.actor.model_copy(update={"optimizer": optimizer, "router_replay": False}),
            "rollout": RolloutSection(max_new_tokens=(self.data.max_tokens or 2) - 1),
            "phases": PhasesSection(rollout=RolloutPhaseSection(prompts=update.mini_batch), actor_update=update),
            "weight_sync": WeightSyncSection(),
            "reward": (),
            "teachers": {},
        }
        absent = ("environment", "reference", "critic", "reward_model", "evaluation", "warmup")
        return recipe.model_copy(update=sections | dict.fromkeys(absent))


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
    if section.actor_update.micro_batch.max_tokens == "auto":
        rule = "must be a number: auto is for the phases of a rollout's step"
        yield Violation(f"{SFT}.actor_update.micro_batch.max_tokens", "auto", rule, "a number of tokens")
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
