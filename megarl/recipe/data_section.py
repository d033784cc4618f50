"""`data`: where prompts come from, in which order, and how they are rendered."""

from __future__ import annotations

import difflib
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from megarl.recipe.section import Count, FilePath, Positive, Section, Share
from megarl.recipe.violation import GIVEN, Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


def sources(recipe: Recipe) -> Violations:
    """Each is there."""
    yield from _prompts("data.prompts", recipe.data.prompts)
    if recipe.evaluation is not None:
        yield from _prompts("evaluation.prompts", recipe.evaluation.prompts)


def _prompts(key: str, prompts: PromptsSection) -> Violations:
    if isinstance(prompts, MixturePromptsSection):
        for number, part in enumerate(prompts.parts):
            yield from _source(f"{key}.parts.{number}", part)
        return
    yield from _source(key, prompts)
    if prompts.weight is not None:
        rule = "is the share in a mixture, and there is one source"
        yield Violation(f"{key}.weight", prompts.weight, rule, f"remove {key}.weight")


def _source(key: str, source: SourceSection) -> Violations:
    if isinstance(source, ReasoningGymPromptsSection):
        yield from _task(key, source.task)
    elif isinstance(source, HuggingFacePromptsSection):
        # What has the form of a hub name may be one, which is asked for when the run starts.
        if source.path.startswith((".", "/", "~")) and not Path(source.path).is_dir():
            yield Violation(f"{key}.path", source.path, "the directory does not exist", "what save_to_disk wrote")
    elif not Path(source.path).is_file():
        folder = Path(source.path).parent
        files = sorted(str(file) for file in folder.glob(f"*.{source.kind}")) if folder.is_dir() else []
        close = difflib.get_close_matches(source.path, files, 1, 0.5) or files[:1]
        nearest = close[0] if close else f"a .{source.kind} file, from the working directory"
        yield Violation(f"{key}.path", source.path, "the file does not exist", nearest)


def _task(key: str, task: str) -> Violations:
    # Read from the sources of reasoning-gym: importing it takes longer than the whole check.
    package = importlib.util.find_spec("reasoning_gym")
    if package is None or not package.submodule_search_locations:
        yield Violation(
            f"{key}.kind",
            "reasoning_gym",
            "the package reasoning-gym is not installed",
            "pip install reasoning-gym",
        )
        return
    registered = re.compile(r"^(?:DATASET_NAME\s*=\s*|register_dataset\(\s*)[\"'](\w+)[\"']", re.MULTILINE)
    files = Path(package.submodule_search_locations[0]).rglob("*.py")
    tasks = sorted({name for file in files for name in registered.findall(file.read_text(encoding="utf-8"))})
    if task not in tasks:
        close = difflib.get_close_matches(task, tasks, 1, 0.4)
        yield Violation(f"{key}.task", task, "is no task of reasoning-gym", (close or ["chain_sum"])[0])


def template(recipe: Recipe) -> Violations:
    template = recipe.data.prompt_template
    if template is not None and "{question}" not in template:
        yield Violation("data.prompt_template", template, "must contain {question}", f"{template} {{question}}".strip())


def system_prompt(recipe: Recipe) -> Violations:
    if recipe.data.system_prompt is not None and not recipe.data.chat_template:
        rule = "needs data.chat_template: true; without a chat there is no system message"
        yield Violation("data.system_prompt", recipe.data.system_prompt, rule, "put it into data.prompt_template")


# What megarl says itself when it renders a chat, and what would have it give something else than a text.
_RESERVED = (
    "conversation", "messages", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now",
)  # fmt: skip


def template_options(recipe: Recipe) -> Violations:
    """They reach a template, and are not what megarl says itself."""
    data = recipe.data
    for name in data.template_options:
        key = f"data.template_options.{name}"
        if name in _RESERVED:
            yield Violation(key, data.template_options[name], "megarl says this itself", f"remove {key}")
    if data.template_options and (
        not data.chat_template or (data.prompt_format == "token_ids" and recipe.environment is None)
    ):
        rule = "no chat is rendered (data.chat_template, data.prompt_format)"
        yield Violation("data.template_options", data.template_options, rule, "remove data.template_options")


def answer_is_not_asked(recipe: Recipe) -> Violations:
    """The policy does not see the answer in the place of the question."""
    sources = [("data.prompts", recipe.data.prompts)]
    if recipe.evaluation is not None:
        sources.append(("evaluation.prompts", recipe.evaluation.prompts))
    for key, prompts in sources:
        mixed = isinstance(prompts, MixturePromptsSection)
        parts = [(f"{key}.parts.{at}", part) for at, part in enumerate(prompts.parts)] if mixed else [(key, prompts)]
        for place, part in parts:
            if not isinstance(part, ReasoningGymPromptsSection) and part.prompt_field == part.answer_field:
                rule = "is prompt_field too, so that the prompt is the answer"
                yield Violation(f"{place}.answer_field", part.answer_field, rule, "the field that holds the answer")


def formats(recipe: Recipe) -> Violations:
    """Nothing is written around a prompt that is no text."""
    data = recipe.data
    key, form = "data.prompt_format", data.prompt_format
    if form == "text":
        return
    if data.prompt_template is not None:
        yield Violation("data.prompt_template", data.prompt_template, f"needs {key}: text", "remove data.prompt_template")
    if form == "messages" and not data.chat_template:
        yield Violation(key, form, "needs data.chat_template: true, which renders them", "text")
    if form == "token_ids" and data.system_prompt is not None:
        yield Violation("data.system_prompt", data.system_prompt, f"{key}: {form} is complete", "remove data.system_prompt")
    given = data.prompts.parts if isinstance(data.prompts, MixturePromptsSection) else (data.prompts,)
    if any(isinstance(source, ReasoningGymPromptsSection) for source in given):
        yield Violation(key, form, "reasoning_gym makes texts", "text")


def curriculum(recipe: Recipe) -> Violations:
    """Its bounds are in order, and there is a rate to compare with them."""
    section = recipe.data.curriculum
    if section is None:
        return
    if section.low > section.high:
        rule = f"must not pass data.curriculum.high = {section.high:g}"
        yield Violation("data.curriculum.low", section.low, rule, f"{section.high:g}")
    if not recipe.verifiers and recipe.environment is None:
        rule = "a pass rate is read from rewards, and the only one is of kind: model"
        yield Violation("data.curriculum", GIVEN, rule, "remove data.curriculum, or add a verifier to reward")


class FilePromptsSection(Section):
    kind: Literal["jsonl", "parquet"]
    """Format of the file; `jsonl` also reads one JSON array, and what gzip has packed."""
    path: FilePath
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
    path: FilePath
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
