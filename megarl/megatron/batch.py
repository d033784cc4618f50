"""A step's batch on one trainer rank, and the packed micro-batches that are cut from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.algorithm.estimate import StepRewards
from megarl.data.sample import Sample
from megarl.models.attention import Parts
from megarl.models.layout import Layout
from megarl.platform import current as platform
from megarl.schedule import MicroBatch
from megarl.schedule.schedule import padded

# Stand for a chosen expert where no choice was recorded, and in dummy tokens.
UNRECORDED, PADDING = -1, -2


@dataclass(frozen=True, eq=False)
class Batch:
    """All sequences of a step: their lengths and per-token results on every rank, and the tokens that this rank runs.

    A phase never changes a batch: it returns a new one. `samples` holds the tokens of the sequences that some phase runs on
    this data-parallel rank. `fields` maps a name ("logprobs", "values", "advantages", ...) to one fp32 tensor [own tokens]
    per sequence. They are replicated, so that every rank computes advantages and their whitening as the same sum in the same
    order under every layout.

    Own tokens are the completion tokens that the policy sampled: all but an environment's observations. The head predicts
    only these, and losses, advantages, KL, entropy and metrics have only these.

    The segments of a rollout follow each other, and what is of a rollout is the same for each of them.
    """

    prompt_lengths: np.ndarray  # [sequences]
    completion_lengths: np.ndarray  # [sequences]
    groups: np.ndarray  # [sequences] explicit group ids
    rewards: np.ndarray  # [sequences] fp32, of the rollout
    valid: np.ndarray  # [sequences] bool: False if the rollout's reward could not be computed
    truncated: np.ndarray | None = None  # [sequences] bool: True if the rollout reached the limit of its length
    baselines: np.ndarray | None = None  # [sequences] fp32, the reward of the prompt's greedy completion
    samples: dict[int, Sample] = field(default_factory=dict)
    fields: dict[str, Sequence[Tensor]] = field(default_factory=dict)
    masked: frozenset[int] = frozenset()  # samples with NaN or infinite results; their tokens are dummies
    own_lengths: np.ndarray = None  # type: ignore[assignment]  # [sequences]; None: all completion tokens
    sampled: bool = True  # False: the tokens are data, and no engine's log-probabilities can be compared with
    version: int = 0  # the weight version that is trained
    teachers: np.ndarray = None  # type: ignore[assignment]  # [sequences] str: the name of the teacher that judges each
    # The teacher's rows [own tokens, width] of the sequences that this rank's update reads (`teaching.py`), on the host.
    teacher_rows: dict[int, Tensor] = field(default_factory=dict)
    max_staleness: int = 0  # by how many versions a token may be older; above 0 metrics follow the staleness of tokens
    rollouts: np.ndarray = None  # type: ignore[assignment]  # [sequences], as in `RolloutBatch`; None: one sequence each
    prefixes: np.ndarray = None  # type: ignore[assignment]  # [sequences], as in `RolloutBatch`; None: the groups

    def __post_init__(self) -> None:
        num_sequences = len(self.groups)
        defaults = {
            "own_lengths": self.completion_lengths,
            "prefixes": self.groups,
            "rollouts": np.arange(num_sequences),
            "teachers": np.full(num_sequences, ""),
        }
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)

    @property
    def ends(self) -> np.ndarray:
        """The last sequence of each rollout, int [rollouts]."""
        return np.flatnonzero(np.diff(self.rollouts, append=-1))

    def with_fields(self, **fields: Sequence[Tensor]) -> Batch:
        """Return this batch with further per-token results."""
        return replace(self, fields={**self.fields, **fields})

    def without(self, samples: Collection[int]) -> Batch:
        """Return this batch with `samples` and all other segments of their rollouts masked: they no longer count.

        The plan still has them, so they stay with dummy tokens; their real tokens could make the gradients of a whole
        micro-batch NaN.
        """
        valid = self.valid & ~np.isin(self.rollouts, self.rollouts[list(samples)])
        fields: dict[str, Sequence[Tensor]] = {
            name: [torch.zeros_like(result) if number in samples else result for number, result in enumerate(results)]
            for name, results in self.fields.items()
        }
        dummies: dict[int, Sample] = {}
        for number in samples:
            if (sample := self.samples.get(number)) is not None:
                zeros = np.zeros_like(sample.completion.token_ids)
                completion = replace(sample.completion, token_ids=zeros, logprobs=np.zeros_like(sample.completion.logprobs))
                dummies[number] = replace(sample, prompt_ids=np.zeros_like(sample.prompt_ids), completion=completion)
        return replace(
            self, valid=valid, fields=fields, samples={**self.samples, **dummies}, masked=self.masked | frozenset(samples)
        )

    @property
    def lengths(self) -> np.ndarray:
        return self.prompt_lengths + self.completion_lengths

    def step_rewards(self, longest: int, limit: str) -> StepRewards:
        """Return what the advantages are computed from; `longest` and `limit` as there."""
        truncated = np.zeros(len(self.valid), bool) if self.truncated is None else self.truncated
        columns = self.rewards, self.valid, self.groups, truncated
        rewards, valid, groups, cut = (torch.from_numpy(column[self.ends]) for column in columns)
        segments, lengths = np.bincount(self.rollouts).tolist(), torch.from_numpy(self.own_lengths)
        baselines = None if self.baselines is None else torch.from_numpy(self.baselines[self.ends])
        return StepRewards(rewards, valid, groups, cut, segments, lengths, self.fields, baselines, longest, limit)

    def gather(self, name: str, samples: Iterable[int]) -> Tensor:
        """Concatenate a per-token result of some sequences: [their own tokens]."""
        return torch.cat([self.fields[name][sample] for sample in samples])


def parts_of(
    bounds: Sequence[int], continues: Sequence[tuple[int, int]] = (), context: int = 1, context_rank: int = 0
) -> Parts:
    """Return the parts that attention runs, of sequences between `bounds` (over all context ranks).

    `continues` gives the rows of the prompt that each sequence continues, (0, 0) for none. Under context parallelism a rank
    has two chunks of each sequence (`own_slots`), and each is a part.
    """
    lengths = tuple(int(stop - start) for start, stop in zip(bounds, bounds[1:], strict=False))
    if context > 1:
        chunks = tuple(length // (2 * context) for length in lengths)
        order: list[tuple[int, ...]] = []
        for sequence in range(len(lengths)):
            # The gathered keys are ordered by [context rank, sequence, front or back].
            front = [2 * (rank * len(lengths) + sequence) for rank in range(context)]
            whole = [*front, *(piece + 1 for piece in reversed(front))]
            order += [tuple(whole[: context_rank + 1]), tuple(whole[: 2 * context - context_rank])]
        rows = tuple(chunk for chunk in chunks for _ in range(2))
        seen = tuple(chunk * len(part) for chunk, part in zip(rows, order, strict=True))
        return Parts(rows, seen, rows * context, tuple(order))
    if not any(stop > start for start, stop in continues):
        return Parts(lengths, lengths)
    by_start = {start: number for number, start in enumerate(bounds[:-1])}
    shared = tuple(
        (by_start[start], number) if stop > start else (number,) for number, (start, stop) in enumerate(continues)
    )
    seen = tuple(sum(lengths[piece] for piece in part) for part in shared)
    return Parts(lengths, seen, lengths, shared)


@dataclass(frozen=True)
class PackedMicroBatch:
    """Sequences laid end to end on the device, followed by a sequence of dummy tokens where the layout pads.

    `head_positions` are the rows whose output predicts an own token: token t is predicted at position t - 1, where a critic
    has its value of the state before token t. No dummy token is predicted.

    Under context parallelism each sequence is padded by itself, and a rank has two chunks of each: `input_ids`,
    `position_ids`, `head_positions` and `heads` are this rank's; all other fields describe the whole micro-batch.
    """

    samples: tuple[int, ...]
    input_ids: Tensor  # [1, slots / context]
    position_ids: Tensor  # [1, slots / context]
    bounds: Tensor  # [sequences + 1] int32, cumulative lengths; one more where dummy tokens follow, or for a shared prompt
    padding: int  # dummy tokens of all context ranks
    context: int  # context ranks
    longest: int
    head_positions: Tensor  # [own tokens that this context rank predicts]
    heads: Tensor  # [own tokens that this context rank predicts], their indices among all own tokens
    targets: Tensor  # [own tokens]
    own_lengths: tuple[int, ...]
    # For megarl's own attention; bounds as the varlen kernel reads them.
    parts: Parts
    query_bounds: Tensor  # [parts + 1] int32
    key_bounds: Tensor  # [parts + 1] int32
    # [own slots, layers with experts, experts a token] int16 on the host: the engine's choice, UNRECORDED or PADDING.
    routing: Tensor | None = None
    # For each part between bounds, the rows of the prompt that it continues, (0, 0) for none; empty if none is shared.
    continues: tuple[tuple[int, int], ...] = ()

    @property
    def num_slots(self) -> int:
        """Tokens that the model runs, dummies included, on all context ranks."""
        return self.input_ids.shape[1] * self.context

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequences."""
        return self.num_slots - self.padding

    @property
    def num_sequences(self) -> int:
        if self.continues:
            return sum(stop > start for start, stop in self.continues)
        return len(self.bounds) - 1 - bool(self.padding and (self.context == 1 or not self.num_tokens))


def pack(
    batch: Batch,
    micro_batch: MicroBatch,
    device: torch.device,
    layout: Layout,
    context_rank: int = 0,
    ends_alone: bool = False,
    choices: tuple[int, int] | None = None,
) -> PackedMicroBatch:
    """Lay the sequences of a planned micro-batch end to end, padded to its slots; returns this context rank's part.

    Without context parallelism the padding is one more sequence, no longer than the alignment. With context parallelism each
    sequence is padded at its end. No token attends to padding.

    With `ends_alone` the head sees only the last token of each sequence, and [own tokens] becomes [sequences].
    If the plan shares prompts, each prompt comes once, before the completions that continue its positions. A micro-batch
    without sequences is padding.
    `choices` (layers with experts, experts a token) also lays out the experts that the engine chose.
    """
    if micro_batch.sharing:
        assert layout.context == 1 and not ends_alone and choices is None, "refused in the recipe"
        rows = _shared_rows(batch, micro_batch)
    else:
        rows = Rows()
        for sample_id in micro_batch.samples:
            sample = batch.samples[sample_id]
            prompt, completion = sample.prompt_ids, sample.completion.token_ids
            sampled, start = np.flatnonzero(sample.completion.own), rows.lengths[-1]
            total = len(prompt) + len(completion)
            (slots,) = padded([total], layout)
            rows.heads.append(np.array([start + total - 1]) if ends_alone else start + len(prompt) - 1 + sampled)
            rows.targets.append(np.zeros(1) if ends_alone else completion[sampled])
            rows.add([prompt, completion, np.zeros(slots - total)], 0)

    if padding := micro_batch.slots - rows.lengths[-1]:
        assert layout.context == 1 or not micro_batch.samples, (
            "under context parallelism every sequence is padded to the whole alignment"
        )
        rows.add([np.zeros(padding)], 0)
        if micro_batch.sharing:
            rows.continues.append((0, 0))

    lengths, continues = rows.lengths, tuple(rows.continues)
    slots_here = own_slots(lengths, layout.context, context_rank)
    row = np.full(micro_batch.slots, -1)
    row[slots_here] = np.arange(len(slots_here))
    heads = row[np.concatenate([np.zeros(0, int), *rows.heads])]  # [own tokens], -1 for a row of another context rank

    routing = None
    if choices is not None:
        experts = np.full((micro_batch.slots, *choices), PADDING, dtype=np.int16)
        for sample_id, begin in zip(micro_batch.samples, lengths, strict=False):
            sample = batch.samples[sample_id]
            experts[begin : begin + sample.num_tokens] = UNRECORDED  # the last token of a sequence has no choice
            if (recorded := sample.completion.routing) is not None:
                experts[begin : begin + len(recorded)] = recorded
        routing = torch.from_numpy(experts[slots_here])

    placed = _on_device(
        device,
        parts_of(lengths, continues, layout.context, context_rank),
        bounds=lengths,
        input_ids=np.concatenate(rows.tokens)[slots_here],
        position_ids=np.concatenate(rows.positions)[slots_here],
        head_positions=heads[heads >= 0],
        heads=np.flatnonzero(heads >= 0),
        targets=np.concatenate([np.zeros(0, int), *rows.targets]),
    )
    prompts = (stop - start for start, stop in continues) if continues else repeat(0)
    return PackedMicroBatch(
        **placed,
        samples=micro_batch.samples,
        padding=padding if micro_batch.sharing else micro_batch.slots - micro_batch.tokens,
        context=layout.context,
        longest=max(stop - begin + prompt for begin, stop, prompt in zip(lengths, lengths[1:], prompts, strict=False)),
        own_lengths=tuple(len(part) for part in rows.targets),
        routing=routing,
        continues=continues,
    )


def _on_device(device: torch.device, parts: Parts, **columns: Any) -> dict[str, Any]:
    """Return the tensors of a micro-batch on the device, after one transfer, and its parts."""
    columns |= {"query_bounds": parts.query_bounds, "key_bounds": parts.key_bounds}
    arrays = [np.asarray(column, np.int32 if name.endswith("bounds") else np.int64) for name, column in columns.items()]
    placed: dict[str, Any] = dict(zip(columns, platform.upload(arrays, device), strict=True))
    for name in ("input_ids", "position_ids"):
        placed[name] = placed[name].unsqueeze(0)
    return placed | {"parts": parts}


@dataclass
class Rows:
    """The rows of a micro-batch so far, as lists of arrays that are laid end to end; fields as in `PackedMicroBatch`."""

    tokens: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    heads: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)
    lengths: list[int] = field(default_factory=lambda: [0])
    continues: list[tuple[int, int]] = field(default_factory=list)

    def add(self, tokens: Sequence[np.ndarray], position: int) -> None:
        """Add a part, whose first token has this position."""
        count = sum(map(len, tokens))
        self.tokens += tokens
        self.positions.append(position + np.arange(count))
        self.lengths.append(self.lengths[-1] + count)


def _shared_rows(batch: Batch, micro_batch: MicroBatch) -> Rows:
    """Lay out each prompt once, before the completions that continue it. Raises ValueError if prompts of a group differ."""
    rows, samples = Rows(), iter(micro_batch.samples)
    for size in micro_batch.sharing:
        run = [next(samples) for _ in range(size)]
        # A sample that was masked since has only dummy tokens.
        known = next((number for number in run if number not in batch.masked), run[0])
        prompt, first = batch.samples[known].prompt_ids, rows.lengths[-1]
        rows.add([prompt], 0)
        rows.continues.append((0, 0))
        for number in run:
            sample, start = batch.samples[number], rows.lengths[-1]
            if number not in batch.masked and not np.array_equal(sample.prompt_ids, prompt):
                raise ValueError(
                    f"samples {known} and {number} of one group have different prompts, so phases.*.share_prompts cannot "
                    "run them as one; set it to false"
                )
            completion, sampled = sample.completion.token_ids, np.flatnonzero(sample.completion.own)
            # The first token is predicted by the prompt's last row, the others by the rows before them.
            predicting = start - 1 + np.arange(len(completion))
            predicting[:1] = first + len(prompt) - 1
            rows.heads.append(predicting[sampled])
            rows.targets.append(completion[sampled])
            rows.add([completion], len(prompt))
            rows.continues.append((first, first + len(prompt)))
    return rows


def own_slots(bounds: Sequence[int], context: int, context_rank: int) -> np.ndarray:
    """Return the slots of a micro-batch that a context rank runs, in order. Each sequence has 2 x context chunks; context
    rank r runs chunk r from the front and chunk r from the back."""
    if context == 1:
        return np.arange(bounds[0], bounds[-1])
    slots: list[np.ndarray] = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        chunks = np.split(np.arange(start, stop), 2 * context)
        slots += [chunks[context_rank], chunks[-1 - context_rank]]
    return np.concatenate(slots)
