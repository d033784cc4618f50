"""`data`: where prompts come from, in which order, and how they are rendered."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from megarl.recipe.section import BrokenRules, Count, FilePath, Positive, Section, Share, broken_rule
from megarl.recipe.violation import GIVEN, MISSING, Violation, Violations, closest_text

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


class PromptSource(Section):
    weight: Annotated[float, Field(gt=0)] | None = None
    """In a mixture, the relative share of this part; null is 1."""


class PromptColumns(PromptSource):
    prompt_field: Annotated[str, Field(min_length=1)]
    """Column that holds the question."""
    answer_field: Annotated[str, Field(min_length=1)] | None = None
    """Column that holds the answer; a dotted name goes into nested objects. null only if `run.kind` is not `rl`: the prompt
    field then holds whole texts or chats."""
    rejected_field: Annotated[str, Field(min_length=1)] | None = None
    """Column that holds the answer that lost against `answer_field`'s, for `run.kind: dpo` and `reward_model`."""

    def broken_rules(self) -> BrokenRules:
        for name in ("answer_field", "rejected_field"):
            if getattr(self, name) == self.prompt_field:
                yield name, "is prompt_field too, so that the prompt is the answer", "the field that holds the answer"


class FilePromptsSection(PromptColumns):
    kind: Literal["jsonl", "parquet"]
    """Format of the file; `jsonl` also reads a JSON array, and gzip."""
    path: FilePath
    """The file, from the working directory."""


class HuggingFacePromptsSection(PromptColumns):
    kind: Literal["huggingface"]
    """A data set of the `datasets` library."""
    path: FilePath
    """A directory that `save_to_disk` wrote, a directory of data files, or a hub name that is cached or can be reached."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Configuration of the data set, where it has several."""
    split: Annotated[str, Field(min_length=1)] = "train"
    """Split to read; a slice like `train[:1000]` works, except for what `save_to_disk` wrote."""


class ReasoningGymPromptsSection(PromptSource):
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


SourceSection = FilePromptsSection | HuggingFacePromptsSection | ReasoningGymPromptsSection


class MixturePromptsSection(Section):
    kind: Literal["mixture"]
    """Several sources at once, each with its order and epochs."""
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
    """Skip prompts whose last pass rate was below this."""
    high: Share
    """Skip prompts whose last pass rate was above this. Prompts without a rate are used."""

    pass_reward: float = 1.0
    """A completion passes if its reward, without the reward model's part, is at least this."""
    revisit: Positive = 4
    """Skip a prompt for this many epochs; in the next epoch it is used again and gets a new rate."""

    def broken_rules(self) -> BrokenRules:
        if self.low > self.high:
            yield "high", f"must not be below data.curriculum.low = {self.low:g}", f"{self.low:g}"


# Options that megarl sets when it renders a chat, and options that change the type of the result.
_RESERVED = (
    "conversation", "messages", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now",
)  # fmt: skip


class DataSection(Section):
    prompts: PromptsSection
    """Where questions and answers come from."""
    max_prompt_tokens: Positive
    """Longest prompt that is used, in tokens as rendered."""
    max_tokens: Annotated[int, Field(ge=2)] | None = None
    """Longest sequence of a run whose `run.kind` is not `rl`, in tokens as rendered, where no prompt has a limit of its own;
    null in a run with rollouts."""
    on_long_prompt: Literal["stop", "skip"] = "skip"
    """A longer prompt (or sequence, with `max_tokens`) ends the run before it starts, or is skipped and counted in
    `data/num_dropped`."""
    system_prompt: str | None = None
    """System message of the chat; null leaves it to the chat template. Agents send their own."""
    prompt_template: str | None = None
    """Text around the question, with `{question}` in it; null gives the question alone. Agents send their own."""

    @field_validator("prompt_template")
    @classmethod
    def _holds_the_question(cls, template: str | None) -> str | None:
        if template is not None and "{question}" not in template:
            raise broken_rule("must contain {question}", f"{template} {{question}}".strip())
        return template

    chat_template: bool = True
    """Render the prompt as a chat with the model's own template."""
    template_options: dict[str, Any] = {}
    """Options of the chat template, as `{enable_thinking: false}`; see the model's card."""

    @field_validator("template_options")
    @classmethod
    def _are_the_template_s(cls, options: dict[str, Any]) -> dict[str, Any]:
        if reserved := ", ".join(name for name in options if name in _RESERVED):
            raise broken_rule(f"megarl sets {reserved} itself", f"remove {reserved}")
        return options

    shuffle: bool = True
    """A new order of the prompts in each epoch."""
    prompt_format: Literal["text", "messages", "token_ids"] = "text"
    """What a prompt field holds: a text or number; a chat, a list of objects with `role` and `content` for the chat
    template; or token ids, which go to the engines unchanged."""
    answer_format: Literal["text", "json"] = "text"
    """What an answer field holds: a text or number; with `json` also a list or an object, whose JSON text rewards get,
    like the tests of `reward` kind `code`."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """A row without the named fields, with a value of the wrong type, an answer that a reward cannot use, or token ids
    outside the vocabulary ends the run before it starts, or is skipped and counted in `data/num_bad_rows`."""
    curriculum: CurriculumSection | None = None
    """Skip prompts that are now too easy or too hard; null uses each once an epoch."""


def data_rules(recipe: Recipe) -> Violations:
    """Prompts that are missing, and formats, templates and curriculum that do not fit each other."""
    data, key, form = recipe.data, "data.prompt_format", recipe.data.prompt_format
    sources = list(_sources("data.prompts", data.prompts))
    evaluation = [] if recipe.evaluation is None else list(_sources("evaluation.prompts", recipe.evaluation.prompts))
    for place, source in [*sources, *evaluation]:
        yield from _source_exists(place, source)
        yield from _fields_fit_kind(recipe, place, source)
        if source.weight is not None and ".parts." not in place:
            rule = "is the share in a mixture, and there is one source"
            yield Violation(f"{place}.weight", source.weight, rule, f"remove {place}.weight")
    if data.system_prompt is not None and not data.chat_template:
        rule = "needs data.chat_template: true; without a chat there is no system message"
        yield Violation("data.system_prompt", data.system_prompt, rule, "put it into data.prompt_template")
    renders = data.chat_template and (form != "token_ids" or recipe.environment is not None)
    if data.template_options and not renders:
        rule = "no chat is rendered (data.chat_template, data.prompt_format)"
        yield Violation("data.template_options", data.template_options, rule, "remove data.template_options")
    if form != "text" and data.prompt_template is not None:
        yield Violation("data.prompt_template", data.prompt_template, f"needs {key}: text", "remove data.prompt_template")
    if form == "messages" and not data.chat_template:
        yield Violation(key, form, "needs data.chat_template: true, which renders them", "text")
    if form == "token_ids" and data.system_prompt is not None:
        yield Violation("data.system_prompt", data.system_prompt, f"{key}: {form} is complete", "remove data.system_prompt")
    if form != "text" and any(source.kind == "reasoning_gym" for _, source in sources):
        yield Violation(key, form, "reasoning_gym makes texts", "text")
    if recipe.environment is not None and recipe.environment.kind != "class":
        rule = f"has no effect: with environment.kind: {recipe.environment.kind} the agent makes its own messages"
        for name, value in (("system_prompt", data.system_prompt), ("prompt_template", data.prompt_template)):
            if value is not None:
                yield Violation(f"data.{name}", value, rule, f"remove data.{name}, and let the agent send it")
    if data.curriculum is not None and not recipe.verifiers and recipe.environment is None:
        rule = "a pass rate is read from rewards, and the only one is of kind: model"
        yield Violation("data.curriculum", GIVEN, rule, "remove data.curriculum, or add a verifier to reward")


def _fields_fit_kind(recipe: Recipe, key: str, source: SourceSection) -> Violations:
    """A run with rollouts needs answers; one that learns from pairs, and no other, needs rejected answers."""
    if source.kind == "reasoning_gym":
        if recipe.run.learns_from_pairs:
            yield Violation(f"{key}.kind", source.kind, f"has no pairs, and run.kind is {recipe.run.kind}", "jsonl")
        return
    kind, pairs, rejected = recipe.run.kind, recipe.run.learns_from_pairs, f"{key}.rejected_field"
    is_message = recipe.data.prompt_format == "text" and (recipe.data.chat_template or pairs)
    if source.answer_field is None and (is_message or not recipe.run.is_supervised):
        rule, nearest = "required: column that holds the answer", "answer_field: answer"
        if recipe.run.is_supervised:
            rule = "required: the prompt field is a user's message, and nothing would be trained"
            nearest += ", data.prompt_format: messages, or data.chat_template: false for plain texts"
        yield Violation(f"{key}.answer_field", MISSING, rule, nearest)
    if source.rejected_field is None and pairs:
        yield Violation(rejected, MISSING, f"required: run.kind: {kind} learns from pairs", "rejected_field: rejected")
    if source.rejected_field is not None and not pairs:
        yield Violation(rejected, source.rejected_field, f"run.kind: {kind} learns from no pairs", f"remove {rejected}")


def _sources(key: str, prompts: PromptsSection) -> Iterator[tuple[str, SourceSection]]:
    if prompts.kind == "mixture":
        yield from ((f"{key}.parts.{number}", part) for number, part in enumerate(prompts.parts))
    else:
        yield key, prompts


def _source_exists(key: str, source: SourceSection) -> Violations:
    if source.kind == "reasoning_gym":
        # Read from the sources of reasoning-gym: importing it takes longer than the whole check.
        package = importlib.util.find_spec("reasoning_gym")
        if package is None or not package.submodule_search_locations:
            rule = "the package reasoning-gym is not installed"
            yield Violation(f"{key}.kind", "reasoning_gym", rule, "pip install reasoning-gym")
            return
        registered = re.compile(r"^(?:DATASET_NAME\s*=\s*|register_dataset\(\s*)[\"'](\w+)[\"']", re.MULTILINE)
        files = Path(package.submodule_search_locations[0]).rglob("*.py")
        tasks = sorted({name for file in files for name in registered.findall(file.read_text(encoding="utf-8"))})
        if source.task not in tasks:
            rule = "is no task of reasoning-gym"
            yield Violation(f"{key}.task", source.task, rule, closest_text(source.task, tasks))
    elif source.kind == "huggingface":
        # A relative path in the form of a hub name may be one; the start of the run asks the hub for it.
        if source.path.startswith((".", "/", "~")) and not Path(source.path).is_dir():
            yield Violation(f"{key}.path", source.path, "the directory does not exist", "what save_to_disk wrote")
    elif not Path(source.path).is_file():
        folder = Path(source.path).parent
        paths = sorted(str(file) for file in folder.glob(f"*.{source.kind}")) if folder.is_dir() else []
        close = difflib.get_close_matches(source.path, paths, 1, 0.5) or paths[:1]
        nearest = close[0] if close else f"a .{source.kind} file, from the working directory"
        yield Violation(f"{key}.path", source.path, "the file does not exist", nearest)
