"""What can be written under `data` in a recipe: where prompts come from, and in which order."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.recipe.sections import Count, Positive, Section, Share


class FilePromptsSection(Section):
    kind: Literal["jsonl", "parquet"]
    """Format of the file; `jsonl` also reads one JSON array, and what gzip has packed."""
    path: Annotated[str, Field(min_length=1)]
    """The file, from the working directory."""
    prompt_field: Annotated[str, Field(min_length=1)]
    """Column that holds the question."""
    answer_field: Annotated[str, Field(min_length=1)]
    """Column that holds the answer; a dotted name goes into nested objects."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """In a mixture, the share of this part against those of the others; null is 1."""


class HuggingFacePromptsSection(Section):
    kind: Literal["huggingface"]
    """A data set of the `datasets` library."""
    path: Annotated[str, Field(min_length=1)]
    """A directory that `save_to_disk` wrote, a directory of data files, or a hub name that is cached or can be reached."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Configuration of the data set, where it has several."""
    split: Annotated[str, Field(min_length=1)] = "train"
    """Split to read; but for what `save_to_disk` wrote, a slice as `train[:1000]` will do."""
    prompt_field: Annotated[str, Field(min_length=1)]
    """Column that holds the question."""
    answer_field: Annotated[str, Field(min_length=1)]
    """Column that holds the answer; a dotted name goes into nested objects."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """In a mixture, the share of this part against those of the others; null is 1."""


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
    weight: Annotated[float, Field(gt=0)] | None = None
    """In a mixture, the share of this part against those of the others; null is 1."""


SourceSection = FilePromptsSection | HuggingFacePromptsSection | ReasoningGymPromptsSection


class MixturePromptsSection(Section):
    kind: Literal["mixture"]
    """Several sources at once, each with an order and epochs of its own."""
    parts: Annotated[tuple[Annotated[SourceSection, Field(discriminator="kind")], ...], Field(min_length=1, strict=False)]
    """Sources with their `weight`. The next prompt comes from the part that is furthest behind its share."""

    @property
    def weights(self) -> tuple[float, ...]:
        """Shares of the parts, which sum to 1."""
        given = [1.0 if part.weight is None else part.weight for part in self.parts]
        return tuple(weight / sum(given) for weight in given)


PromptsSection = Annotated[SourceSection | MixturePromptsSection, Field(discriminator="kind")]


class CurriculumSection(Section):
    low: Share
    """A prompt whose last pass rate is below is passed over, ..."""
    high: Share
    """... and so is one whose last pass rate is above. Prompts without a rate are taken."""
    pass_reward: float = 1.0
    """A completion has passed where its reward, as `reward` sums it without a reward model, is at least this."""
    revisit: Positive = 4
    """In that many epochs a prompt is passed over; in the next it is taken again, and gets a new rate."""


class DataSection(Section):
    prompts: PromptsSection
    """Where questions and answers come from."""
    max_prompt_tokens: Positive
    """Tokens of the longest prompt that is used, as rendered."""
    on_long_prompt: Literal["stop", "skip"] = "skip"
    """What becomes of a row with a longer prompt: it ends the run before it starts, or is left out and counted in
    `data/num_dropped`."""
    system_prompt: str | None = None
    """System message of the chat; null leaves it to the chat template."""
    prompt_template: str | None = None
    """Text around the question, with `{question}` in it; null gives the question alone."""
    chat_template: bool = True
    """Render the prompt as a chat with the model's own template."""
    template_options: dict[str, Any] = {}
    """What the chat template is told beside the messages, as `{enable_thinking: false}`; see the model's card."""
    shuffle: bool = True
    """A new order of the prompts in each epoch."""
    prompt_format: Literal["text", "messages", "token_ids"] = "text"
    """What a prompt field holds: a text or number; a chat, as a list of objects with `role` and `content`, which the chat
    template renders; or token ids, which go to the engines as they are."""
    answer_format: Literal["text", "json"] = "text"
    """What an answer field holds: a text or number; or with `json` also a list or an object, of which rewards get the JSON
    text, as the tests of `reward` kind `code`."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """What becomes of a row without the named fields, with a value of the wrong type, with an answer that a reward cannot
    judge by, or with token ids that the model has not: it ends the run before it starts, or is left out and counted in
    `data/num_bad_rows`."""
    curriculum: CurriculumSection | None = None
    """Pass over prompts that are too easy or too hard by now; null takes each once an epoch."""
