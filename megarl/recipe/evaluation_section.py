"""`evaluation`: how a run is measured on prompts that it does not train on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, field_validator

from megarl.recipe.data_section import PromptsSection
from megarl.recipe.section import BrokenRules, Count, Positive, Section, Weight, broken_rule
from megarl.recipe.violation import GIVEN, Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


class EvaluationSection(Section):
    prompts: PromptsSection
    """Held-out questions and answers, rendered as `data` says. Those among the training prompts are left out and counted. If
    `run.kind` is not `rl`, an evaluation is the mean loss of these rows, in batches of a step's size."""
    max_prompts: Positive | None = None
    """Use only the first this many; null uses all."""
    every: Count = 0
    """Evaluate every this many steps, and always before the first step and after the last."""
    completions: Positive = 1
    """Completions of each prompt."""
    temperature: Weight | None = None
    """0 for the most likely token, or at least 0.01, vLLM's least; null takes `rollout.temperature`."""

    @field_validator("temperature")
    @classmethod
    def _vllm_takes_it(cls, temperature: float | None) -> float | None:
        if temperature is not None and 0 < temperature < 0.01:
            rule = "vLLM would take 0.01 in its place: must be 0, for the most likely token, or at least 0.01"
            raise broken_rule(rule, "0.01")
        return temperature

    pass_at: Annotated[tuple[Positive, ...], Field(min_length=1, strict=False)] = (1,)
    """Each k of pass@k, how likely one of k completions passes; at most `completions`."""
    pass_reward: float = 1.0
    """A completion passes if its reward is at least this."""

    def broken_rules(self) -> BrokenRules:
        if self.temperature == 0 and self.completions > 1:
            rule = "without chance all evaluation.completions of a prompt are the same"
            yield "temperature", rule, "evaluation.completions: 1"
        if max(self.pass_at) > self.completions:
            rule = f"pass@k needs k completions of a prompt, and evaluation.completions is {self.completions}"
            yield "pass_at", rule, f"at most {self.completions}"


def evaluation_rules(recipe: Recipe) -> Violations:
    """Evaluations that deadlines, rewards or replayed rollouts do not allow."""
    section = recipe.evaluation
    if section is None or recipe.run.is_supervised:
        return
    if section.completions > recipe.num_rollouts:
        rule = f"deadlines are meant for the {recipe.num_rollouts} sequences of a step, of which a prompt takes this many"
        yield Violation("evaluation.completions", section.completions, rule, str(recipe.num_rollouts))
    if not recipe.verifiers and recipe.environment is None:
        rule = "an evaluation is scored by the parts of `reward` that judge texts, and there is none"
        yield Violation("evaluation", GIVEN, rule, "add such a part to `reward`, or leave the section out")
    if recipe.rollout.replay is not None:
        rule = "replayed rollouts have no engines to answer other prompts"
        yield Violation("evaluation", GIVEN, rule, "leave the section out, or rollout.replay")
