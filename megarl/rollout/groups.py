"""The result of a rollout: metadata and metrics for rank 0, and the tokens for the ranks that fetch them.

The tokens wait in Ray's object store. An ObjectRef that a process sends to another outside of Ray is pinned for the life of
its owner, so every step would leak its batch. A small named actor (`GroupStore`) hands the references out inside Ray
instead; when it drops a batch, Ray frees the tokens.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import ray

from megarl.cluster.ray_cluster import NAMESPACE
from megarl.data.sample import FROM_DATA, Completion, Prompt, Sample
from megarl.planner.lengths import QUANTILES
from megarl.recipe import Recipe
from megarl.rollout import RolloutError
from megarl.rollout.session import Segment

Record = TypeVar("Record")


@dataclass(frozen=True, eq=False)
class GroupResult:
    """All rollouts of one prompt, as flat arrays.

    `token_ids` int32, `logprobs` float32, `versions` int64 and `own` bool (as in `Completion`) are [completion tokens of all
    sequences], split by `lengths` int32 [sequences]. `routing` has the rows of `Completion.routing`, one sequence after the
    other. The segments of a rollout follow each other: `members` int32 [sequences] has the rollout of each sequence, from 0
    on; None for one segment each. `prompt_ids` int32 are the different prompts of the sequences, end to end, split by
    `prompt_lengths`; `prefixes` int32 [sequences] says which prompt a sequence has. None for one prompt.
    """

    group: int
    prompt_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    lengths: np.ndarray
    finish_reasons: tuple[str, ...]
    versions: np.ndarray
    routing: np.ndarray | None = None
    own: np.ndarray | None = None  # None: the policy sampled all tokens
    members: np.ndarray = None  # type: ignore[assignment]
    prompt_lengths: np.ndarray = None  # type: ignore[assignment]
    prefixes: np.ndarray = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.members is None:
            object.__setattr__(self, "members", np.arange(len(self.lengths), dtype=np.int32))
        if self.prefixes is None:
            object.__setattr__(self, "prompt_lengths", np.array([len(self.prompt_ids)], dtype=np.int32))
            object.__setattr__(self, "prefixes", np.zeros(len(self.lengths), dtype=np.int32))

    @classmethod
    def of_segments(cls, group: int, rollouts: Sequence[Sequence[Segment]], ended: Sequence[str]) -> GroupResult:
        """Join the segments of each rollout; `ended` is why each rollout ended."""
        segments = [segment for rollout in rollouts for segment in rollout]
        completions = [segment.completion for segment in segments]
        prompts = {segment.prompt_ids.tobytes(): segment.prompt_ids for segment in segments}
        numbers = {prompt: number for number, prompt in enumerate(prompts)}
        reasons = [[*(segment.completion.finish_reason for segment in rollout[:-1]), why]
                   for rollout, why in zip(rollouts, ended, strict=True)]  # fmt: skip
        return cls(
            group=group,
            lengths=np.array([len(completion) for completion in completions], dtype=np.int32),
            prompt_ids=np.concatenate(list(prompts.values())),
            finish_reasons=tuple(itertools.chain.from_iterable(reasons)),
            members=np.repeat(np.arange(len(rollouts), dtype=np.int32), [len(rollout) for rollout in rollouts]),
            prompt_lengths=np.array([len(prompt) for prompt in prompts.values()], dtype=np.int32),
            prefixes=np.array([numbers[segment.prompt_ids.tobytes()] for segment in segments], dtype=np.int32),
            **joined_arrays(completions),
        )

    @classmethod
    def of(cls, group: int, prompt_ids: np.ndarray, members: Sequence[Completion]) -> GroupResult:
        """Join finished completions of one prompt."""
        return cls(
            group=group,
            prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
            lengths=np.array([len(member) for member in members], dtype=np.int32),
            finish_reasons=tuple(member.finish_reason for member in members),
            **joined_arrays(members) | {"own": None},
        )

    @classmethod
    def of_examples(cls, prompt: Prompt, copies: int = 1, version: int = 0) -> GroupResult:
        """Return a group of `copies` of the sequences that the data have for a prompt; `version` as in `Example.sample`."""
        samples = [example.sample(prompt.index, version) for example in prompt.examples * copies]
        rollouts = [[Segment(sample.prompt_ids, sample.completion)] for sample in samples]
        return cls.of_segments(prompt.index, rollouts, [FROM_DATA] * len(samples))

    def sample(self, sequence: int) -> Sample:
        start = int(self.lengths[:sequence].sum())
        part = slice(start, start + int(self.lengths[sequence]))
        # [sequences]: the last token of a sequence chose no experts
        rows = self.prompt_lengths[self.prefixes] + self.lengths - 1
        first_row = int(rows[:sequence].sum())
        completion = Completion(
            token_ids=self.token_ids[part],
            logprobs=self.logprobs[part],
            finish_reason=self.finish_reasons[sequence],
            versions=self.versions[part],
            routing=None if self.routing is None else self.routing[first_row : first_row + int(rows[sequence])],
            own=None if self.own is None else self.own[part],  # type: ignore[arg-type]
        )
        prompt = int(self.prefixes[sequence])
        first_id = int(self.prompt_lengths[:prompt].sum())
        return Sample(self.group, self.prompt_ids[first_id : first_id + int(self.prompt_lengths[prompt])], completion)


def joined_arrays(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the arrays of completions end to end, by name. Either all or none of them have recorded experts; without,
    `routing` is None."""
    routing = [completion.routing for completion in completions if completion.routing is not None]
    assert len(routing) in (0, len(completions)), "either every completion or no completion has recorded experts"
    names = ("token_ids", "logprobs", "versions", "own")
    arrays = {name: np.concatenate([getattr(completion, name) for completion in completions]) for name in names}
    return arrays | {"routing": np.concatenate(routing) if routing else None}


@dataclass(frozen=True)
class GroupFacts:
    """The metadata of one group, for rank 0: of each sequence, as in `GroupResult`."""

    group: int
    members: tuple[int, ...]
    prefixes: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    lengths: tuple[int, ...]
    own_lengths: tuple[int, ...]
    finish_reasons: tuple[str, ...]
    first_versions: tuple[int, ...]
    last_versions: tuple[int, ...]

    @classmethod
    def of(cls, result: GroupResult) -> GroupFacts:
        completions = [result.sample(sequence).completion for sequence in range(len(result.lengths))]
        return cls(
            result.group,
            tuple(result.members.tolist()),
            tuple(result.prefixes.tolist()),
            tuple(result.prompt_lengths[result.prefixes].tolist()),
            tuple(len(completion.token_ids) for completion in completions),
            tuple(int(completion.own.sum()) for completion in completions),
            result.finish_reasons,
            tuple(completion.first_version for completion in completions),
            tuple(completion.last_version for completion in completions),
        )

    @property
    def last_segments(self) -> list[int]:
        """The last sequence of each rollout, which says how it ended and is scored."""
        following = (*self.members[1:], -1)  # numpy takes longer for one group
        return [place for place, member in enumerate(self.members) if member != following[place]]


def last_segments(rollouts: np.ndarray) -> np.ndarray:
    """Return the last sequence of each rollout, int [rollouts], from the rollout of each sequence."""
    return np.flatnonzero(np.diff(rollouts, append=-1))


@dataclass(frozen=True, eq=False)
class EpisodeFacts:
    """How each rollout's episode ended; every array is [rollouts].

    `rewards` float32 is the sum of the environment's rewards. If the environment failed, `failures` has the message (else
    empty). If it failed after a turn of the policy, which may be the cause, `causes` has the kind of failure (else empty),
    and the reward is 0, or the sum so far if that is negative; otherwise the reward is NaN. `turns` counts turns of the
    policy, `malformed` the turns with a tool call that could not be answered; `done` says whether the environment ended the
    episode. `notes` is JSON: `rewards` of the turns, `metrics` of an agent, and `segments` by the reason that they began.
    """

    rewards: np.ndarray
    turns: np.ndarray
    malformed: np.ndarray
    done: np.ndarray
    failures: np.ndarray
    causes: np.ndarray
    notes: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[EpisodeFacts]) -> EpisodeFacts:
        return cls(**{name: np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])})

    def metrics(self) -> dict[str, float]:
        """Shares of episodes, where an episode that is neither done nor failed was truncated; means of what agents measured;
        and segments by the reason that they began."""
        notes = [json.loads(note) for note in self.notes]
        measured = sorted({name for note in notes for name in note["metrics"]})
        means = {
            f"agent/{name}": float(np.mean([note["metrics"][name] for note in notes if name in note["metrics"]]))
            for name in measured
        }
        reasons = sum((Counter(note["segments"]) for note in notes), Counter[str]())
        segments = {f"rollout/segments_{reason}": number for reason, number in sorted(reasons.items())}
        return means | segments | {
            "rollout/turns_mean": float(self.turns.mean()),
            "rollout/turns_max": int(self.turns.max()),
            "rollout/done_share": float(self.done.mean()),
            "rollout/failed_share": float((self.failures != "").mean()),
            "rollout/malformed_calls": int(self.malformed.sum()),
        }  # fmt: skip


class Payload(Protocol):
    """Access to the tokens of a batch; picklable, so that rank 0 can send it to any rank."""

    def fetch(self, sample_ids: Iterable[int]) -> dict[int, Sample]:
        """Return the samples with these positions in the batch."""


class GroupStore:
    """Ray actor that holds references to the groups of the last batches."""

    def __init__(self, kept_batches: int) -> None:
        """`kept_batches`: the largest number of batches of a step, plus the batch that is in use until then."""
        self._kept = kept_batches
        self._batches: dict[str, list[Any]] = {}

    def add(self, batch: str, references: list[Any]) -> None:
        """Keep a batch, and drop the oldest beyond `kept_batches`."""
        self._batches[batch] = references
        while len(self._batches) > self._kept:
            del self._batches[next(iter(self._batches))]

    def references(self, batch: str, positions: list[int]) -> list[Any]:
        """Raises KeyError for a batch that was dropped."""
        return [self._batches[batch][position] for position in positions]


@dataclass(frozen=True)
class StoredPayload:
    """Samples of a batch in a `GroupStore`; works in every process that is connected to the same Ray cluster."""

    store: str
    batch: str
    sizes: tuple[int, ...]  # sequences of each group
    timeout_s: float

    def fetch(self, sample_ids: Iterable[int]) -> dict[int, Sample]:
        """Raises ray.exceptions.GetTimeoutError at the deadline, KeyError for a batch that was dropped, RolloutError for
        tokens that were lost with their node."""
        ends = np.cumsum(self.sizes)
        places = {s: int(np.searchsorted(ends, s, side="right")) for s in sample_ids}
        positions = sorted(set(places.values()))
        store = ray.get_actor(self.store, namespace=NAMESPACE)
        references = ray.get(store.references.remote(self.batch, positions), timeout=self.timeout_s)
        try:
            results: list[GroupResult] = ray.get(references, timeout=self.timeout_s)
        except ray.exceptions.ObjectLostError as error:
            # Too late to sample them again: rewards were given for them, and all ranks have plans of their lengths.
            raise RolloutError(
                "phase rollout: the tokens of a batch were lost with the node of their engine while ranks fetched them; a "
                f"resume goes on from the last checkpoint; cause: {error}"
            ) from error
        groups = dict(zip(positions, results, strict=True))
        return {s: groups[place].sample(s - int(ends[place]) + self.sizes[place]) for s, place in places.items()}


@dataclass(frozen=True)
class GroupPayload:
    """Samples of one group by the reference of its tokens; for calls inside Ray only."""

    tokens: Any
    timeout_s: float

    def fetch(self, sample_ids: Iterable[int]) -> dict[int, Sample]:
        """Raises ray.exceptions.GetTimeoutError at the deadline."""
        result: GroupResult = ray.get(self.tokens, timeout=self.timeout_s)
        return {sequence: result.sample(sequence) for sequence in sample_ids}


COLUMNS = ("groups", "rollouts", "prefixes", "prompt_lengths", "completion_lengths", "own_lengths", "first_version",
           "last_version")  # fmt: skip
"""The arrays of a `RolloutBatch`, each int [sequences]."""


@dataclass(frozen=True)
class RolloutExecuted:
    """What the engines ran, for comparison with the recipe."""

    prompts: int
    group_size: int
    max_concurrent: int


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """One step's rollouts; every array is [sequences]. Rollout r is attempt r % group_size at prompt r // group_size.

    `rollouts` has the rollout of each sequence, 0, 1, ... with the segments of a rollout side by side (default: one each).
    Sequences with the same number in `prefixes` have the same prompt tokens (default: those of a group).
    `own_lengths` counts the completion tokens that the policy sampled (default: all). `greedy` has one greedy completion of
    each prompt, for advantages that compare with them. `episodes` is None without an environment.
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
    episodes: EpisodeFacts | None = None
    rollouts: np.ndarray = None  # type: ignore[assignment]
    prefixes: np.ndarray = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        defaults = {"own_lengths": self.completion_lengths, "prefixes": self.groups, "rollouts": np.arange(len(self))}
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def last_segments(self) -> np.ndarray:
        """The last sequence of each rollout, int [rollouts]."""
        return last_segments(self.rollouts)

    @property
    def truncated(self) -> np.ndarray:
        """Whether each rollout reached the limit of its length, bool [rollouts]."""
        return np.array([self.finish_reasons[sequence] == "length" for sequence in self.last_segments])

    @property
    def sampled(self) -> np.ndarray:
        """The rollouts that the policy sampled, int: all but answers of the data."""
        return np.flatnonzero([self.finish_reasons[sequence] != FROM_DATA for sequence in self.last_segments])

    @property
    def lengths(self) -> np.ndarray:
        """Prompt and completion tokens of each sequence, int [sequences]."""
        return self.prompt_lengths + self.completion_lengths

    @classmethod
    def of(
        cls, facts: Sequence[GroupFacts], payload: Payload, executed: RolloutExecuted, metrics: dict[str, float]
    ) -> RolloutBatch:
        """Join groups in the order of their prompts."""
        sizes = [len(group.lengths) for group in facts]

        def flat(values: Iterable[tuple[int, ...]]) -> np.ndarray:
            return np.array([value for group in values for value in group], dtype=np.int64)

        def numbered(values: list[tuple[int, ...]]) -> np.ndarray:
            """Number what each group numbers from 0 on through the batch."""
            counts = [max(group) + 1 for group in values]
            return flat(values) + np.repeat(np.cumsum(counts) - counts, sizes)

        return cls(
            payload=payload,
            groups=np.repeat([group.group for group in facts], sizes),
            rollouts=numbered([group.members for group in facts]),
            prefixes=numbered([group.prefixes for group in facts]),
            prompt_lengths=flat(group.prompt_lengths for group in facts),
            completion_lengths=flat(group.lengths for group in facts),
            finish_reasons=[reason for group in facts for reason in group.finish_reasons],
            first_version=flat(group.first_versions for group in facts),
            last_version=flat(group.last_versions for group in facts),
            executed=executed,
            metrics=metrics,
            own_lengths=flat(group.own_lengths for group in facts),
        )


def rollout_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Return lengths, truncation, observations of episodes, and the sizes that the engines ran."""
    lengths = rollouts.completion_lengths
    metrics: dict[str, float] = {
        "rollout/completion_length_mean": float(lengths.mean()),
        "rollout/completion_length_max": int(lengths.max()),
        **{f"rollout/completion_length_p{q:02d}": float(np.percentile(lengths, q)) for q in QUANTILES},
        "rollout/prompt_length_mean": float(rollouts.prompt_lengths.mean()),
        "rollout/truncated_share": float(rollouts.truncated.mean()),
        "rollout/version": int(rollouts.last_version.min()),
        "tokens/prompt": int(rollouts.prompt_lengths.sum()),
        "tokens/completion": int(lengths.sum()),
        "schedule/rollout/prompts": rollouts.executed.prompts,
        "schedule/rollout/max_concurrent": rollouts.executed.max_concurrent,
        **rollouts.metrics,
    }
    if num_answers := len(rollouts.last_segments) - len(rollouts.sampled):
        metrics["rollout/data_share"] = num_answers / len(rollouts.last_segments)
    if rollouts.episodes is None:
        return metrics
    observed = int(lengths.sum() - rollouts.own_lengths.sum())
    segments = np.bincount(rollouts.rollouts)
    return metrics | rollouts.episodes.metrics() | {
        "rollout/segments_mean": float(segments.mean()),
        "rollout/segments_max": int(segments.max()),
        "rollout/num_sealed": len(rollouts) - len(segments),
        "rollout/own_length_mean": float(np.bincount(rollouts.rollouts, rollouts.own_lengths).mean()),
        "rollout/observation_tokens": observed,
        "rollout/observation_share": observed / int(lengths.sum()),
    }  # fmt: skip


def refuse_overlong(rollouts: RolloutBatch, recipe: Recipe) -> None:
    """Raise ValueError for a sequence that is longer than the recipe allows, and for a rollout of too many segments: memory
    caps were proved without them."""
    segments = np.bincount(rollouts.rollouts)[rollouts.rollouts]
    both = f"data.max_prompt_tokens + {recipe.completion_key}"
    for part, lengths, key, limit in (
        ("a prompt of {} tokens", rollouts.prompt_lengths, "data.max_prompt_tokens", recipe.data.max_prompt_tokens),
        ("a completion of {} tokens", rollouts.completion_lengths, recipe.completion_key, recipe.max_completion_tokens),
        ("{} tokens", rollouts.lengths, both, recipe.max_sequence_tokens),
        ("a rollout of {} segments", segments, "environment.max_segments", recipe.max_segments),
    ):
        sample = int(np.argmax(lengths))
        if lengths[sample] > limit:
            raise ValueError(
                f"phase rollout: sample {sample} (group {rollouts.groups[sample]}) has {part.format(lengths[sample])}, "
                f"and {key} = {limit}; whatever made it does not keep to the recipe"
            )
    assert rollouts.own_lengths.all(), "every sequence has a token that the policy sampled"


def saved(record: Any) -> dict[str, Any]:
    """Return a dataclass of arrays as tensors and plain values, which `torch.load` reads without pickle's code."""
    import torch  # not above: a process that only fetches tokens needs none

    values = {}
    for name, value in vars(record).items():
        is_text = isinstance(value, np.ndarray) and value.dtype.kind == "U"
        values[name] = value.tolist() if is_text else torch.tensor(value) if isinstance(value, np.ndarray) else value
    return values


def restored(kind: type[Record], values: dict[str, Any]) -> Record:
    """Return the dataclass that `saved` was given."""
    arrays = {name: value.numpy() for name, value in values.items() if hasattr(value, "numpy")}
    texts = {name: np.array(value, np.str_) for name, value in values.items() if isinstance(value, list)}
    return kind(**values | arrays | texts)
