"""A policy that is a script, and what must hold of the sessions that have its tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from megarl.data.sample import Completion
from megarl.data.tokenizer import ChatRenderer
from megarl.rollout.session import Segment, SessionLimits
from tests.chat_templates import TEMPLATES, chat_tokenizer

LIMITS = SessionLimits(max_prompt_tokens=100_000, max_completion_tokens=100_000)


@functools.cache
def renderer(name: str) -> ChatRenderer:
    tokenizer = chat_tokenizer(TEMPLATES.get(name, name))
    return ChatRenderer(tokenizer, len(tokenizer))


class Policy:
    """Samples texts by bytes, which is not how the tokenizer splits them; each token has a log-probability of its own."""

    def __init__(self, chat: ChatRenderer) -> None:
        self.tokenizer = chat.tokenizer
        self.end = int(self.tokenizer.convert_tokens_to_ids("<|turn_end|>"))
        self.sampled: list[Completion] = []
        self.num_tokens = 0

    def write(self, text: str, is_cut: bool = False) -> Completion:
        ids = [int(token) for letter in text for token in self.tokenizer(letter, add_special_tokens=False)["input_ids"]]
        ids += [] if is_cut else [self.end]
        logprobs = -np.arange(self.num_tokens, self.num_tokens + len(ids), dtype=np.float32)
        self.num_tokens += len(ids)
        versions = np.full(len(ids), len(self.sampled) // 2)
        self.sampled.append(Completion(np.array(ids, np.int32), logprobs, "length" if is_cut else "stop", versions))
        return self.sampled[-1]


def check_trained(segments: Sequence[Segment], sampled: Sequence[Completion]) -> None:
    """Each sampled token is trained once, as it was sampled; the log-probabilities name it."""
    trained = {}
    for segment in segments:
        completion = segment.completion
        assert completion.own.any(), "a segment that trains nothing"
        trained_tokens = zip(*(array[completion.own].tolist() for array in vars_of(completion)), strict=True)
        for token, logprob, version in trained_tokens:
            assert logprob not in trained, "a token is trained twice"
            trained[logprob] = (token, version)
        assert not completion.logprobs[~completion.own].any()
    expected: dict[float, tuple[int, int]] = {}
    for completion in sampled:
        expected |= {p: (t, v) for t, p, v in zip(*(array.tolist() for array in vars_of(completion)), strict=True)}
    assert trained == expected


def vars_of(completion: Completion) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return completion.token_ids, completion.logprobs, completion.versions
