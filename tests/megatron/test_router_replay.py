"""Experts that the rollout chose, replayed by the trainer's routers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from megarl.models import ModelShape
from megarl.models.layout import Layout
from tests import router_cases
from tests.engine_cases import small_batch
from tests.megatron.test_matrix import TOLERANCE, differences
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

LAYOUTS = [
    (Layout(tensor=2, sequence_parallel=True), {}),
    (Layout(data=2, expert=2), {}),
    (Layout(context=2), {}),
    (Layout(), {"recompute": "selective"}),
    (Layout(pipeline=2, virtual_pipeline=2), {"recompute": "full"}),
    pytest.param(Layout(tensor=2, pipeline=2, sequence_parallel=True), {"recompute": "full"}, marks=pytest.mark.nightly),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("experts"), "qwen3_moe"))


@pytest.fixture(scope="module")
def alone(directory):
    """What one rank measures in one micro-batch."""
    return run_ranks(router_cases.replay, 1, directory, Layout(), 400, {})[0]


@pytest.mark.layout
def test_replaying_the_own_choice_changes_no_bit(directory):
    (results,) = run_ranks(router_cases.replay_own, 1, directory)
    (expected,), (replayed,), (unrecorded,), metrics = results
    for update in (replayed, unrecorded):
        assert (update.loss, update.grad_norm) == (expected.loss, expected.grad_norm)
        assert all(np.array_equal(update.outputs[name], column) for name, column in expected.outputs.items())
    assert metrics["mismatch/routing_share"] == 0.0
    lengths = small_batch(ModelShape.from_directory(directory).vocab).lengths
    assert metrics["actor/router_replay_share"] == pytest.approx(1 - len(lengths) / lengths.sum())


@pytest.mark.parametrize("layout,memory", LAYOUTS)
@pytest.mark.layout
def test_every_layout_replays_the_same_choice(directory, alone, layout, memory):
    results = run_ranks(router_cases.replay, layout.ranks, directory, layout, 40, memory)
    expected, shares = alone
    off = differences({"actor": results[0][0]}, {"actor": expected})
    assert max(off.values()) <= TOLERANCE, off
    for _, metrics in results:
        assert metrics == pytest.approx(shares, abs=0.01)  # a router at a border may choose otherwise


@pytest.mark.layout
def test_another_choice_gives_what_transformers_computes_with_it(directory, alone, monkeypatch):
    """Log-probabilities and the gradient's norm, of a forward pass whose routers are overruled."""
    shape = ModelShape.from_directory(directory)
    batch = small_batch(shape.vocab)
    routing = router_cases.another_choice(shape, batch)
    routing[3] = None
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    loss, logprobs, own_logprobs = torch.zeros(()), [], []
    for sample, (prompt, length) in enumerate(zip(batch.prompt_lengths, batch.lengths, strict=True)):
        sequence = batch.samples[sample]
        tokens = torch.from_numpy(np.concatenate([sequence.prompt_ids, sequence.completion.token_ids])).long().unsqueeze(0)
        rows = []
        for forced in (None, routing[sample]):
            for column, gate in enumerate(gates):
                monkeypatch.setattr(gate, "forward", _overruled(gate, None if forced is None else forced[:, column]))
            rows.append(model(tokens).logits[0, prompt - 1 : length - 1].log_softmax(-1))
        of_targets = [part.gather(-1, tokens[0, prompt:].unsqueeze(-1)).squeeze(-1) for part in rows]
        own_logprobs.append(of_targets[0].detach())
        logprobs.append(of_targets[1].detach())
        loss = loss - (of_targets[1] - 0.1 * (rows[1].exp() * rows[1]).sum(-1)).sum() / batch.completion_lengths.sum()
    loss.backward()
    norm = torch.stack([weight.grad.norm() for weight in model.parameters() if weight.grad is not None]).norm()
    first = alone[0][0]
    np.testing.assert_allclose(first.outputs["logprobs"], torch.cat(logprobs).numpy(), atol=2e-5)
    assert first.loss == pytest.approx(float(loss.detach()), rel=1e-5) and first.grad_norm == pytest.approx(
        float(norm.detach()), rel=1e-4
    )
    assert all(gate.weight.grad.abs().max() > 0 for gate in gates), "the weights of the chosen experts have gradients"
    changed = (torch.cat(own_logprobs) - torch.cat(logprobs)).abs()
    assert changed.mean() > 0.01, "the choice matters"
    assert alone[1]["mismatch/routing_share"] > 0.9  # 2 of 8 experts: 1 in 28 choices is the router's


def _overruled(gate, forced):
    """The gate's forward pass with other experts, for all but the last token."""

    def forward(hidden):
        logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(2).indices
        if forced is not None:
            chosen = torch.cat([torch.from_numpy(forced).long(), chosen[-1:]])
        weights = probabilities.gather(-1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    return forward
