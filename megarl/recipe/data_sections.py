"""What can be written under `data` in a recipe: where prompts come from, and in which order."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.recipe.sections import Count, Positive, Section


class FilePromptsSection(Section):
    kind: Literal["jsonl", "parquet"]
    """Format of the file."""
    path: Annotated[str, Field(min_length=1)]
    """The file, from the working directory."""
    prompt_field: Annotated[str, Field(min_length=1)]
    """Column that holds the question."""
    answer_field: Annotated[str, Field(min_length=1)]
    """Column that holds the answer."""


class ReasoningGymPromptsSection(Section):
    kind: Literal["reasoning_gym"]
    """Generated questions of the reasoning-gym package."""
    task: Annotated[str, Field(min_length=1)]
    """reasoning-gym's name of the task."""
    size: Positive
    """Questions to generate."""
    seed: Count | None = None
    """Seed of the generator; null takes `run.seed`."""
    options: dict[str, Any] = {}
    """Options of the task, as reasoning-gym names them."""


PromptsSection = Annotated[FilePromptsSection | ReasoningGymPromptsSection, Field(discriminator="kind")]


class DataSection(Section):
    prompts: PromptsSection
    """Where questions and answers come from."""
    max_prompt_tokens: Positive
    """Longer prompts are dropped when the data is loaded, and counted."""
    system_prompt: str | None = None
    """System message of the chat; null leaves it to the chat template."""
    prompt_template: str | None = None
    """Text around the question, with `{question}` in it; null gives the question alone."""
    chat_template: bool = True
    """Render the prompt as a chat with the model's own template."""
    shuffle: bool = True
    """A new order of the prompts in each epoch."""
