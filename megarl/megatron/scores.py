"""Score sequences that no rollout made, outside of a step's batch; `rollout/engine.py` has the same for engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megarl.data.sample import Completion, Sample
from megarl.megatron.batch import Batch
from megarl.megatron.role import Role, share_results
from megarl.schedule import Schedule, compare, plan_phase


def score_sequences(role: Role, sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Return a role's log-probabilities at temperature 1 of all tokens but the first, [sequences, tokens - 1], on every
    rank. The sequences have one length. Each is a micro-batch; some run again where the layout needs more. Collective."""
    layout, length = role.place.layout, len(sequences[0])
    unit = layout.data * layout.micro_batch_step
    count = -(-len(sequences) // unit) * unit
    repeated, unread = [sequences[number % len(sequences)] for number in range(count)], np.zeros(length - 1, np.float32)
    samples = {
        number: Sample(number, tokens[:1], Completion(tokens[1:], unread, "length", np.zeros(len(unread), np.int64)))
        for number, tokens in enumerate(repeated)
    }
    ones, completions = np.ones(count, int), np.full(count, length - 1)
    batch = Batch(ones, completions, np.arange(count), np.zeros(count, np.float32), ones > 0, samples=samples, sampled=False)
    (mini_batch,) = plan_phase(Schedule("weight_sync", sequences=1), [length] * count, layout, seed=0).mini_batches
    results, executed = role.forward(batch, mini_batch)
    compare(mini_batch, role.place.data_rank, executed)
    scores = share_results(results.get("logprobs", {}), mini_batch, batch, role.place)
    return torch.stack(scores[: len(sequences)]).numpy()
