"""Observations between the policy's turns, and tokens of older weights: loss, gradient and metrics are those of the policy's
own tokens that count, written out by hand, the same on every rank of every layout."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.data.sample import Completion
from megarl.megatron.batch import Batch
from megarl.megatron.objective import PolicyObjective, token_weights
from megarl.megatron.step_metrics import update_metrics
from megarl.models.layout import Layout
from megarl.recipe.algorithm_section import AlgorithmSection
from megarl.schedule import Schedule, plan_phase
from tests.engine_cases import engine, planned, random_batch, start
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

PROMPTS = [5, 1, 6, 3]
# The weight version of each token of the policy; `.` marks an observation. A segment may begin with one and ends with the
# policy, whose turn may be a single token.
TURNS = ["..00...00", "0.0", "000....0..00", "0"]
COEFFICIENT, CAP = 0.1, 1.05
SETTINGS = AlgorithmSection.model_validate({
    "advantage": "grpo", "group_size": 2, "policy_loss": {"kind": "policy_gradient"}, "aggregation": "sequence_mean",
    "entropy_coefficient": COEFFICIENT, "mismatch": {"correction": "truncate", "level": "sequence", "cap": CAP},
})  # fmt: skip


def batch_of(vocab: int, marks: list[str], version: int = 0) -> Batch:
    """Random tokens, and random log-probabilities of the engine near a uniform policy's; what observations have there is
    wrong on purpose."""
    batch = random_batch(vocab, [(prompt, len(of)) for prompt, of in zip(PROMPTS, marks, strict=True)])
    generator = np.random.default_rng(4)
    for index, of in enumerate(marks):
        mask = np.array([mark != "." for mark in of])
        versions = np.array([version if mark == "." else int(mark) for mark in of])
        logprobs = np.where(mask, -np.log(vocab) + 0.1 * generator.standard_normal(len(of)), -1e3).astype(np.float32)
        completion = Completion(batch.samples[index].completion.token_ids, logprobs, "stop", versions, own=mask)
        batch.samples[index] = replace(batch.samples[index], completion=completion)
    own_lengths = np.array([len(of) - of.count(".") for of in marks])
    advantages = torch.linspace(-1.0, 1.5, len(marks))
    spread = [advantage.expand(int(length)) for advantage, length in zip(advantages, own_lengths, strict=True)]
    return replace(batch, own_lengths=own_lengths).with_fields(advantages=spread)


def trained(directory: str, layout: Layout) -> dict[str, Any]:
    """Log-probabilities of a forward phase, and what an update did."""
    place = start(layout)
    actor = engine(directory, place, lr=1e-3)
    batch = batch_of(actor.shape.vocab, TURNS)
    mini_batch = planned(batch, layout, max_tokens=24)
    with actor.present(training=True):
        outputs, _ = actor.forward(batch, mini_batch)
        weights = token_weights(batch, mini_batch, SETTINGS.aggregation)
        update = actor.update(batch, mini_batch, PolicyObjective(SETTINGS, batch, weights))
    logprobs = {sample: tensor.numpy() for sample, tensor in outputs["logprobs"].items()}
    return {"logprobs": logprobs, "sums": update.sums, "grad_norm": update.grad_norm}


@pytest.mark.layout
@pytest.mark.parametrize("layout", [Layout(), Layout(context=2)], ids=["one rank", "two context ranks"])
def test_loss_gradient_and_metrics_are_those_of_own_tokens_by_brute_force(tmp_path: Path, layout: Layout) -> None:
    from transformers import AutoModelForCausalLM

    directory = save_tiny_model(tmp_path / "model", "qwen3", False)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    batch = batch_of(model.config.vocab_size, TURNS)
    loss, wanted, gap, entropies, tokens = torch.zeros(()), {}, 0.0, 0.0, 0
    for index, sample in batch.samples.items():
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion.token_ids]).astype(np.int64))
        rows = torch.log_softmax(model(ids[None]).logits[0], -1)
        own_positions = [len(sample.prompt_ids) + at for at, mark in enumerate(TURNS[index]) if mark != "."]
        logprobs = torch.stack([rows[at - 1, ids[at]] for at in own_positions])
        entropy = torch.stack([-(rows[at - 1].exp() * rows[at - 1]).sum() for at in own_positions])
        rollout = torch.tensor([sample.completion.logprobs[at - len(sample.prompt_ids)] for at in own_positions])
        ratio = (logprobs.detach() - rollout).sum().exp().clamp(max=CAP)
        advantage = batch.fields["advantages"][index][0]
        loss = loss + ((-advantage * ratio * logprobs - COEFFICIENT * entropy).sum() / len(own_positions)) / len(TURNS)
        wanted[index] = logprobs.detach().numpy()
        gap += float((logprobs.detach() - rollout).abs().sum())
        entropies, tokens = entropies + float(entropy.detach().sum()), tokens + len(own_positions)
    loss.backward()
    norm = torch.stack([weight.grad.norm() for weight in model.parameters() if weight.grad is not None]).norm()
    assert tokens < sum(map(len, TURNS)), "some tokens are observations"
    for rank in run_ranks(trained, layout.ranks, str(directory), layout):
        assert rank["logprobs"].keys() == wanted.keys()
        for index, said_there in wanted.items():
            np.testing.assert_allclose(rank["logprobs"][index], said_there, atol=1e-5)
        assert rank["sums"]["tokens"] == tokens
        assert rank["sums"]["loss"] == pytest.approx(float(loss), abs=1e-5)
        assert rank["sums"]["mismatch_sum"] == pytest.approx(gap, rel=1e-4)
        assert rank["sums"]["entropy_sum"] == pytest.approx(entropies, rel=1e-5)
        assert rank["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


# Version 5 is trained.
VERSIONS = ["44.5", "444", "3.345", "5"]
VERSION, MOST, LARGEST, SMALLEST = 5, 3, 2.0, 0.6
MASKED = 1
BOUNDS = {"correction": "mask", "level": "token", "cap": LARGEST, "floor": SMALLEST}
STALE_SETTINGS = AlgorithmSection.model_validate({"advantage": "grpo", "group_size": 2, "mismatch": BOUNDS})


def stale_batch(vocab: int) -> Batch:
    """Also with log-probabilities of the proximal policy."""
    batch = batch_of(vocab, VERSIONS, VERSION)
    generator = torch.Generator().manual_seed(4)
    logprobs = [
        torch.from_numpy(sample.completion.logprobs[sample.completion.own])
        + torch.randn(int(sample.completion.own.sum()), generator=generator)
        for sample in batch.samples.values()
    ]
    valid = np.arange(len(VERSIONS)) != MASKED
    return replace(batch, valid=valid, version=VERSION, max_staleness=MOST).with_fields(logprobs=logprobs)


def trained_stale(directory: str, layout: Layout) -> dict[str, float]:
    """The metrics of two updates on this rank."""
    place = start(layout)
    actor = engine(directory, place, lr=1e-3)
    batch = stale_batch(actor.shape.vocab)
    plan = plan_phase(Schedule("actor_update", max_tokens=24, mini_batch=2), batch.lengths.tolist(), layout, 0)
    updates = []
    with actor.present(training=True):
        for mini_batch in plan.mini_batches:
            weights = token_weights(batch, mini_batch, STALE_SETTINGS.aggregation)
            updates.append(actor.update(batch, mini_batch, PolicyObjective(STALE_SETTINGS, batch, weights)))
    assert len(updates) == 2
    return update_metrics("actor", plan, updates, place)


def by_hand(batch: Batch) -> dict[str, float]:
    """Every metric of weights and staleness, from a list of the tokens that count."""
    rows: list[tuple[int, float, float, bool]] = []
    num_beyond = 0
    for index, sample in batch.samples.items():
        behavior, versions = sample.completion.logprobs[sample.completion.own], [v for v in VERSIONS[index] if v != "."]
        pairs = zip(batch.fields["logprobs"][index].tolist(), behavior.tolist(), versions, strict=True)
        for proximal, sampled, version in pairs if index != MASKED else ():
            weight = math.exp(proximal - sampled)
            outside = weight > LARGEST or weight < SMALLEST
            num_beyond += weight > LARGEST
            rows.append((VERSION - int(version), abs(proximal - sampled), 0.0 if outside else weight, outside))
    weights = [weight for _, _, weight, _ in rows]
    metrics = {
        "mismatch/weight_mean": sum(weights) / len(rows),
        "mismatch/weight_max": max(weights),
        "mismatch/beyond_cap_share": num_beyond / len(rows),
        "mismatch/effective_sample_share": sum(weights) ** 2 / (len(rows) * sum(weight**2 for weight in weights)),
        "mismatch/corrected_share": sum(outside for *_, outside in rows) / len(rows),
        "staleness/mean": sum(staleness for staleness, *_ in rows) / len(rows),
        "staleness/max": max(staleness for staleness, *_ in rows),
    }
    for number in range(MOST + 1):
        part = [row for row in rows if row[0] == number]
        metrics[f"staleness/{number}/token_share"] = len(part) / len(rows)
        metrics[f"staleness/{number}/logprob_mean"] = sum(row[1] for row in part) / max(len(part), 1)
        metrics[f"staleness/{number}/corrected_share"] = sum(row[3] for row in part) / max(len(part), 1)
    return metrics


@pytest.mark.layout
@pytest.mark.parametrize("layout", [Layout(), Layout(data=2), Layout(pipeline=2), Layout(context=2)], ids=str)
def test_metrics_of_staleness_are_the_same_under_every_layout(tmp_path: Path, layout: Layout) -> None:
    directory = save_tiny_model(tmp_path / "model", "qwen3", False)
    wanted = by_hand(stale_batch(64))
    assert 0 < wanted["mismatch/corrected_share"] < 1 and 0 < wanted["mismatch/effective_sample_share"] < 1
    assert wanted["staleness/3/token_share"] == 0, "nothing is so old, and its metrics are there"
    for metrics in run_ranks(trained_stale, layout.ranks, str(directory), layout):
        shown = {key: value for key, value in metrics.items() if key in wanted or "stale" in key}
        assert shown == pytest.approx(wanted, rel=1e-5)
