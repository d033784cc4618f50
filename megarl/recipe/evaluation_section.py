"""How a run is measured on prompts that it does not train on."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megarl.recipe.data_sections import PromptsSection
from megarl.recipe.sections import Count, Positive, Section, Weight


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
