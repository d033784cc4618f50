"""Text to tokens and back: the tokenizer, the rendering of a question, and the tokens that end an answer.

transformers is imported where it is used: that takes seconds, and of all trainer ranks only the first has use for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a Hugging Face directory or hub name; raises ValueError naming `model.path`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.path is {path!r}, from which no tokenizer loads: {error}; "
            "give a directory with tokenizer.json, or a hub name that this machine can reach"
        ) from error


def render_questions(
    tokenizer: Any,
    questions: list[str],
    system_prompt: str | None,
    prompt_template: str | None,
    chat_template: bool,
) -> list[list[int]]:
    """Token ids of each question, as the policy will see it up to the point where its answer starts.

    `prompt_template` puts the question in the place of `{question}` (other braces are left alone, LaTeX needs
    them). With `chat_template` the tokenizer's own template writes every special token; without it the text
    is tokenized as it is, a system prompt standing before it with an empty line between.
    Raises ValueError naming `data.prompt_template`, or `data.chat_template` and a system prompt that the template refuses.
    """
    if prompt_template is not None and "{question}" not in prompt_template:
        raise ValueError(
            f"data.prompt_template is {prompt_template!r}, which has no {{question}}; "
            "write {question} where the question belongs"
        )
    if prompt_template is not None:
        questions = [prompt_template.replace("{question}", question) for question in questions]
    if not chat_template:
        prefix = "" if system_prompt is None else f"{system_prompt}\n\n"
        return tokenizer([prefix + question for question in questions])["input_ids"]
    check_template(tokenizer)
    conversations = [_chat([{"role": "user", "content": question}], system_prompt) for question in questions]
    return _render(tokenizer, conversations, system_prompt)


def render_chat(tokenizer: Any, messages: list[dict[str, str]], system_prompt: str | None) -> list[int]:
    """The same for a chat. Raises ValueError with what the model's template has against it."""
    check_template(tokenizer)
    (ids,) = _render(tokenizer, [_chat(messages, system_prompt)], system_prompt)
    return ids


@contextmanager
def rendering_errors(system_prompt: str | None = None) -> Iterator[None]:
    """What a chat template has against messages, the first of which may be a system prompt, becomes a ValueError. Around the
    template alone: a TypeError or KeyError of anything else is a fault of its own."""
    import jinja2

    try:
        yield
    except (jinja2.TemplateError, TypeError, KeyError) as error:
        way_out = "see data.prompt_format and data.chat_template"
        if system_prompt is not None:
            way_out += f", or leave data.system_prompt ({system_prompt[:40]!r}) out: its role is system"
        raise ValueError(f"the model's chat template refuses these messages: {error}; {way_out}") from error


def _chat(messages: list[dict[str, str]], system_prompt: str | None) -> list[dict[str, str]]:
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, *messages]


def check_template(tokenizer: Any) -> None:
    """Raises ValueError naming `data.chat_template` where the tokenizer has none."""
    if not tokenizer.chat_template:
        raise ValueError(
            "data.chat_template is true, but the model's tokenizer brings no chat template; "
            "set data.chat_template=false or use an instruction-tuned model"
        )


def _render(tokenizer: Any, conversations: list[list[dict[str, str]]], system_prompt: str | None) -> list[list[int]]:
    with rendering_errors(system_prompt):
        texts = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, tokenize=False)
    # The template has written the special tokens; adding them again would double the first one.
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def stop_token_ids(path: str, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a completion, ascending.

    The engine runs without a tokenizer, so it must be told. Three sources, because checkpoints disagree: the
    generation config, the tokenizer's end token, and the special token that the chat template writes after an
    assistant's turn. Raises ValueError where none of them names one, or the template refuses such a turn.
    """
    from transformers import GenerationConfig

    stops: set[int] = set()
    try:
        ends = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a checkpoint without generation_config.json
        ends = None
    if ends is not None:
        stops.update(ends if isinstance(ends, list) else [ends])
    if tokenizer.eos_token_id is not None:
        stops.add(tokenizer.eos_token_id)
    stops.update(_chat_end(tokenizer))
    if not stops:
        raise ValueError(f"model.path is {path!r}, which names no end token; set eos_token_id in generation_config.json")
    return tuple(sorted(int(stop) for stop in stops))


def _chat_end(tokenizer: Any) -> list[int]:
    """The special token directly after an assistant's turn in the chat template, if there is one."""
    if not tokenizer.chat_template:
        return []
    answer = "forty-two"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    with rendering_errors():
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    _, found, tail = text.rpartition(answer)
    ids = tokenizer(tail.lstrip(), add_special_tokens=False)["input_ids"] if found else []
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return ids[:1] if ids and ids[0] in special else []
