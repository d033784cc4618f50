"""Token ids of what an environment says between two turns of the policy, and of a prompt that it gives.

What the policy sampled is never tokenized again: another tokenization of the same text would be another sequence than the
one whose probabilities are known. So an observation's tokens are those of its own text, and of what the chat template puts
between an assistant's turn and the next one; that is read off a chat of fixed messages.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.data.tokenizer import check_template, render_chat, render_questions, rendering_errors
from megarl.recipe.data_section import DataSection

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
                shown = tokenizer.apply_chat_template(_chat([]), tokenize=False)
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
            text = self._tokenizer.apply_chat_template(_chat(messages), add_generation_prompt=True, tokenize=False)
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


def _chat(messages: list[Message]) -> list[Message]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}, *messages]


def _whole(messages: list[Message]) -> list[Message]:
    """With a replacement character in the place of half a one (a lone surrogate), which no tokenizer takes: the policy can
    have its environment say so, by a tool call with `\\ud83d` in it."""
    whole = [message["content"].encode("utf-16", "surrogatepass").decode("utf-16", "replace") for message in messages]
    return [message | {"content": content} for message, content in zip(messages, whole, strict=True)]


def _plain(messages: list[Message]) -> str:
    """Without a template texts follow each other as they are."""
    return "".join(message["content"] for message in messages)
