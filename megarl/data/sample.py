"""What travels through a step: prompts, completions, samples.

Plain numpy on purpose: the schedule, the rollout pool and a replay file all read these without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Prompt:
    """One question, rendered and tokenized.

    `index` is the position in the prompt stream (it keeps counting across epochs), so it names this use of
    the row; `token_ids` is int32 [prompt tokens]; `row` is the data set's row, for reward functions that
    need more than the answer; `origin` is the part of the data and the number of the row in it.
    """

    index: int
    token_ids: np.ndarray
    question: str
    answer: str
    row: dict
    origin: tuple[int, int] = (0, 0)


@dataclass(frozen=True, eq=False)
class Completion:
    """What an engine sampled for one prompt.

    `token_ids` is int32 [completion tokens] and includes the stop token if one ended it; `logprobs` is
    float32 of the same length, of each sampled token under the sampling distribution; `finish_reason` is the
    engine's ("stop", "length", "abort"); the versions are the weight versions of the first and last token.

    `routing`, where the engine recorded it, holds the experts that each token of prompt and completion chose, but the last,
    which no layer saw: integers [prompt and completion tokens - 1, layers with experts, experts a token].
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    first_version: int
    last_version: int
    routing: np.ndarray | None = None

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            counts = f"{len(self.token_ids)} token ids but {len(self.logprobs)} log-probabilities"
            raise ValueError(f"completion: {counts}; one log-probability for each token is needed")


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence: a prompt with one of its group's completions.

    Sample s of a batch is member `s % group_size` of the group at position `s // group_size`; `group` is that
    group's explicit id.
    """

    group: int
    prompt_ids: np.ndarray
    completion: Completion

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens together."""
        return len(self.prompt_ids) + len(self.completion.token_ids)
