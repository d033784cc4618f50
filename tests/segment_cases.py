"""Batches whose rollouts are cut into segments that train the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megarl.data.sample import Completion, Sample
from megarl.megatron.batch import Batch

Span = tuple[int, int, int]  # where a segment's completion begins, and the tokens [start, stop) that it trains


def cut_at_random(completion: Completion, generator: np.random.Generator, most: int) -> list[Span]:
    """Up to `most` segments of a completion, each with a token of the policy, which has the last token. The history of a
    later segment ends before the tokens that it trains, or earlier: the tokens in between are observations then."""
    sampled = np.flatnonzero(completion.own) + 1
    count = int(generator.integers(1, min(most, len(sampled)) + 1))
    bounds = [0, *sorted(generator.choice(sampled[:-1], count - 1, replace=False).tolist()), len(completion.own)]
    begins = [int(generator.choice([start, generator.integers(0, start + 1)])) for start in bounds[:-1]]
    return list(zip(begins, bounds, bounds[1:], strict=False))


def cut(sample: Sample, spans: Sequence[Span]) -> list[Sample]:
    """The segments of a sample. Each token that the policy sampled is trained in one of them, after the same tokens."""
    whole, pieces = sample.completion, []
    for begin, start, stop in spans:
        part = slice(begin, stop)
        trained = whole.own & (np.arange(len(whole.own)) >= start)
        assert trained[part].any(), "a segment has a token to train"
        completion = Completion(
            whole.token_ids[part], whole.logprobs[part], whole.finish_reason, whole.versions[part], own=trained[part]
        )
        prompt = np.concatenate([sample.prompt_ids, whole.token_ids[:begin]])
        pieces.append(replace(sample, prompt_ids=prompt, completion=completion))
    return pieces


def cut_batch(batch: Batch, spans: Sequence[Sequence[Span]]) -> Batch:
    """The batch with sequence i as a rollout of the segments `spans[i]`."""
    pieces = [cut(batch.samples[number], of) for number, of in enumerate(spans)]
    samples = [piece for of in pieces for piece in of]
    rollouts = np.repeat(np.arange(len(spans)), [len(of) for of in pieces])
    own_lengths = [int(sample.completion.own.sum()) for sample in samples]
    numbers: dict[bytes, int] = {}
    # The own tokens stay in their order.
    fields: dict[str, Sequence[torch.Tensor]] = {
        name: list(torch.cat([*rows]).split(own_lengths)) for name, rows in batch.fields.items()
    }
    return replace(
        batch, prompt_lengths=np.array([len(sample.prompt_ids) for sample in samples]),
        completion_lengths=np.array([len(sample.completion.token_ids) for sample in samples]),
        own_lengths=np.array(own_lengths),
        groups=batch.groups[rollouts], rewards=batch.rewards[rollouts], valid=batch.valid[rollouts],
        truncated=None if batch.truncated is None else batch.truncated[rollouts],
        baselines=None if batch.baselines is None else batch.baselines[rollouts], samples=dict(enumerate(samples)),
        fields=fields, rollouts=rollouts,
        prefixes=np.array([numbers.setdefault(sample.prompt_ids.tobytes(), len(numbers)) for sample in samples]),
    )  # fmt: skip
