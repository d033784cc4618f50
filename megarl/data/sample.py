"""Prompts, completions and samples, in numpy, so that reading them does not need torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FROM_DATA = "data"  # the finish reason of a completion that is the data's answer


@dataclass(frozen=True, eq=False)
class Example:
    """A sequence of a supervised run: `token_ids` int32 and `trained` bool, [tokens] each."""

    token_ids: np.ndarray
    trained: np.ndarray

    def sample(self, group: int, version: int = 0) -> Sample:
        """Return the example as a sample whose prompt ends before the first trained token; nothing predicts token 0.
        `version` stands in for the weight version that sampled its tokens."""
        first = 1 + int(np.argmax(self.trained[1:]))
        tokens, own = self.token_ids[first:], self.trained[first:]
        unsampled = np.full(len(tokens), np.nan, np.float32), FROM_DATA, np.full(len(tokens), version)
        return Sample(group, self.token_ids[:first], Completion(tokens, *unsampled, own=own))


@dataclass(frozen=True, eq=False)
class Prompt:
    """A question, rendered and tokenized.

    `index` is the position in the prompt stream, which counts across epochs; `token_ids` is int32 [prompt tokens]; `row` is
    the data set's row, for reward functions; `origin` is the number of the data's part and the row's number in the part;
    `where` names the row in errors. A supervised run has `examples`: one sequence, or the chosen and the rejected one; a run
    with `distillation.data_share` has the row's answer.
    """

    index: int
    token_ids: np.ndarray
    question: str
    answer: str
    row: dict
    origin: tuple[int, int] = (0, 0)
    where: str = ""
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True, eq=False)
class Completion:
    """The tokens after a prompt: tokens that an engine sampled, and between them an environment's observations.

    `token_ids` is int32 [completion tokens] and includes sampled stop tokens; `own` is bool of the same length, True for
    sampled tokens (None: all). `logprobs` is float32 of the same length, under the sampling distribution, and 0 for
    observations. `finish_reason` comes from the engine ("stop", "length") or from the episode; it is FROM_DATA for tokens of
    the data, which no engine sampled, and whose `logprobs` are NaN; it is empty while a completion is unfinished.
    `versions` is int64 of the same length: the weight version that sampled each token; an observation has the version of the
    turn before it.

    `routing`, if recorded, holds the experts of each token except the last token, which passed no layer: integers [prompt
    and completion tokens - 1, layers with experts, experts a token]. Only finished completions have it: the engine that
    continues an unfinished one computes it again.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    versions: np.ndarray
    routing: np.ndarray | None = None
    own: np.ndarray = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.own is None:
            object.__setattr__(self, "own", np.ones(len(self.token_ids), dtype=bool))
        for name in ("own", "logprobs", "versions"):
            if (count := len(getattr(self, name))) != len(self.token_ids):
                raise ValueError(f"completion: {len(self.token_ids)} token ids but {count} {name}; each token needs one")

    @classmethod
    def empty(cls) -> Completion:
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), "", np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.token_ids)

    def __add__(self, more: Completion) -> Completion:
        """Return this completion followed by `more`, which continued it."""
        return Completion(
            np.concatenate([self.token_ids, more.token_ids]),
            np.concatenate([self.logprobs, more.logprobs]),
            more.finish_reason,
            np.concatenate([self.versions, more.versions]),
            more.routing,
            np.concatenate([self.own, more.own]),
        )

    @property
    def first_version(self) -> int:
        """The weight version that sampled the first token."""
        return int(self.versions[0])

    @property
    def last_version(self) -> int:
        """The weight version that sampled the last token."""
        return int(self.versions[-1])

    @property
    def final_ids(self) -> np.ndarray:
        """The policy's tokens after the last observation."""
        observed = np.flatnonzero(~self.own)
        return self.token_ids[observed[-1] + 1 if len(observed) else 0 :]


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence to train on: a segment of a rollout, whose group has the id `group`. A batch has the segments of each
    rollout side by side, in their order."""

    group: int
    prompt_ids: np.ndarray
    completion: Completion

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens together."""
        return len(self.prompt_ids) + len(self.completion.token_ids)
