"""Rules of the data: that files and tasks are there, and that formats, templates and curricula fit each other."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from megarl.recipe.data_sections import (
    HuggingFacePromptsSection,
    MixturePromptsSection,
    PromptsSection,
    ReasoningGymPromptsSection,
    SourceSection,
)
from megarl.recipe.recipe import Recipe
from megarl.recipe.violation import GIVEN, Violation

Violations = Iterator[Violation]


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
