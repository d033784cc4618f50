"""Learning from pairs of a chosen and a rejected answer: the margin of a pair, its loss, and the slope of that loss.

A batch has the pairs one after the other, the chosen sequence first. A pair counts if both of its sequences are valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megarl.recipe.algorithm_section import DpoSection


class PairSlopes(NamedTuple):
    """The weight of each sequence in the update, which sequences count, and metrics of the loss."""

    weights: Tensor  # [sequences] fp64
    valid: Tensor  # [sequences] bool
    metrics: dict[str, float]


def implicit_rewards(logprobs: Sequence[Tensor], reference: Sequence[Tensor], section: DpoSection) -> Tensor:
    """Return beta * log(policy / reference) of each sequence, [sequences] fp64, from [own tokens] of each.

    Source: Rafailov et al. 2023 (DPO, arXiv:2305.18290), section 4.
    """
    ratios = [(new.double() - old.double()).sum() for new, old in zip(logprobs, reference, strict=True)]
    return section.beta * torch.stack(ratios)


def pair_slopes(scores: Tensor, valid: Tensor, scale: float = 1.0, label_smoothing: float = 0.0) -> PairSlopes:
    """Return the weights w_i with which the loss sum_i -w_i x_i / (sequences that count) has the gradient of the pairs' mean
    loss, where score i rises by `scale` with x_i: by beta with the log-probability of DPO, by 1 with a reward model's score.

        m    = score of the chosen - score of the rejected
        loss = -(1 - e) log sigmoid(m) - e log sigmoid(-m), e = label_smoothing
        -d loss / d score of the chosen = sigmoid(-m) - e, and the opposite for the rejected

    scores [sequences], valid [sequences] bool.
    Sources: Bradley and Terry 1952, as in Ouyang et al. 2022 (InstructGPT, arXiv:2203.02155), equation 1; Rafailov et al.
    2023 (DPO, arXiv:2305.18290), equation 7 and the gradient below it; label smoothing: Mitchell 2023, "A note on DPO with
    noisy preferences".
    """
    pairs, counted = scores.double().view(-1, 2), valid.view(-1, 2).all(1)
    margin = pairs[:, 0] - pairs[:, 1]
    losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    slope = torch.where(counted, torch.sigmoid(-margin) - label_smoothing, 0.0)
    weights = 2.0 * scale * torch.stack([slope, -slope], 1).flatten()  # each pair is two of the sequences that count
    metrics: dict[str, float] = {}
    if counted.any():
        known = {"loss": losses, "accuracy": (margin > 0).double(), "margin": margin}
        known |= {"chosen": pairs[:, 0], "rejected": pairs[:, 1]}
        metrics = {f"preference/{name}": float(values[counted].mean()) for name, values in known.items()}
    return PairSlopes(weights, counted.repeat_interleave(2), metrics)
