"""`evaluation`: how a run is measured on prompts that it does not train on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from megarl.recipe.data_section import PromptsSection
from megarl.recipe.section import Count, Positive, Section, Weight
from megarl.recipe.violation import Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


def evaluation(recipe: Recipe) -> Violations:
    """There are engines to answer, completions for each k, and rewards that need no trainer rank."""
    section = recipe.evaluation
    if section is None:
        return
    for number, asked in enumerate(section.pass_at):
        if asked > section.completions:
            rule = f"pass@k needs k completions of a prompt, and evaluation.completions is {section.completions}"
            yield Violation(f"evaluation.pass_at.{number}", asked, rule, str(section.completions))
    if section.completions > recipe.num_sequences:
        rule = f"deadlines are meant for the {recipe.num_sequences} sequences of a step, of which a prompt takes this many"
        yield Violation("evaluation.completions", section.completions, rule, str(recipe.num_sequences))
    if section.temperature is not None and 0 < section.temperature < 0.01:
        rule = "vLLM would take 0.01 in its place: must be 0, for the most likely token, or at least 0.01"
        yield Violation("evaluation.temperature", section.temperature, rule, "0.01")
    if section.temperature == 0 and section.completions > 1:
        rule = "without chance all completions of a prompt are the same (evaluation.temperature is 0)"
        yield Violation("evaluation.completions", section.completions, rule, "1")
    if section.every > recipe.run.steps:
        rule = f"the run has {recipe.run.steps} steps (run.steps)"
        yield Violation("evaluation.every", section.every, rule, str(recipe.run.steps))
    if not recipe.verifiers and recipe.environment is None:
        rule = "an evaluation is scored by the parts of `reward` that judge texts, and there is none"
        yield Violation("evaluation", "", rule, "add such a part to `reward`, or leave the section out")
    if recipe.rollout.replay is not None:
        rule = "replayed rollouts have no engines to answer other prompts"
        yield Violation("evaluation", "", rule, "leave the section out, or rollout.replay")


class EvaluationSection(Section):
    prompts: PromptsSection
    """Where the held-out questions and answers come from; they are rendered as `data` says. Those that are among the
    training prompts are left out, and counted."""
    max_prompts: Positive | None = None
    """The first that many of them; null for all."""
    every: Count = 0
    """Evaluate after every that many steps; in any case before the first step and after the last."""
    completions: Positive = 1
    """Completions of each prompt."""
    temperature: Weight | None = None
    """0 for the most likely token, else at least 0.01, which is vLLM's least; null takes `rollout.temperature`."""
    pass_at: Annotated[tuple[Positive, ...], Field(min_length=1, strict=False)] = (1,)
    """Each k of pass@k, how likely one of k completions passes; at most `completions`."""
    pass_reward: float = 1.0
    """The reward from which on a completion passes."""
