"""The divergence from a teacher, block by block, equals that of whole distributions, gradients too, in bounded memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks

KINDS = ("reverse_kl", "forward_kl", "jensen_shannon")
SMALL = 4 * 4 * 64 * 5  # of each block that is held at once, five rows of 64 columns in fp32


def _cases() -> list[Any]:
    from tests.divergence_cases import Case

    cases = [case for kind in KINDS for case in (
        Case(kind),  # of two ranks the second has three tokens
        Case(kind, vocab=100),  # and here none
        Case(kind, temperature=0.7, block_bytes=SMALL, block_rows=5),  # ragged blocks of rows and columns
        Case(kind, rows=13, vocab=1000, padded=1024, temperature=1.3, block_bytes=SMALL, block_rows=3),
        Case(kind, rows=0),  # a context rank whose part of a sequence is prompt
    )]  # fmt: skip
    return [*cases, Case("jensen_shannon", mixture=0.1), Case("jensen_shannon", mixture=0.9)]


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("tensor", [1, 2])
def test_blocks_give_what_whole_distributions_give(tensor: int, main_grad: bool) -> None:
    """In fp64 over the vocabulary; over the likeliest tokens, which travel in fp32, in fp32."""
    from tests.divergence_cases import run

    whole = _cases()
    likeliest = [replace(case, top_k=5, precision=torch.float32) for case in whole]
    ranks = run_ranks(run, tensor, [*whole, *likeliest], tensor, main_grad)
    for number, case in enumerate([*whole, *likeliest]):
        results, expected = [rank[number] for rank in ranks], case.expected()
        tolerance = 1e-9 if case.top_k is None else 2e-6
        gradient = np.concatenate([result.pop("weight") for result in results])
        np.testing.assert_allclose(gradient, expected.pop("weight"), atol=tolerance, err_msg=str(case))
        for result in results:
            for name, value in expected.items():
                np.testing.assert_allclose(result[name], value, atol=tolerance, err_msg=f"{name} of {case}")


def test_distributions_that_share_no_token_have_a_finite_divergence() -> None:
    """Each gives its own token a probability of 1 and the other's a probability that fp32 rounds to 0."""
    from megarl.algorithm.divergence import mixture_slopes, mixture_sums

    logs, teacher_logs = torch.tensor([[0.0, -200.0]]), torch.tensor([[-200.0, 0.0]])
    policy, teacher = mixture_sums(logs.clone(), teacher_logs.clone(), 0.3)
    np.testing.assert_allclose([policy.item(), teacher.item()], [-np.log(0.7), -np.log(0.3)], rtol=1e-6)
    np.testing.assert_allclose(mixture_slopes(logs, teacher_logs, policy, 0.3), 0.0, atol=1e-7)


@pytest.mark.nightly
def test_divergences_are_those_of_trl() -> None:
    """Of `GKDTrainer`, whose `beta` is 0 for the forward KL, 1 for the reverse KL, and else the teacher's share."""
    from trl.experimental.gkd import GKDTrainer

    from tests.divergence_cases import Case, run

    betas = {"forward_kl": 0.0, "reverse_kl": 1.0, "jensen_shannon": 0.3}
    cases = [Case(kind, mixture=0.3, temperature=0.7, precision=torch.float32) for kind in betas]
    (results,) = run_ranks(run, 1, cases, 1, False)
    for case, ours in zip(cases, results, strict=True):
        hidden, weight, rows, teacher, slope = case.inputs()
        hidden.requires_grad_(), weight.requires_grad_()
        logits = hidden @ weight[: case.vocab].t(), rows @ teacher[: case.vocab].t()
        value = GKDTrainer.generalized_jsd_loss(
            *logits, beta=betas[case.kind], temperature=case.temperature, reduction="none"
        ).sum(-1)
        (slope * value).sum().backward()
        assert hidden.grad is not None and weight.grad is not None
        for name, tensor in (("value", value.detach()), ("hidden", hidden.grad), ("weight", weight.grad)):
            np.testing.assert_allclose(ours[name], tensor.numpy(), atol=1e-5, err_msg=f"{name} of {case.kind}")
