"""Text to tokens: the tokenizer, the rendering of prompts and observations, and the tokens that end a completion.

transformers takes seconds to import, and only rank 0 needs it, so it is imported where it is used.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from megarl.models.model_files import check_has_tokenizer
from megarl.recipe.data_section import DataSection

logger = logging.getLogger(__name__)


def prompt_tokenizer(path: str, options: Mapping[str, Any], started: datetime) -> Any:
    """Load a model's tokenizer whose chat template gets `data.template_options`, and `started` as the date (through
    `strftime_now`), so that a resumed run has the same prompts.

    Raises ValueError as `load_tokenizer`, and for an option that the chat template does not read.
    """
    tokenizer = load_tokenizer(path)
    if options:
        check_template(tokenizer)
        text = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
        for name in options:
            # transformers itself reads these.
            if name not in ("chat_template", "tools", "documents") and not re.search(rf"\b{re.escape(name)}\b", text):
                raise ValueError(
                    f"data.template_options.{name} = {options[name]!r}: the model's chat template does not read {name!r}; "
                    "remove it, or use the name that the template has"
                )
    given = dict(options)
    if "strftime_now" in str(tokenizer.chat_template):
        given["strftime_now"] = started.strftime  # transformers' own asks the clock
    if given:
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **given)
    return tokenizer


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of a Hugging Face directory or hub name. Raises ValueError naming `model.path`."""
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
    """Return the token ids of each question as a prompt, up to where the answer starts.

    `prompt_template` has `{question}` in it (other braces stay, LaTeX needs them). With `chat_template` the tokenizer's
    template writes all special tokens; without it the text is tokenized as it is, after the system prompt and an empty line.
    Raises ValueError naming `data.chat_template` and a system prompt that the template refuses.
    """
    if prompt_template is not None:
        questions = [prompt_template.replace("{question}", question) for question in questions]
    if not chat_template:
        prefix = "" if system_prompt is None else f"{system_prompt}\n\n"
        rows: list[list[int]] = tokenizer([prefix + question for question in questions])["input_ids"]
        # A text that was rendered before has a start token already.
        start = [tokenizer.bos_token_id] * 2
        return [row[1:] if row[:2] == start else row for row in rows]
    conversations = [_chat([{"role": "user", "content": question}], system_prompt) for question in questions]
    return _render(tokenizer, conversations, system_prompt)


def render_chat(tokenizer: Any, messages: list[dict[str, str]], system_prompt: str | None) -> list[int]:
    """Return the token ids of a chat as a prompt. Raises ValueError if the chat template refuses it, if it ends with an
    answer, and for a second system message."""
    (ids,) = _render(tokenizer, [_chat(messages, system_prompt)], system_prompt)
    return ids


ANSWERERS = ("assistant", "model")  # roles whose messages are answers


def _chat(messages: list[dict[str, str]], system_prompt: str | None) -> list[dict[str, str]]:
    if messages[-1]["role"] in ANSWERERS:
        raise ValueError(
            f"the last message has the role {messages[-1]['role']!r}, so the prompt would hold an answer; remove it"
        )
    return with_system(messages, system_prompt)


def with_system(messages: list[dict[str, Any]], system_prompt: str | None) -> list[dict[str, Any]]:
    """Return a chat that begins with the system prompt, if there is one. Raises ValueError for a second system message."""
    if system_prompt is None:
        return messages
    if any(message["role"] == "system" for message in messages):
        raise ValueError(
            f"the chat has a system message, and data.system_prompt ({system_prompt[:40]!r}) is another one; remove one"
        )
    return [{"role": "system", "content": system_prompt}, *messages]


def check_template(tokenizer: Any) -> None:
    """Raise ValueError naming `data.chat_template` if the tokenizer has none."""
    if not tokenizer.chat_template:
        raise ValueError(
            "data.chat_template is true, but the model's tokenizer has no chat template; "
            "set data.chat_template=false or use an instruction-tuned model"
        )


def apply_template(tokenizer: Any, messages: Any, generate: bool, system_prompt: str | None = None, **options: Any) -> Any:
    """Return the text of a chat, or of each chat in a list; with `generate`, up to where the answer begins.

    Raises ValueError without a chat template, and for messages that the template refuses."""
    import jinja2

    check_template(tokenizer)
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=generate, tokenize=False, **options)
    except (jinja2.TemplateError, TypeError, KeyError) as error:
        way_out = "see data.prompt_format and data.chat_template"
        if system_prompt is not None:
            way_out += f", or leave data.system_prompt ({system_prompt[:40]!r}) out: its role is system"
        raise ValueError(f"the model's chat template refuses these messages: {error}; {way_out}") from error


def _render(tokenizer: Any, conversations: list[list[dict[str, str]]], system_prompt: str | None) -> list[list[int]]:
    # The template has written the special tokens already.
    return tokenizer(apply_template(tokenizer, conversations, True, system_prompt), add_special_tokens=False)["input_ids"]


def stop_token_ids(path: str, tokenizer: Any, num_tokens: int | None = None) -> tuple[int, ...]:
    """Return every token that ends a completion, ascending; the engine runs without a tokenizer.

    There are three sources, because checkpoints disagree: the generation config (or else config.json, as in vLLM), the
    tokenizer's end token, and the special token that the chat template writes after an assistant's turn. Tokens beyond the
    `num_tokens` of the embedding are skipped with a warning, since vLLM refuses them. Raises ValueError if no token is left,
    one is no number, or the template refuses such a turn.
    """
    stops: dict[int, str] = {}
    file, config = Path(path) / "generation_config.json", Path(path) / "config.json"
    ends: Any = None
    if file.is_file():
        ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    elif config.is_file():
        from transformers import AutoConfig

        file, ends = config, AutoConfig.from_pretrained(path).eos_token_id  # with the family's default
    for end in ends if isinstance(ends, list) else [] if ends is None else [ends]:
        if not isinstance(end, int) or isinstance(end, bool):
            raise ValueError(f"{file}: eos_token_id = {ends!r} must be a token id or a list of token ids")
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
    """Return the special token directly after an assistant's turn in the chat template, if there is one."""
    if not tokenizer.chat_template:
        return []
    _, answer, tail = apply_template(tokenizer, _conversation([]), False).rpartition(TURN)
    ids = tokenizer(tail.lstrip(), add_special_tokens=False)["input_ids"] if answer else []
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return ids[:1] if ids and ids[0] in special else []


Message = dict[str, Any]
# Stands for a turn of the policy; no template has a reason to change it.
TURN = "forty-two"


class ChatRenderer:
    """Renders messages with the tokenizer's chat template, and tokenizes text that the template has written."""

    def __init__(self, tokenizer: Any, num_tokens: int) -> None:
        """`num_tokens` is the size of the model's vocabulary."""
        self.tokenizer, self._num_tokens = tokenizer, num_tokens

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None = None, generate: bool = True) -> str:
        """Return the text of messages; with `generate`, up to where the policy's next turn begins. Raises ValueError for
        messages that the template refuses."""
        given: dict[str, Any] = {} if tools is None else {"tools": tools}  # `data.template_options` may hold some
        return str(apply_template(self.tokenizer, messages, generate, **given))

    @cached_property
    def turn_end(self) -> str:
        """The text that the template writes after a turn of the policy. Raises ValueError if it omits such turns."""
        _, turn, end = self.render(_conversation([]), generate=False).rpartition(TURN)
        if not turn:
            raise ValueError("data.chat_template is true, and the model's chat template omits the assistant's turns")
        return end

    def ids(self, text: str) -> np.ndarray:
        """Return int32 token ids of text that holds its special tokens already. Lone surrogates, which no tokenizer accepts,
        are replaced. Raises ValueError for a token without an
        embedding, which would end the engine's process."""
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self.known(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def ids_after(self, last: int, text: str) -> np.ndarray:
        """Return the token ids of text that follows a turn, which ended with the token `last`. If the text begins with that
        token, it is not repeated."""
        ids = self.ids(text)
        return ids[1:] if ids[:1].tolist() == [last] else ids

    def known(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return token ids as int32. Raises ValueError for a token that the model does not have."""
        tokens = np.asarray(ids, dtype=np.int64)
        unknown = tokens[(tokens < 0) | (tokens >= self._num_tokens)]
        if len(unknown):
            raise ValueError(f"its text has token {unknown[0]}, and the model knows tokens 0 to {self._num_tokens - 1}")
        return tokens.astype(np.int32)


class Observations:
    """Renders observations between two turns of the policy, and prompts that an environment gives.

    What the policy sampled is never tokenized again. An observation's tokens are those of its text and of what the chat
    template puts between an assistant's turn and the next one, which is taken from a chat of fixed messages. `num_tokens` is
    the size of the model's vocabulary.
    """

    def __init__(self, tokenizer: Any, data: DataSection, num_tokens: int) -> None:
        """Raises ValueError naming `data.chat_template` if the model's chat template cannot continue after a turn."""
        self._data, self.chat = data, ChatRenderer(tokenizer, num_tokens)
        if data.chat_template:
            _ = self.chat.turn_end

    def behind(self, last: int, messages: list[Message]) -> np.ndarray:
        """Return the int32 token ids between a turn of the policy, which ended with the token `last`, and its next turn.

        If the template ends a turn with that token it is not repeated. Raises ValueError for messages that cannot be
        rendered.
        """
        if not self._data.chat_template:
            return self.chat.ids(_plain(messages))
        return self.chat.ids_after(last, self.chat.render(_conversation(messages)).partition(TURN)[2])

    def prompt(self, messages: list[Message]) -> np.ndarray:
        """Return the int32 token ids of a prompt. Raises ValueError for messages that cannot be rendered, or too many
        tokens."""
        messages = _whole(messages)
        if self._data.chat_template:
            ids = render_chat(self.chat.tokenizer, messages, self._data.system_prompt)
        else:
            (ids,) = render_questions(self.chat.tokenizer, [_plain(messages)], self._data.system_prompt, None, False)
        if not 0 < len(ids) <= self._data.max_prompt_tokens:
            limit = self._data.max_prompt_tokens
            raise ValueError(f"the prompt has {len(ids)} tokens; 1 to data.max_prompt_tokens = {limit} are allowed")
        return self.chat.known(ids)


def _conversation(messages: list[Message]) -> list[Message]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}, *messages]


def _whole(messages: list[Message]) -> list[Message]:
    """Replace lone surrogates, which no tokenizer accepts; the policy can cause one by a tool call with `\\ud83d` in it."""
    whole = [message["content"].encode("utf-16", "surrogatepass").decode("utf-16", "replace") for message in messages]
    return [message | {"content": content} for message, content in zip(messages, whole, strict=True)]


def _plain(messages: list[Message]) -> str:
    return "".join(message["content"] for message in messages)
