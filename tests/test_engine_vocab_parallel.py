"""Log-probabilities and entropy from cut logits equal torch's from whole ones, gradients too."""

import pytest
import torch

from megarl.reshard.boxes import Layout
from tests.ranks import run_ranks

VOCAB, TOKENS, TEMPERATURE = 11, 7, 0.7


def _inputs():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(TOKENS, VOCAB, generator=generator) * 3
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    weights = torch.randn(2, TOKENS, generator=generator)
    return logits, targets, weights


def _cut(compile):
    """This rank's part of the padded vocabulary: outputs and the gradient of its columns."""
    from megarl.engine.vocab_parallel import LogProbabilities
    from tests.engine_cases import start

    place = start(Layout(tensor=2))
    logits, targets, weights = _inputs()
    padded = torch.cat([logits, torch.randn(TOKENS, 16 - VOCAB)], dim=-1)  # 16 columns, 5 of them padding
    width = 16 // place.layout.tensor
    mine = padded[:, place.tensor_rank * width : (place.tensor_rank + 1) * width].clone().requires_grad_()
    head = LogProbabilities(VOCAB, TEMPERATURE, place.tensor_group, compile)
    logprobs, entropy = head(mine, targets)
    (weights[0] * logprobs + weights[1] * entropy).sum().backward()
    assert mine.grad is not None
    return logprobs.detach().numpy(), entropy.detach().numpy(), mine.grad.numpy()


@pytest.mark.parametrize("compile", [False, True])
def test_cut_logits_give_what_whole_logits_give(compile):
    import numpy as np

    logits, targets, weights = _inputs()
    logits.requires_grad_()
    logs = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    expected_logprobs = logs.gather(-1, targets[:, None])[:, 0]
    expected_entropy = -(logs.exp() * logs).sum(-1)
    (weights[0] * expected_logprobs + weights[1] * expected_entropy).sum().backward()
    found = run_ranks(_cut, 2, compile)
    for logprobs, entropy, _ in found:
        np.testing.assert_allclose(logprobs, expected_logprobs.detach(), atol=1e-5)
        np.testing.assert_allclose(entropy, expected_entropy.detach(), atol=1e-5)
    gradient = np.concatenate([part for _, _, part in found], axis=-1)
    np.testing.assert_allclose(gradient[:, :VOCAB], logits.grad, atol=1e-5)
    assert not gradient[:, VOCAB:].any()
