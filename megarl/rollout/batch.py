"""What a rollout hands to the pipeline: metadata of every sample at once, the tokens only to who fetches them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from megarl.data.sample import Completion, Sample
from megarl.recipe import Recipe


class Payload(Protocol):
    """Access to the tokens of a batch; picklable, so that rank 0 can send it to any rank."""

    def fetch(self, sample_ids: Iterable[int]) -> dict[int, Sample]:
        """The samples with these ids (positions in the batch)."""


@dataclass(frozen=True, eq=False)
class GroupResult:
    """All completions of one prompt, as flat arrays.

    `token_ids` int32, `logprobs` float32 and `own` bool, as `Completion` has them, are [completion tokens of all members],
    cut by `lengths` int32 [members]; `routing` has the rows of `Completion.routing`, one member after the other.
    """

    group: int
    prompt_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    lengths: np.ndarray
    finish_reasons: tuple[str, ...]
    first_versions: np.ndarray
    last_versions: np.ndarray
    routing: np.ndarray | None = None
    own: np.ndarray | None = None  # None: all of them

    def sample(self, member: int) -> Sample:
        start = int(self.lengths[:member].sum())
        part = slice(start, start + int(self.lengths[member]))
        completion = Completion(
            token_ids=self.token_ids[part],
            logprobs=self.logprobs[part],
            finish_reason=self.finish_reasons[member],
            first_version=int(self.first_versions[member]),
            last_version=int(self.last_versions[member]),
            routing=None if self.routing is None else self.routing[self._routed(member)],
            own=None if self.own is None else self.own[part],  # type: ignore[arg-type]
        )
        return Sample(self.group, self.prompt_ids, completion)

    def _routed(self, member: int) -> slice:
        rows = len(self.prompt_ids) + self.lengths - 1  # [members]
        start = int(rows[:member].sum())
        return slice(start, start + int(rows[member]))


@dataclass(frozen=True)
class GroupFacts:
    """What rank 0 learns about one group."""

    group: int
    prompt_length: int
    lengths: tuple[int, ...]
    own_lengths: tuple[int, ...]
    finish_reasons: tuple[str, ...]
    first_versions: tuple[int, ...]
    last_versions: tuple[int, ...]

    @classmethod
    def of(cls, result: GroupResult) -> GroupFacts:
        return cls(
            result.group,
            len(result.prompt_ids),
            tuple(map(int, result.lengths)),
            tuple(int(result.sample(member).completion.own.sum()) for member in range(len(result.lengths))),
            result.finish_reasons,
            tuple(map(int, result.first_versions)),
            tuple(map(int, result.last_versions)),
        )


@dataclass(frozen=True, eq=False)
class EpisodeFacts:
    """What became of each sample's episode; all [samples].

    `rewards` float32 is what its environment gave. Where that failed `failures` (texts, else empty) says how: behind a turn
    of the policy, which can be the cause, `causes` (texts, else empty) has the kind, and the reward is 0, or what had been
    lost by then; else it is NaN. `turns` counts those of the policy, `malformed` those with a tool call that could not be
    answered, and `done` says where the environment has ended it.
    """

    rewards: np.ndarray
    turns: np.ndarray
    malformed: np.ndarray
    done: np.ndarray
    failures: np.ndarray
    causes: np.ndarray

    def of(self, samples: Sequence[int]) -> EpisodeFacts:
        """Those of some samples."""
        return EpisodeFacts(**{name: column[samples] for name, column in vars(self).items()})

    def metrics(self) -> dict[str, float]:
        """Shares of episodes; what is neither done nor failed was truncated."""
        return {
            "rollout/turns_mean": float(self.turns.mean()),
            "rollout/turns_max": int(self.turns.max()),
            "rollout/done_share": float(self.done.mean()),
            "rollout/failed_share": float((self.failures != "").mean()),
            "rollout/malformed_calls": int(self.malformed.sum()),
        }


@dataclass(frozen=True)
class RolloutExecuted:
    """What the engines ran, for comparison with the recipe."""

    prompts: int
    group_size: int
    max_concurrent: int


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """One step's rollouts; every array is [samples], and sample s is member s % group_size of prompt s // group_size.

    `own_lengths` counts the completion tokens that the policy sampled, where None all of them. `greedy` has one greedy
    completion of each prompt, where the recipe's advantage compares with them.
    """

    payload: Payload
    groups: np.ndarray
    prompt_lengths: np.ndarray
    completion_lengths: np.ndarray
    finish_reasons: list[str]
    first_version: np.ndarray
    last_version: np.ndarray
    executed: RolloutExecuted
    metrics: dict[str, float] = field(default_factory=dict)
    greedy: RolloutBatch | None = None
    own_lengths: np.ndarray = None  # type: ignore[assignment]
    episodes: EpisodeFacts | None = None  # without an environment there are none

    def __post_init__(self) -> None:
        if self.own_lengths is None:
            object.__setattr__(self, "own_lengths", self.completion_lengths)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def lengths(self) -> np.ndarray:
        """Prompt and completion tokens of each sample, int [samples]."""
        return self.prompt_lengths + self.completion_lengths

    @classmethod
    def of(cls, facts: Sequence[GroupFacts], payload: Payload, executed: RolloutExecuted) -> RolloutBatch:
        """Put the groups, in prompt order, together."""
        members = [len(group.lengths) for group in facts]

        def flat(values: Iterable[tuple[int, ...]]) -> np.ndarray:
            return np.array([value for group in values for value in group], dtype=np.int64)

        return cls(
            payload=payload,
            groups=np.repeat([group.group for group in facts], members),
            prompt_lengths=np.repeat([group.prompt_length for group in facts], members),
            completion_lengths=flat(group.lengths for group in facts),
            finish_reasons=[reason for group in facts for reason in group.finish_reasons],
            first_version=flat(group.first_versions for group in facts),
            last_version=flat(group.last_versions for group in facts),
            executed=executed,
            own_lengths=flat(group.own_lengths for group in facts),
        )


@dataclass(frozen=True)
class JoinedPayload:
    """Samples of several batches: sample s is sample `sources[s][1]` of payload `sources[s][0]`."""

    payloads: tuple[Payload, ...]
    sources: tuple[tuple[int, int], ...]

    def fetch(self, sample_ids: Iterable[int]) -> dict[int, Sample]:
        wanted = list(sample_ids)
        found: dict[int, Sample] = {}
        for number, payload in enumerate(self.payloads):
            own = {self.sources[s][1]: s for s in wanted if self.sources[s][0] == number}
            if own:
                found |= {own[there]: sample for there, sample in payload.fetch(sorted(own)).items()}
        return found


def join_rollouts(batches: Sequence[RolloutBatch], samples: Sequence[int]) -> RolloutBatch:
    """A batch of some samples of several, counted through all of them; whole groups, each in one piece. What the engines ran
    is that of the last one."""
    places = [(number, sample) for number, batch in enumerate(batches) for sample in range(len(batch))]
    sources = tuple(places[sample] for sample in samples)
    chosen = list(samples)

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(batch, name) for batch in batches])[chosen]

    reasons = [reason for batch in batches for reason in batch.finish_reasons]
    last = batches[-1]
    episodes = None
    if last.episodes is not None:
        facts = [vars(batch.episodes) for batch in batches]
        together = {name: np.concatenate([one[name] for one in facts]) for name in facts[0]}
        episodes = EpisodeFacts(**together).of(chosen)
    return RolloutBatch(
        payload=JoinedPayload(tuple(batch.payload for batch in batches), sources),
        groups=column("groups"),
        prompt_lengths=column("prompt_lengths"),
        completion_lengths=column("completion_lengths"),
        finish_reasons=[reasons[sample] for sample in chosen],
        first_version=column("first_version"),
        last_version=column("last_version"),
        executed=last.executed,
        metrics=last.metrics,
        own_lengths=column("own_lengths"),
        episodes=episodes,
    )


def dump_file(directory: str | Path, step: int) -> Path:
    """Where a step's rollouts are dumped."""
    return Path(directory) / f"step-{step:06d}.npz"


def greedy_folder(directory: str | Path) -> Path:
    """Where the greedy completions beside dumped rollouts are, in files of the same names."""
    return Path(directory) / "greedy"


def dump_rollout(directory: str | Path, step: int, batch: RolloutBatch) -> Path:
    """Write one step's rollouts so that `ReplayPool` can read them; atomic, returns the file."""
    if batch.greedy is not None:
        dump_rollout(greedy_folder(directory), step, batch.greedy)
    samples = batch.payload.fetch(range(len(batch)))
    ordered = [samples[s] for s in range(len(batch))]
    file = dump_file(directory, step)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    routing = [sample.completion.routing for sample in ordered if sample.completion.routing is not None]
    assert len(routing) in (0, len(ordered)), "a batch is recorded whole, or not at all"
    with partial.open("wb") as stream:
        np.savez(
            stream,
            group_size=np.int64(batch.executed.group_size),
            groups=batch.groups,
            prompt_lengths=batch.prompt_lengths,
            completion_lengths=batch.completion_lengths,
            own_lengths=batch.own_lengths,
            finish_reasons=np.array(batch.finish_reasons),
            first_version=batch.first_version,
            last_version=batch.last_version,
            prompt_ids=np.concatenate([sample.prompt_ids for sample in ordered]),
            token_ids=np.concatenate([sample.completion.token_ids for sample in ordered]),
            logprobs=np.concatenate([sample.completion.logprobs for sample in ordered]),
            own=np.concatenate([sample.completion.own for sample in ordered]),
            **({"routing": np.concatenate(routing)} if routing else {}),
            **({} if batch.episodes is None else {f"episode_{name}": one for name, one in vars(batch.episodes).items()}),
        )
    partial.rename(file)
    return file


def refuse_overlong(rollouts: RolloutBatch, recipe: Recipe) -> None:
    """Raise ValueError for a sequence that is longer than the recipe allows: memory caps were proved without it."""
    for part, lengths, key, limit in (
        ("prompt", rollouts.prompt_lengths, "data.max_prompt_tokens", recipe.data.max_prompt_tokens),
        ("completion", rollouts.completion_lengths, recipe.completion_key, recipe.max_completion_tokens),
    ):
        sample = int(np.argmax(lengths))
        if lengths[sample] > limit:
            raise ValueError(
                f"phase rollout: sample {sample} (group {rollouts.groups[sample]}) has a {part} of {lengths[sample]} "
                f"tokens, and {key} = {limit}; whatever made it does not keep to the recipe"
            )
