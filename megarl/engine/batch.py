"""A step's batch on one trainer rank, and the packed micro-batches that are cut from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megarl.data.sample import Sample
from megarl.schedule import MicroBatch


@dataclass
class Batch:
    """All sequences of a step: everybody's lengths, this rank's tokens, everybody's per-token results.

    `samples` holds the tokens of the sequences that some phase runs on this data-parallel rank. `fields` maps a name
    ("logprobs", "values", "advantages", ...) to one fp32 tensor [completion tokens] a sequence, for every sequence:
    four bytes a token are cheap to replicate, and every rank then computes advantages and their whitening as the same
    sum in the same order, whatever the layout.
    """

    prompt_lengths: np.ndarray  # [sequences]
    completion_lengths: np.ndarray  # [sequences]
    groups: np.ndarray  # [sequences] explicit group ids
    rewards: np.ndarray  # [sequences] fp32
    valid: np.ndarray  # [sequences] bool: False where the reward could not be computed
    samples: dict[int, Sample] = field(default_factory=dict)
    fields: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def lengths(self) -> np.ndarray:
        return self.prompt_lengths + self.completion_lengths

    def gather(self, name: str, samples: Iterable[int]) -> Tensor:
        """The named per-token results of some sequences, end to end: [their completion tokens]."""
        return torch.cat([self.fields[name][sample] for sample in samples])


@dataclass(frozen=True)
class PackedMicroBatch:
    """Sequences laid end to end, on the device; behind them, where the layout pads, a sequence of dummy tokens.

    `head_positions` are the rows whose output predicts a completion token: token t is predicted at position t - 1,
    and a critic's value of the state before token t stands there too. No dummy token is one.
    """

    samples: tuple[int, ...]
    input_ids: Tensor  # [1, slots]
    position_ids: Tensor  # [1, slots]
    bounds: Tensor  # [sequences + 1] int32, cumulative lengths; one more where there is padding
    padding: int  # dummy tokens
    longest: int
    head_positions: Tensor  # [completion tokens]
    targets: Tensor  # [completion tokens]
    completion_lengths: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        """Tokens that the model runs."""
        return self.input_ids.shape[1]

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequences."""
        return self.num_slots - self.padding

    @property
    def num_sequences(self) -> int:
        return len(self.bounds) - 1 - bool(self.padding)


def pack(batch: Batch, micro_batch: MicroBatch, device: torch.device) -> PackedMicroBatch:
    """Lay the sequences of a planned micro-batch end to end, and pad them to its slots.

    The padding is a sequence of its own: no token attends to it, and it is no longer than the alignment.
    """
    tokens, positions, heads, targets, lengths, start = [], [], [], [], [0], 0
    for sample_id in micro_batch.samples:
        sample = batch.samples[sample_id]
        prompt, completion = sample.prompt_ids, sample.completion.token_ids
        total = len(prompt) + len(completion)
        tokens += [prompt, completion]
        positions.append(np.arange(total))
        heads.append(start + len(prompt) - 1 + np.arange(len(completion)))
        targets.append(completion)
        start += total
        lengths.append(start)

    padding = micro_batch.slots - start
    if padding:
        tokens.append(np.zeros(padding))
        positions.append(np.arange(padding))
        lengths.append(micro_batch.slots)

    def on_device(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    return PackedMicroBatch(
        samples=micro_batch.samples,
        input_ids=on_device(tokens).unsqueeze(0),
        position_ids=on_device(positions).unsqueeze(0),
        bounds=torch.tensor(lengths, dtype=torch.int32, device=device),
        padding=padding,
        longest=max(stop - begin for begin, stop in zip(lengths, lengths[1:], strict=False)),
        head_positions=on_device(heads),
        targets=on_device(targets),
        completion_lengths=tuple(len(part) for part in targets),
    )
