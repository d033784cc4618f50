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
    need more than the answer; `origin` is the part of the data and the number of the row in it, and `where`
    names the row for errors.
    """

    index: int
    token_ids: np.ndarray
    question: str
    answer: str
    row: dict
    origin: tuple[int, int] = (0, 0)
    where: str = ""


@dataclass(frozen=True, eq=False)
class Completion:
    """What follows a prompt: what an engine sampled and, where an environment answered in between, its observations.

    `token_ids` is int32 [completion tokens] and includes each stop token that was sampled; `own` is bool of the same length,
    True on the policy's own tokens, those that were sampled: without an environment on all of them, which is what None
    becomes. `logprobs` is float32 of the same length, of each sampled token under the sampling distribution, and 0 on
    observations. `finish_reason` is the engine's ("stop", "length", "abort"), or that of an episode; the versions are the
    weight versions of the first and last token.

    `routing`, where the engine recorded it, holds the experts that each token of prompt and completion chose, but the last,
    which no layer saw: integers [prompt and completion tokens - 1, layers with experts, experts a token].
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    first_version: int
    last_version: int
    routing: np.ndarray | None = None
    own: np.ndarray = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.own is None:
            object.__setattr__(self, "own", np.ones(len(self.token_ids), dtype=bool))
        if len(self.own) != len(self.token_ids):
            raise ValueError(f"completion: {len(self.token_ids)} token ids, and {len(self.own)} marks of the policy's own")
        if len(self.token_ids) != len(self.logprobs):
            counts = f"{len(self.token_ids)} token ids but {len(self.logprobs)} log-probabilities"
            raise ValueError(f"completion: {counts}; one log-probability for each token is needed")

    @property
    def final_ids(self) -> np.ndarray:
        """What the policy said last, behind the last observation."""
        observed = np.flatnonzero(~self.own)
        return self.token_ids[observed[-1] + 1 if len(observed) else 0 :]


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
