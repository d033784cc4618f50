"""Text to tokens and back: the tokenizer, the rendering of a question, and the tokens that end an answer.

transformers is imported where it is used: that takes seconds, and of all trainer ranks only the first has use for it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megarl.models.model_files import check_has_tokenizer
from megarl.recipe.data_section import DataSection

logger = logging.getLogger(__name__)


def prompt_tokenizer(path: str, options: Mapping[str, Any], started: datetime) -> Any:
    """The tokenizer of a model that writes every chat with `data.template_options`, and as if it were `started`: a template
    that asks for the date, through `strftime_now`, gives a run that goes on tomorrow the prompts of today.

    Raises ValueError as `load_tokenizer`, and for an option that the chat template does not read.
    """
    tokenizer = load_tokenizer(path)
    if options:
        check_template(tokenizer)
        text = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
        for name in options:
            # These are transformers' own, which chooses the template by them or hands them on.
            if name not in ("chat_template", "tools", "documents") and not re.search(rf"\b{re.escape(name)}\b", text):
                raise ValueError(
                    f"data.template_options.{name} = {options[name]!r}: the model's chat template does not read {name!r}; "
                    "take it out, or give it the name that the template has"
                )
    given = dict(options)
    if "strftime_now" in str(tokenizer.chat_template):
        given["strftime_now"] = started.strftime  # in the place of transformers' own, which asks the clock
    if given:
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **given)
    return tokenizer


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a Hugging Face directory or hub name; raises ValueError naming `model.path`."""
    from transformers import AutoTokenizer

    try:
        if Path(path).is_dir():
            check_has_tokenizer(path)
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
        rows: list[list[int]] = tokenizer([prefix + question for question in questions])["input_ids"]
        # A text that was rendered before has its start token, and the tokenizer writes another one.
        start = [tokenizer.bos_token_id] * 2
        return [row[1:] if row[:2] == start else row for row in rows]
    check_template(tokenizer)
    conversations = [_chat([{"role": "user", "content": question}], system_prompt) for question in questions]
    return _render(tokenizer, conversations, system_prompt)


def render_chat(tokenizer: Any, messages: list[dict[str, str]], system_prompt: str | None) -> list[int]:
    """The same for a chat. Raises ValueError with what the model's template has against it, for a chat that ends with an
    answer, and for a second system message."""
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
    if messages[-1]["role"] in ("assistant", "model"):
        raise ValueError(
            f"the last message is of the role {messages[-1]['role']!r}, so that the prompt would hold an answer; cut it off"
        )
    if system_prompt is not None and any(message["role"] == "system" for message in messages):
        raise ValueError(
            f"the chat has a system message, and data.system_prompt ({system_prompt[:40]!r}) is another one; leave one out"
        )
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


def stop_token_ids(path: str, tokenizer: Any, num_tokens: int | None = None) -> tuple[int, ...]:
    """Every token that ends a completion, ascending.

    The engine runs without a tokenizer, so it must be told. Three sources, because checkpoints disagree: the generation
    config (or config.json where there is none, as vLLM does), the tokenizer's end token, and the special token that the chat
    template writes after an assistant's turn. Those beyond the `num_tokens` of the embedding are left out with a warning: no
    completion can hold them, and vLLM refuses them. Raises ValueError where none is left, one is no number, or the template
    refuses such a turn.
    """
    stops: dict[int, str] = {}
    file, config = Path(path) / "generation_config.json", Path(path) / "config.json"
    ends: Any = None
    if file.is_file():
        ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    elif config.is_file():
        from transformers import AutoConfig

        file, ends = config, AutoConfig.from_pretrained(path).eos_token_id  # with the family's own, where it names none
    for end in ends if isinstance(ends, list) else [] if ends is None else [ends]:
        if not isinstance(end, int) or isinstance(end, bool):
            raise ValueError(f"{file}: eos_token_id = {ends!r} must be a token's number, or a list of some")
        stops[end] = str(file)
    if tokenizer.eos_token_id is not None:
        stops.setdefault(int(tokenizer.eos_token_id), f"the tokenizer of {path}")
    for end in _chat_end(tokenizer):
        stops.setdefault(end, f"the chat template of {path}")
    usable = tuple(sorted(end for end in stops if num_tokens is None or 0 <= end < num_tokens))
    if not usable:
        beyond = f" but {sorted(stops)}, and the embedding has {num_tokens} rows" if stops else ""
        raise ValueError(
            f"model.path is {path!r}, which names no end token{beyond}; set eos_token_id in generation_config.json"
        )
    for end in sorted(stops.keys() - set(usable)):
        logger.warning("%s names the end token %d; left out: the model's embedding has %d rows", stops[end], end, num_tokens)
    return usable


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


Message = dict[str, str]
# In the place of a turn of the policy; no template has a reason to change it.
TURN = "forty-two"


class Observations:
    """Renders messages as `data` renders prompts; `num_tokens` is how many the model knows."""

    def __init__(self, tokenizer: Any, data: DataSection, num_tokens: int) -> None:
        """Raises ValueError naming `data.chat_template` where the model's chat template cannot go on behind a turn."""
        self._tokenizer, self._data, self._num_tokens = tokenizer, data, num_tokens
        if data.chat_template:
            check_template(tokenizer)
            with rendering_errors():
                shown = tokenizer.apply_chat_template(_conversation([]), tokenize=False)
            if TURN not in shown:
                raise ValueError("data.chat_template is true, and the model's chat template does not show what was said")

    def behind(self, last: int, messages: list[Message]) -> np.ndarray:
        """int32 token ids from behind a turn of the policy, which the token `last` ended, to where its next turn begins.

        Where the template ends a turn with that token it is not repeated. Raises ValueError for messages that cannot be
        rendered.
        """
        messages = _whole(messages)
        if not self._data.chat_template:
            return self._known(self._ids(_plain(messages)))
        with rendering_errors():
            text = self._tokenizer.apply_chat_template(_conversation(messages), add_generation_prompt=True, tokenize=False)
        ids = self._ids(text.partition(TURN)[2])
        return self._known(ids[1:] if ids[:1] == [last] else ids)

    def prompt(self, messages: list[Message]) -> np.ndarray:
        """int32 token ids of a prompt. Raises ValueError for messages that cannot be rendered, or too many tokens."""
        messages = _whole(messages)
        if self._data.chat_template:
            ids = render_chat(self._tokenizer, messages, self._data.system_prompt)
        else:
            (ids,) = render_questions(self._tokenizer, [_plain(messages)], self._data.system_prompt, None, False)
        if not 0 < len(ids) <= self._data.max_prompt_tokens:
            limit = self._data.max_prompt_tokens
            raise ValueError(f"the prompt has {len(ids)} tokens; 1 to data.max_prompt_tokens = {limit} are allowed")
        return self._known(ids)

    def _ids(self, text: str) -> list[int]:
        # The template has written the special tokens, and behind a turn no text begins.
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _known(self, ids: list[int]) -> np.ndarray:
        """A token id that the model has not ends vLLM's engine process."""
        wrong = next((one for one in ids if not 0 <= one < self._num_tokens), None)
        if wrong is not None:
            raise ValueError(f"its text has token {wrong}, and the model knows tokens 0 to {self._num_tokens - 1}")
        return np.asarray(ids, dtype=np.int32)


def _conversation(messages: list[Message]) -> list[Message]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}, *messages]


def _whole(messages: list[Message]) -> list[Message]:
    """With a replacement character in the place of half a one (a lone surrogate), which no tokenizer takes: the policy can
    have its environment say so, by a tool call with `\\ud83d` in it."""
    whole = [message["content"].encode("utf-16", "surrogatepass").decode("utf-16", "replace") for message in messages]
    return [message | {"content": content} for message, content in zip(messages, whole, strict=True)]


def _plain(messages: list[Message]) -> str:
    """Without a template texts follow each other as they are."""
    return "".join(message["content"] for message in messages)
