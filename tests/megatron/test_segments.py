"""Splitting a rollout's history into segments that train the same tokens changes no gradient: for every advantage,
aggregation, policy loss and correction, and any cut. Under layouts with several ranks: tests/trainer/test_segments.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.algorithm.estimate import ADVANTAGES, step_advantages
from megarl.megatron.batch import Batch, pack
from megarl.megatron.objective import PolicyObjective, ValueObjective, token_weights
from megarl.models.layout import Layout
from megarl.recipe.algorithm_section import AlgorithmSection
from megarl.schedule import Plan, Schedule, plan_phase
from tests.engine_cases import in_groups, random_batch
from tests.segment_cases import cut_at_random, cut_batch

SIZE, LONGEST, MOST, VOCAB = 3, 12, 4, 50
AGGREGATIONS = get_args(AlgorithmSection.model_fields["aggregation"].annotation)
LOSSES: list[dict[str, Any]] = [
    *({"kind": kind} for kind in ("clip", "gspo", "cispo", "gmpo", "sapo", "policy_gradient")),
    {"kind": "clip", "dual": 3.0},
    {"kind": "function", "target": "tests.own_algorithms:bounded", "options": {"bound": 0.3}},
]
CORRECTIONS: list[dict[str, Any] | None] = [
    None, *({"correction": "mask", "level": level, "cap": 1.5, "floor": 0.5} for level in ("token", "sequence", "geometric"))
]  # fmt: skip


def rollouts_of(seed: int, lengths: list[int], vocab: int = VOCAB) -> Batch:
    """Groups of SIZE rollouts with observations, rewards, and what forward phases gave for the policy's tokens."""
    generator = np.random.default_rng(seed)
    batch = in_groups(
        random_batch(vocab, [(2 + number // SIZE, length) for number, length in enumerate(lengths)], seed), SIZE
    )
    for number, sample in batch.samples.items():
        count = len(sample.completion.token_ids)
        own_mask = generator.random(count) < 0.7
        own_mask[-1] = True
        logprobs = np.where(own_mask, generator.normal(-np.log(vocab), 0.5, count), 0.0).astype(np.float32)
        batch.samples[number] = replace(sample, completion=replace(sample.completion, own=own_mask, logprobs=logprobs))
    own_lengths = np.array([int(sample.completion.own.sum()) for sample in batch.samples.values()])
    valid = generator.random(len(lengths)) < 0.8
    valid[0] = True
    fields: dict[str, Sequence[torch.Tensor]] = {
        name: [torch.from_numpy(generator.normal(-np.log(vocab), 0.5, count).astype(np.float32)) for count in own_lengths]
        for name in ("logprobs", "reference_logprobs", "values")
    }
    return replace(
        batch, own_lengths=own_lengths, rewards=generator.normal(size=len(lengths)).astype(np.float32), valid=valid,
        truncated=(generator.random(len(lengths)) < 0.2) & (np.arange(len(lengths)) > 0),
        baselines=np.repeat(generator.normal(size=len(lengths) // SIZE), SIZE).astype(np.float32), fields=fields,
    )  # fmt: skip


def learned(settings: AlgorithmSection, batch: Batch) -> Batch:
    """The batch with its advantages, and returns if there are any."""
    advantages, returns, valid, _ = step_advantages(settings, batch.step_rewards(LONGEST, "a limit"))
    fields = {"advantages": advantages} | ({} if returns is None else {"returns": returns})
    return replace(batch.with_fields(**fields), valid=valid.numpy()[batch.rollouts])


def planned(batch: Batch, schedule: Schedule, layout: Layout) -> Plan:
    lengths, groups, prompts, rollouts, prefixes = (
        column.tolist() for column in (batch.lengths, batch.groups, batch.prompt_lengths, batch.rollouts, batch.prefixes)
    )
    return plan_phase(schedule, lengths, layout, 5, groups=groups, prompts=prompts, rollouts=rollouts, prefixes=prefixes)


def gradients(settings: AlgorithmSection, batch: Batch, schedule: Schedule, layout: Layout) -> list[torch.Tensor]:
    """Of each update, that of the loss by each own token's log-probability, entropy and value, in the batch's order."""
    batch, result = learned(settings, batch), list[torch.Tensor]()
    own_lengths = batch.own_lengths.tolist()
    # What the networks would give now; a function of the token's place alone.
    columns = {"logprobs": (-np.log(VOCAB), 0.1), "entropy": (1.0, 0.3), "values": (0.0, 0.5)}
    tokens = torch.arange(sum(own_lengths), dtype=torch.float32)
    for mini_batch in planned(batch, schedule, layout).mini_batches:
        weights = token_weights(batch, mini_batch, settings.aggregation, LONGEST)
        outputs = {
            name: (mean + spread * torch.sin(tokens * 1.7)).requires_grad_() for name, (mean, spread) in columns.items()
        }
        loss = torch.zeros(())
        for micro in (micro_batch for rank in mini_batch.micro_batches for micro_batch in rank if micro_batch.samples):
            packed = pack(batch, micro, torch.device("cpu"), layout)
            here = {
                name: torch.cat([column.split(own_lengths)[s] for s in micro.samples]) for name, column in outputs.items()
            }
            loss = loss + PolicyObjective(settings, batch, weights)(packed, here)[0]
            if settings.value_loss is not None:
                loss = loss + ValueObjective(settings, batch, weights)(packed, here)[0]
        result += torch.autograd.grad(loss, list(outputs.values()), allow_unused=True, materialize_grads=True)
    return result


@st.composite
def algorithms(draw: st.DrawFn) -> AlgorithmSection:
    loss, mismatch = draw(st.sampled_from(LOSSES)), draw(st.sampled_from(CORRECTIONS))
    of_rollouts = [name for name in ADVANTAGES if name not in ("dpo", "bradley_terry")]  # pairs of data have no segments
    advantage = draw(st.sampled_from([*of_rollouts, "tests.own_algorithms:centred"]))
    place = draw(st.sampled_from(["loss", "reward"]))
    return AlgorithmSection.model_validate({
        "advantage": advantage, "group_size": SIZE, "policy_loss": loss, "mismatch": mismatch,
        "aggregation": draw(st.sampled_from(AGGREGATIONS)), "entropy_coefficient": 0.1,
        "kl": {"place": place, "coefficient": 0.2, "estimator": "k3"},
        "overlong": {"mask": draw(st.booleans()), "buffer": 4, "penalty": 0.5},
        **({"gae": {"discount": 0.9, "smoothing": 0.8}, "value_loss": {"clip": 0.2}} if advantage == "gae" else {}),
    })  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(algorithms(), st.integers(0, 2**32 - 1), st.sampled_from([1, 2]), st.booleans(), st.booleans())
def test_no_cut_of_a_history_changes_a_gradient(
    algorithm: AlgorithmSection, seed: int, data: int, counts_sequences: bool, shares: bool
) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, LONGEST + 1, 4 * SIZE).tolist()
    whole = rollouts_of(seed, lengths)
    parts = cut_batch(whole, [cut_at_random(sample.completion, generator, MOST) for sample in whole.samples.values()])
    schedule = Schedule(
        "actor_update",
        sequences=5 if counts_sequences else None,
        max_tokens=None if counts_sequences else MOST * (LONGEST + 6),
        mini_batch=2 * SIZE,
        share_prompts=shares,
        together=MOST if algorithm.has_rollout_terms else 1,
    )
    wanted, actual = (gradients(algorithm, batch, schedule, Layout(data=data)) for batch in (whole, parts))
    assert any(gradient.abs().max() > 0 for gradient in wanted)
    for expected, other in zip(wanted, actual, strict=True):
        torch.testing.assert_close(other, expected, rtol=2e-4, atol=1e-6)
