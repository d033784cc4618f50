"""Conversations and texts to sequences that a supervised run trains on: token ids, and which of them are trained."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from megarl.data.sample import Example
from megarl.data.sources import Form, Message, Row, naming
from megarl.data.tokenizer import ANSWERERS, apply_template, render_questions, with_system
from megarl.recipe.data_section import DataSection

# Stand for the content of a turn: no template changes them, and they share neither first nor last character.
_STAND_INS = ("forty-two", "Seven")
Render = Callable[..., str]  # (messages, add_generation_prompt) to text


def examples_of(data: DataSection, row: Row, tokenizer: Any) -> tuple[Example, ...]:
    """Return the sequences of a row: one, or the chosen and the rejected one. Raises ValueError for a row that cannot be
    rendered, or in which nothing is trained."""
    with naming(row.prompt_place):
        if data.chat_template:
            examples = _conversations(tokenizer, row.prompt, data.system_prompt)
        else:
            examples = tuple(_text(tokenizer, [turn["content"] for turn in chat], data.system_prompt) for chat in row.prompt)
        for example in examples:
            if not example.trained[1:].any():  # nothing predicts the first token
                raise ValueError("no token is trained: a chat needs a message of the role assistant, a text two tokens")
    return examples


def answer_of(row: Row, data: DataSection, tokenizer: Any, stop_token_ids: Sequence[int], max_new_tokens: int) -> Example:
    """Return a row's answer as the policy might have sampled it for the row's prompt: up to the first token that ends a
    completion. Raises ValueError for an answer that cannot be rendered, or is longer than `max_new_tokens`."""
    form = Form(data, "data.prompts")
    (example,) = examples_of(data, form.examples(row.fields, row.where, row.prompt_field, row.answer_field), tokenizer)
    ids, trained = example.token_ids, example.trained
    end = int(np.flatnonzero(trained)[-1]) + 1
    start = int(np.flatnonzero(~trained[:end])[-1]) + 1  # earlier turns of a chat are a part of the prompt
    end = start + int(np.argmax(np.append(np.isin(ids[start : end - 1], stop_token_ids), True))) + 1
    if start > data.max_prompt_tokens or end - start > max_new_tokens:
        raise ValueError(
            f"{row.where}: field {row.answer_field!r} has {end - start} tokens after a prompt of {start}, and at most "
            f"rollout.max_new_tokens = {max_new_tokens} after data.max_prompt_tokens = {data.max_prompt_tokens} are allowed"
        )
    return Example(ids[:end], np.arange(end) >= start)


def _text(tokenizer: Any, texts: list[str], system_prompt: str | None) -> Example:
    """Tokenize a plain text, all of which is trained, or a prompt and its completion; both end with the end token."""
    (ids,) = render_questions(tokenizer, texts[:1], system_prompt, None, chat_template=False)
    first = len(ids) if texts[1:] else 0
    for completion in texts[1:]:
        ids = ids + tokenizer(completion, add_special_tokens=False)["input_ids"]
    ids = ids if tokenizer.eos_token_id is None else [*ids, tokenizer.eos_token_id]
    return Example(np.array(ids, np.int32), np.arange(len(ids)) >= first)


def _conversations(tokenizer: Any, chats: Sequence[list[Message]], system_prompt: str | None) -> tuple[Example, ...]:
    """Render the chats of a row; of a pair only the turns after the messages that both share are trained."""
    chats = [with_system(chat, system_prompt) for chat in chats]
    same = zip(*chats, strict=False) if len(chats) > 1 else ()
    num_shared = len(list(takewhile(lambda messages: messages[0] == messages[1], same)))

    def render(messages: list[Message], generation: bool = False) -> str:
        return str(apply_template(tokenizer, messages, generation, system_prompt))

    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    examples = []
    for chat in chats:
        text = render(chat)
        # The template has written the special tokens already.
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        trained = np.zeros(len(encoded["input_ids"]), bool)
        offsets = np.array(encoded["offset_mapping"]).reshape(-1, 2)
        for start, stop in turn_spans(render, chat, special, num_shared):
            trained |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
        examples.append(Example(np.array(encoded["input_ids"], np.int32), trained))
    return tuple(examples)


def turn_spans(render: Render, chat: list[Message], special: Sequence[str], first: int = 0) -> list[tuple[int, int]]:
    """Return the characters of each assistant turn in `render(chat)`, from message `first` on: what follows the generation
    prompt, up to and with what ends the turn.

    A turn lies between the renderings of the messages before it, with the generation prompt, and of the messages up to it.
    Where a template writes earlier turns in another way than last ones, the content is found by two stand-ins for it, and
    the turn ends with the special token behind it.
    Raises ValueError for such a turn with tool calls, and for a content that the template leaves out.
    """
    whole, spans = render(chat), []
    ends = re.compile(rf"\s*(?:{'|'.join(map(re.escape, sorted(special, key=len, reverse=True)))})\s*") if special else None
    for number, message in enumerate(chat):
        if message["role"] not in ANSWERERS or number < first:
            continue
        before = render(chat[:number], True) if number else None
        upto = render(chat[: number + 1])
        start, stop = None if before is None or not whole.startswith(before) else len(before), len(upto)
        if start is None or not whole.startswith(upto) or stop <= start:
            content_start, content_stop = _content(render, chat, number, whole)
            if start is None or start > content_start:
                start = content_start
            if not whole.startswith(upto):
                ended = None if ends is None else ends.match(whole, content_stop)
                stop = content_stop if ended is None else ended.end()
        spans.append((start, stop))
    return spans


def _content(render: Render, chat: list[Message], number: int, whole: str) -> tuple[int, int]:
    """Return the characters of a message's content in the rendered chat."""
    message = chat[number]
    others = [render([*chat[:number], {**message, "content": word}, *chat[number + 1 :]]) for word in _STAND_INS]
    # A content that begins or ends as a stand-in does differs from the other one there.
    start = min(len(os.path.commonprefix([whole, other])) for other in others)
    tail = min(len(os.path.commonprefix([whole[::-1], other[::-1]])) for other in others)
    shown = [word in other for word, other in zip(_STAND_INS, others, strict=True)]
    if message.get("tool_calls") or not all(shown) or start + tail > len(whole):
        raise ValueError(
            f"message {number}: the model's chat template writes this turn differently once other messages follow, and its "
            "tokens cannot be told apart; give such turns as last messages, or change data.template_options"
        )
    return start, len(whole) - tail
